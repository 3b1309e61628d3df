//! Groups of processes.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use overdrive_sys::c10d::{Group, NetworkDevice, Store, StoreRole};
use tch::Device;

use crate::monitor::{Failure, Monitor, MonitorOptions};
use crate::{Error, Rendezvous, Result};

/// What carries the tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Backend {
    /// Gloo, over TCP: tensors on the CPU.
    Gloo,
    /// NCCL: tensors on CUDA devices, one for each process. Needs the feature `nccl`.
    Nccl,
}

/// How a group is made.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct GroupConfig {
    /// What carries the tensors. Default [`Backend::Gloo`].
    pub backend: Backend,
    /// How long a collective, and the meeting of the group, may take. Default 30 minutes, torch's.
    pub timeout: Duration,
    /// How often a process tells that it is alive. Default a second, or an eighth of the timeout if that
    /// is less. A rank is taken for lost after three of them and half a second.
    pub heartbeat: Option<Duration>,
    /// The network interface that Gloo uses, such as `eth0`. Default: that of the variable
    /// `GLOO_SOCKET_IFNAME`; else loopback if the store is reached over it; else that of the host name.
    pub interface: Option<String>,
}

impl Default for GroupConfig {
    fn default() -> Self {
        Self {
            backend: Backend::Gloo,
            timeout: Duration::from_secs(30 * 60),
            heartbeat: None,
            interface: None,
        }
    }
}

impl GroupConfig {
    /// Sets the timeout.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets the backend.
    #[must_use]
    pub fn with_backend(mut self, backend: Backend) -> Self {
        self.backend = backend;
        self
    }

    fn heartbeat(&self) -> Duration {
        self.heartbeat
            .unwrap_or((self.timeout / 8).min(Duration::from_secs(1)))
            .max(Duration::from_millis(20))
    }
}

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
}

pub(crate) struct Connected {
    /// Present until the drop.
    monitor: Option<Monitor>,
    pub(crate) group: Arc<Group>,
    store: Store,
    /// Connections through which keys without the prefix are reached; the server's end if it is here.
    _root: Store,
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
        Self {
            shared: Arc::new(Shared {
                rendezvous: Rendezvous::default(),
                config: GroupConfig::default(),
                connected: None,
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
            return Ok(Self {
                shared: Arc::new(Shared {
                    rendezvous,
                    config,
                    connected: None,
                }),
            });
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
        meet(&store, &rendezvous, config.timeout)?;

        let group = Arc::new(connect(&store, &rendezvous, &config)?);
        let keeper = match (rendezvous.launcher_keeps_store, keeps_store) {
            (true, _) => "the launcher".to_owned(),
            (false, true) => format!("rank 0 (this process, at {})", rendezvous.master_addr),
            (false, false) => format!("rank 0 (at {})", rendezvous.master_addr),
        };
        let monitor = Monitor::start(
            Arc::clone(&group),
            store.reconnected()?,
            MonitorOptions {
                rank,
                world_size,
                interval: config.heartbeat(),
                keeper,
                keeps_store,
            },
        )?;
        let joined = Self {
            shared: Arc::new(Shared {
                rendezvous,
                config,
                connected: Some(Connected {
                    monitor: Some(monitor),
                    group,
                    store,
                    _root: root,
                }),
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

fn open_store(place: &Rendezvous, keeps: bool, timeout: Duration) -> Result<Store> {
    let (what, way_out, role) = if keeps {
        (
            "open",
            "choose a port that is free on this machine (MASTER_PORT)",
            StoreRole::Server,
        )
    } else if place.launcher_keeps_store {
        (
            "reach",
            "the launcher keeps it: see whether it runs",
            StoreRole::Client,
        )
    } else {
        (
            "reach",
            "rank 0 keeps it: see whether it was started, and whether MASTER_ADDR and MASTER_PORT are \
             the same for all",
            StoreRole::Client,
        )
    };
    match Store::tcp(&place.master_addr, place.master_port, role, timeout) {
        Ok((store, _)) => Ok(store),
        Err(source) => Err(Error::Store {
            rank: place.rank,
            what,
            address: format!("{}:{}", place.master_addr, place.master_port),
            timeout,
            way_out,
            source: Box::new(source),
        }),
    }
}

/// Waits until every rank is there, once, with the same size in mind.
fn meet(store: &Store, place: &Rendezvous, timeout: Duration) -> Result<()> {
    let (rank, world_size) = (place.rank, place.world_size);
    let here = format!("{} process {}", host(), std::process::id());
    let disagreement = |problem: String| Error::Disagreement {
        rank,
        here: here.clone(),
        problem,
    };
    let own = format!("join/{rank}");
    let first = store.compare_set(&own, b"", here.as_bytes())?;
    if first != here.as_bytes() {
        let other = String::from_utf8_lossy(&first);
        return Err(disagreement(format!(
            "is not the only one: {other} has the same rank; every process needs a RANK of its own"
        )));
    }
    let size = world_size.to_string();
    let agreed = store.compare_set("size", b"", size.as_bytes())?;
    if agreed != size.as_bytes() {
        let other = String::from_utf8_lossy(&agreed);
        return Err(disagreement(format!(
            "expects {world_size} processes, others expect {other}; WORLD_SIZE is the same for all"
        )));
    }
    let keys: Vec<String> = (0..world_size).map(|rank| format!("join/{rank}")).collect();
    let Err(error) = store.wait(&keys, timeout) else {
        return Ok(());
    };
    let mut missing = Vec::new();
    for (rank, key) in keys.iter().enumerate() {
        match store.check(&[key]) {
            Ok(true) => {}
            Ok(false) => missing.push(format!("rank {rank}")),
            Err(_) => return Err(error.into()),
        }
    }
    if missing.is_empty() {
        return Ok(()); // they came as the time ran out
    }
    Err(Error::Incomplete {
        rank,
        world_size,
        missing: missing.join(", "),
        timeout,
    })
}

fn connect(store: &Store, place: &Rendezvous, config: &GroupConfig) -> Result<Group> {
    let (rank, world_size) = (place.rank, place.world_size);
    let group = match config.backend {
        Backend::Nccl => Group::nccl(store, rank, world_size, config.timeout, place.local_rank)?,
        Backend::Gloo => {
            let variable = std::env::var("GLOO_SOCKET_IFNAME").ok();
            let named = config.interface.as_ref().or(variable.as_ref());
            let device = match named {
                Some(name) => NetworkDevice::Interface(name),
                None if place.is_loopback() => NetworkDevice::Address("127.0.0.1"),
                None => NetworkDevice::HostName,
            };
            Group::gloo(store, rank, world_size, config.timeout, device)?
        }
    };
    Ok(group)
}

fn host() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map(|name| name.trim().to_owned())
        .or_else(|_| std::env::var("HOSTNAME"))
        .unwrap_or_else(|_| "this machine's".to_owned())
}
