//! The rank of this process and the address of the store, from the variables that launchers set.

use std::str::FromStr;

use overdrive_core::is_loopback;

use crate::{Error, Result};

/// torchrun's default port.
const DEFAULT_PORT: u16 = 29500;

/// The launcher that set the variables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Launcher {
    /// No launcher: a single process.
    None,
    /// `RANK` and `WORLD_SIZE`: torchrun, a Kubernetes job, [`Launch`](crate::Launch).
    Torch,
    /// `OMPI_COMM_WORLD_*`: Open MPI's mpirun.
    OpenMpi,
    /// `PMI_*`: MPICH, Intel MPI and others with Hydra.
    Pmi,
    /// `SLURM_*`: srun.
    Slurm,
}

/// The ranks of a process, and the address of the store at which the processes of a group meet.
///
/// | | torchrun, Kubernetes | Open MPI | MPICH, Intel MPI | srun |
/// |---|---|---|---|---|
/// | rank | `RANK` | `OMPI_COMM_WORLD_RANK` | `PMI_RANK` | `SLURM_PROCID` |
/// | world size | `WORLD_SIZE` | `OMPI_COMM_WORLD_SIZE` | `PMI_SIZE` | `SLURM_NTASKS` |
/// | local rank | `LOCAL_RANK` | `OMPI_COMM_WORLD_LOCAL_RANK` | `MPI_LOCALRANKID` | `SLURM_LOCALID` |
/// | local world size | `LOCAL_WORLD_SIZE` | `OMPI_COMM_WORLD_LOCAL_SIZE` | `MPI_LOCALNRANKS` | `SLURM_NTASKS_PER_NODE` |
/// | address | `MASTER_ADDR` | the same, or this machine if all run on it | as Open MPI | the same, or `SLURM_LAUNCH_NODE_IPADDR` |
/// | port | `MASTER_PORT` | the same, or 29500 | as Open MPI | as Open MPI |
///
/// The first launcher whose rank variable is set is used (torch's variables before MPI's, because mpirun may start
/// torchrun). Slurm's variables are used only inside an srun step, because sbatch also sets them for a script that
/// runs as a single process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendezvous {
    /// The rank of this process, from 0.
    pub rank: usize,
    /// The number of processes in the group.
    pub world_size: usize,
    /// The rank of this process on its machine: the index of its GPU.
    pub local_rank: usize,
    /// The number of processes on this machine.
    pub local_world_size: usize,
    /// The host name or address of the store.
    pub master_addr: String,
    /// The port of the store.
    pub master_port: u16,
    /// The number of times the launcher has restarted the group; each start uses keys of its own in the store.
    pub restart_count: usize,
    /// The launcher's name for the run.
    pub run_id: String,
    /// If `true`, the launcher hosts the store, and rank 0 is a client like the others.
    pub launcher_hosts_store: bool,
    /// The launcher that set the variables.
    pub launcher: Launcher,
}

impl Default for Rendezvous {
    /// Returns the rendezvous of a single process.
    fn default() -> Self {
        Self {
            rank: 0,
            world_size: 1,
            local_rank: 0,
            local_world_size: 1,
            master_addr: "127.0.0.1".to_owned(),
            master_port: DEFAULT_PORT,
            restart_count: 0,
            run_id: "none".to_owned(),
            launcher_hosts_store: false,
            launcher: Launcher::None,
        }
    }
}

/// The variable names of one launcher.
struct Names {
    launcher: Launcher,
    rank: &'static str,
    world_size: &'static str,
    local_rank: &'static str,
    local_world_size: &'static str,
}

