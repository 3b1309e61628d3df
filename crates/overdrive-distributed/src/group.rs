//! Groups of processes.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use overdrive_sys::c10d::{Group, Store};
use tch::Device;

use crate::meeting::{connect, meet, open_store};
use crate::monitor::{Keeper, Monitor, MonitorOptions};
use crate::verdict::Failure;
use crate::{Backend, Error, GroupConfig, Rendezvous, Result};

/// A group of processes that train together (`torch.distributed`'s process group).
///
/// A world of one has no store, no threads and no connections: every collective returns at once.
/// Clones are handles of the same group; it is left when the last one goes.
#[derive(Clone)]
pub struct ProcessGroup {
    pub(crate) shared: Arc<Shared>,
}

pub(crate) struct Shared {
    pub(crate) rendezvous: Rendezvous,
    pub(crate) config: GroupConfig,
    pub(crate) connected: Option<Connected>,
    /// For each rank its number in the group of all processes.
    pub(crate) global_ranks: Vec<usize>,
    /// How many parts were made of it.
    pub(crate) parts: AtomicU64,
    /// What this is a part of: it keeps the store.
    pub(crate) _whole: Option<ProcessGroup>,
}

pub(crate) struct Connected {
    /// Present until the drop.
    monitor: Option<Monitor>,
    pub(crate) group: Arc<Group>,
    pub(crate) store: Store,
    pub(crate) keeper: Keeper,
    /// Connections through which keys without the prefix are reached; the server's end if it is here.
    _root: Option<Store>,
}

/// How far a rank is in the collectives of a group.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// How many it has begun.
    pub begun: u64,
    /// How many of them have not ended.
    pub under_way: u64,
    /// The name of the last one begun.
    pub last: Option<String>,
}

/// Where a group meets.
pub(crate) struct Meeting {
    pub(crate) store: Store,
    pub(crate) root: Option<Store>,
    pub(crate) keeper: Keeper,
    pub(crate) global_ranks: Vec<usize>,
    pub(crate) whole: Option<ProcessGroup>,
}

impl Drop for Connected {
    fn drop(&mut self) {
        let Some(monitor) = self.monitor.take() else {
            return;
        };
        let failed = monitor.failure().is_some();
        drop(monitor);
        if failed {
            // The last handle's destructor would wait for collectives that can never end: this one is
            // never dropped.
            std::mem::forget(Arc::clone(&self.group));
        }
    }
}

impl fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessGroup")
            .field("rank", &self.rank())
            .field("world_size", &self.world_size())
            .field("backend", &self.shared.config.backend)
            .finish_non_exhaustive()
    }
}

/// Makes the group that the launcher's variables describe ([`Rendezvous::from_env`]); all processes call
/// it. Without variables: a world of one.
///
/// # Errors
/// As [`Rendezvous::from_env`] and [`ProcessGroup::new`].
pub fn init_process_group(config: GroupConfig) -> Result<ProcessGroup> {
    ProcessGroup::new(Rendezvous::from_env()?, config)
}

impl ProcessGroup {
    /// A world of one.
    #[must_use]
    pub fn single() -> Self {
        Self::alone(Rendezvous::default(), GroupConfig::default(), vec![0])
    }

    pub(crate) fn alone(
        rendezvous: Rendezvous,
        config: GroupConfig,
        global_ranks: Vec<usize>,
    ) -> Self {
        Self {
            shared: Arc::new(Shared {
                global_ranks,
                rendezvous,
                config,
                connected: None,
                parts: AtomicU64::new(0),
                _whole: None,
            }),
        }
    }

    /// Meets the others at the store and connects to them.
    ///
    /// # Errors
    /// [`Error::Store`], [`Error::Incomplete`] with the ranks that did not come,
    /// [`Error::Disagreement`], and what libtorch says about the connections.
    pub fn new(rendezvous: Rendezvous, config: GroupConfig) -> Result<Self> {
        let (rank, world_size) = (rendezvous.rank, rendezvous.world_size);
        if rank >= world_size {
            return Err(Error::InvalidArgument {
                argument: "rank",
                value: rank.to_string(),
                expected: format!("less than world_size = {world_size}"),
            });
        }
        if world_size == 1 {
            return Ok(Self::alone(rendezvous, config, vec![0]));
        }
        let keeps_store = rank == 0 && !rendezvous.launcher_keeps_store;
        let root = open_store(&rendezvous, keeps_store, config.timeout)?;
        let prefix = format!(
            "overdrive/{}/{}",
            rendezvous.run_id, rendezvous.restart_count
        );
        let generation = root.prefixed(&prefix)?;
        // The same process may make one group after another: each has names of its own.
        static GROUPS: AtomicU64 = AtomicU64::new(0);
        let number = GROUPS.fetch_add(1, Ordering::SeqCst);
        let store = generation.prefixed(&format!("group{number}"))?;
        let keeper = Keeper {
            rank: (!rendezvous.launcher_keeps_store).then_some(0),
            is_here: keeps_store,
            name: match (rendezvous.launcher_keeps_store, keeps_store) {
                (true, _) => "the launcher".to_owned(),
                (false, true) => format!("rank 0 (this process, at {})", rendezvous.master_addr),
                (false, false) => format!("rank 0 (at {})", rendezvous.master_addr),
            },
        };
        let meeting = Meeting {
            store,
            root: Some(root),
            keeper,
            global_ranks: (0..world_size).collect(),
            whole: None,
        };
        Self::join(rendezvous, config, meeting)
    }