/// The launchers in the order in which they are looked for.
const NAMES: [Names; 4] = [
    Names {
        launcher: Launcher::Torch,
        rank: "RANK",
        world_size: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
        local_world_size: "LOCAL_WORLD_SIZE",
    },
    Names {
        launcher: Launcher::OpenMpi,
        rank: "OMPI_COMM_WORLD_RANK",
        world_size: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    Names {
        launcher: Launcher::Pmi,
        rank: "PMI_RANK",
        world_size: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
        local_world_size: "MPI_LOCALNRANKS",
    },
    Names {
        launcher: Launcher::Slurm,
        rank: "SLURM_PROCID",
        world_size: "SLURM_NTASKS",
        local_rank: "SLURM_LOCALID",
        local_world_size: "SLURM_NTASKS_PER_NODE",
    },
];

impl Rendezvous {
    /// Reads the environment variables of this process. Without any, it is a world of one.
    ///
    /// # Errors
    /// [`Error::MissingVariable`], [`Error::Common`] for a variable with an invalid value, and
    /// [`Error::ContradictoryVariables`].
    pub fn from_env() -> Result<Self> {
        Self::from_variables(|name| std::env::var(name).ok())
    }

    /// Reads the variables through `lookup`.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env).
    ///
    /// ```
    /// use overdrive_distributed::Rendezvous;
    ///
    /// let variables = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "node0"), ("MASTER_PORT", "29500")];
    /// let lookup = |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
    /// let rendezvous = Rendezvous::from_variables(lookup)?;
    /// assert_eq!((rendezvous.rank, rendezvous.world_size), (1, 2));
    /// # Ok::<(), overdrive_distributed::Error>(())
    /// ```
    pub fn from_variables(lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        // Schedulers and containers may set a variable to an empty value; that counts as not set.
        let get = |name: &str| lookup(name).filter(|value| !value.trim().is_empty());
        let Some(names) = NAMES.iter().find(|names| {
            let present = get(names.rank).is_some() || get(names.world_size).is_some();
            present
                && match names.launcher {
                    // sbatch and salloc set SLURM_PROCID outside a step too.
                    Launcher::Slurm => get("SLURM_STEP_ID").is_some(),
                    // Some schedulers set WORLD_SIZE alone for a single process.
                    Launcher::Torch => {
                        get(names.rank).is_some() || get(names.world_size).as_deref() != Some("1")
                    }
                    _ => true,
                }
        }) else {
            return Ok(Self::default());
        };
        let required = |variable: &'static str, other: &'static str| -> Result<usize> {
            let value = get(variable).ok_or_else(|| Error::MissingVariable {
                variable,
                because: format!("{other} is"),
                remedy: "start all processes with one launcher (torchrun, Launch, mpirun, srun), or \
                         set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each",
            })?;
            number(variable, &value, "a whole number from 0")
        };
        let rank = required(names.rank, names.world_size)?;
        let world_size = required(names.world_size, names.rank)?;
        if rank >= world_size {
            return Err(contradiction(format!(
                "{}={rank} and {}={world_size}: ranks start at 0 and are less than the world size",
                names.rank, names.world_size
            )));
        }
        let optional = |variable: &'static str| -> Result<Option<usize>> {
            get(variable)
                .map(|value| number(variable, &value, "a whole number from 0"))
                .transpose()
        };
        let local_rank = optional(names.local_rank)?;
        // srun writes `4` or `4(x2)`.
        let local_world_size = match names.launcher {
            Launcher::Slurm => get(names.local_world_size)
                .map(|value| value.split('(').next().unwrap_or_default().to_owned())
                .map(|value| number(names.local_world_size, &value, "a whole number"))
                .transpose()?,
            _ => optional(names.local_world_size)?,
        };
        let address = get("MASTER_ADDR");
        let single_machine =
            address.as_deref().is_some_and(is_loopback) || local_world_size == Some(world_size);
        let local_world_size =
            local_world_size.unwrap_or(if single_machine { world_size } else { 1 });
        let local_rank = local_rank.unwrap_or(rank % local_world_size.max(1));
        // A guessed local world size is no contradiction: Kubernetes sets none, and counts one process per pod.
        if local_rank >= local_world_size && get(names.local_world_size).is_some()
            || local_world_size > world_size
            || local_world_size == 0
        {
            return Err(contradiction(format!(
                "{}={local_rank}, {}={local_world_size} and {}={world_size}: local ranks start at 0 and \
                 are less than the local world size, which is at most the world size",
                names.local_rank, names.local_world_size, names.world_size
            )));
        }
        let restart_count = optional("TORCHELASTIC_RESTART_COUNT")?.unwrap_or(0);
        let launcher_hosts_store = match get("TORCHELASTIC_USE_AGENT_STORE").as_deref() {
            None | Some("False" | "false" | "0") => false,
            Some("True" | "true" | "1") => true,
            Some(value) => {
                let variable = "TORCHELASTIC_USE_AGENT_STORE";
                return Err(overdrive_core::Error::option(variable, value, "True or False").into());
            }
        };
        let port = get("MASTER_PORT")
            .map(|value| number::<u16>("MASTER_PORT", &value, "a port, from 1 to 65535"))
            .transpose()?;
        // A single process opens no store, so its address and port may be missing.
        let (master_addr, master_port) = if world_size == 1 {
            let default = Self::default();
            (
                address.unwrap_or(default.master_addr),
                port.unwrap_or(DEFAULT_PORT),
            )
        } else {
            let found = address
                .or_else(|| match names.launcher {
                    Launcher::Slurm => get("SLURM_LAUNCH_NODE_IPADDR"),
                    _ => None,
                })
                .or_else(|| {
                    (names.launcher != Launcher::Torch && single_machine)
                        .then(|| "127.0.0.1".to_owned())
                });
            let because = || format!("{}={world_size}", names.world_size);
            let address = found.ok_or_else(|| Error::MissingVariable {
                variable: "MASTER_ADDR",
                because: because(),
                remedy: "set it to the address of the machine of rank 0, the same for all processes",
            })?;
            let port = port.or((names.launcher != Launcher::Torch).then_some(DEFAULT_PORT));
            let port = port.ok_or_else(|| Error::MissingVariable {
                variable: "MASTER_PORT",
                because: because(),
                remedy: "set it to a free port of the machine of rank 0, the same for all processes",
            })?;
            (address, port)
        };
        if master_port == 0 && world_size > 1 {
            let expected = "a port, from 1 to 65535";
            return Err(overdrive_core::Error::option("MASTER_PORT", 0, expected).into());
        }
        Ok(Self {
            rank,
            world_size,
            local_rank,
            local_world_size,
            master_addr,
            master_port,
            restart_count,
            run_id: get("TORCHELASTIC_RUN_ID").unwrap_or_else(|| "none".to_owned()),
            launcher_hosts_store,
            launcher: names.launcher,
        })
    }

    /// Returns `true` if the store is reached over the loopback device, so that all processes are on one machine.
    pub(crate) fn is_loopback(&self) -> bool {
        is_loopback(&self.master_addr)
    }
}

fn contradiction(problem: String) -> Error {
    Error::ContradictoryVariables { problem }
}

fn number<T: FromStr>(variable: &'static str, value: &str, expected: &'static str) -> Result<T> {
    let parsed = value.trim().parse();
    Ok(parsed.map_err(|_| overdrive_core::Error::option(variable, value, expected))?)
}