    /// Meets the others at a store that is there, and connects to them.
    pub(crate) fn join(
        rendezvous: Rendezvous,
        config: GroupConfig,
        meeting: Meeting,
    ) -> Result<Self> {
        let (rank, world_size) = (rendezvous.rank, rendezvous.world_size);
        let Meeting {
            store,
            root,
            keeper,
            global_ranks,
            whole,
        } = meeting;
        meet(&store, &rendezvous, config.timeout)?;
        let group = Arc::new(connect(&store, &rendezvous, &config)?);
        if whole.is_some() {
            group.label(&format!(" (rank {} of all)", global_ranks[rank]))?;
        }
        let names = (0..world_size).map(|rank| match whole {
            Some(_) => format!("rank {rank} (rank {} of all)", global_ranks[rank]),
            None => format!("rank {rank}"),
        });
        let options = MonitorOptions {
            rank,
            names: names.collect(),
            interval: config.heartbeat(),
            keeper: keeper.clone(),
        };
        let monitor = Monitor::start(Arc::clone(&group), store.reconnected()?, options)?;
        let joined = Self {
            shared: Arc::new(Shared {
                rendezvous,
                config,
                connected: Some(Connected {
                    monitor: Some(monitor),
                    group,
                    store,
                    keeper,
                    _root: root,
                }),
                global_ranks,
                parts: AtomicU64::new(0),
                _whole: whole,
            }),
        };
        // From here on every rank's heartbeat is there.
        joined.barrier()?;
        Ok(joined)
    }

    /// This process's number, from 0.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.shared.rendezvous.rank
    }

    /// How many processes there are.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.shared.rendezvous.world_size
    }

    /// This process's number on its machine.
    #[must_use]
    pub fn local_rank(&self) -> usize {
        self.shared.rendezvous.local_rank
    }

    /// How many processes run on this machine.
    #[must_use]
    pub fn local_world_size(&self) -> usize {
        self.shared.rendezvous.local_world_size
    }

    /// For each rank of this group its number in the group of all processes: of a part of a group
    /// ([`new_group`](Self::new_group)) those that it was made of.
    #[must_use]
    pub fn global_ranks(&self) -> &[usize] {
        &self.shared.global_ranks
    }

    /// Whether this is rank 0, the one that logs and saves.
    #[must_use]
    pub fn is_main(&self) -> bool {
        self.rank() == 0
    }

    /// Where it met, and how.
    #[must_use]
    pub fn rendezvous(&self) -> &Rendezvous {
        &self.shared.rendezvous
    }

    /// How long a collective may take that names no other time.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.shared.config.timeout
    }

    /// The device of this process: the CUDA device of its local rank if there is CUDA, else the CPU.
    #[must_use]
    pub fn device(&self) -> Device {
        let cuda = tch::Cuda::is_available() && tch::Cuda::device_count() > 0;
        if cuda {
            let devices = usize::try_from(tch::Cuda::device_count()).unwrap_or(1);
            Device::Cuda(self.local_rank() % devices)
        } else {
            Device::Cpu
        }
    }

    /// What the group has failed of, if it has. It stays failed: restart the processes, or make a new
    /// group of those that live.
    #[must_use]
    pub fn failure(&self) -> Option<Failure> {
        let connected = self.shared.connected.as_ref()?;
        connected.monitor.as_ref()?.failure()
    }

    /// What this rank has begun and not ended: collectives, those of backward included. Nothing in a world of
    /// one.
    ///
    /// # Errors
    /// [`Error::Sys`] if memory runs out.
    pub fn under_way(&self) -> Result<Progress> {
        let Some(connected) = &self.shared.connected else {
            return Ok(Progress::default());
        };
        let state = connected.group.poll(Duration::ZERO)?;
        Ok(Progress {
            begun: state.started,
            under_way: state.started.saturating_sub(state.finished),
            last: state.recent.last().map(|begun| begun.what.clone()),
        })
    }

    /// The error that names the rank at fault, if the group has failed: for errors that came another way, such
    /// as that of a plain `backward`. `error` is what was seen of it.
    #[must_use]
    pub fn explain(&self, error: &dyn std::error::Error) -> Option<Error> {
        let failure = self.failure()?;
        let seen = error.to_string();
        let seen = seen
            .split("\nException raised from")
            .next()
            .unwrap_or(&seen);
        Some(Error::Collective {
            ranks: failure.ranks,
            message: if seen.contains(&failure.text) {
                seen.trim().to_owned()
            } else {
                format!("{} [seen here as: {}]", failure.text, seen.trim())
            },
        })
    }

    /// What carries the tensors.
    #[must_use]
    pub fn backend(&self) -> Backend {
        self.shared.config.backend
    }

    /// The group's store, for values of one's own; none in a world of one.
    #[must_use]
    pub fn store(&self) -> Option<&Store> {
        self.shared
            .connected
            .as_ref()
            .map(|connected| &connected.store)
    }

    /// The error of a call that used the group: the group's own words if it has failed.
    pub(crate) fn error(&self, error: overdrive_sys::Error) -> Error {
        match (self.failure(), error) {
            (Some(failure), error) => Error::Collective {
                ranks: failure.ranks,
                message: without_operation(error),
            },
            (None, error) => error.into(),
        }
    }
}

fn without_operation(error: overdrive_sys::Error) -> String {
    match error {
        overdrive_sys::Error::Torch { message, .. } => message,
        other => other.to_string(),
    }
}
