//! Groups of processes.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use overdrive_sys::c10d::{Group, Store};
use tch::Device;

use crate::connection::{connect, open_store, wait_for_all_ranks};
use crate::failure::Failure;
use crate::group_config::MAX_TIMEOUT;
use crate::launcher_watch::STOP_GRACE;
use crate::monitor::{Monitor, MonitorOptions, StoreHost};
use crate::{Backend, Error, GroupConfig, Rendezvous, Result};

/// A group of processes that train together (`torch.distributed`'s process group).
///
/// A world of one has no store, no threads and no connections: every collective returns at once. Clones are
/// handles of the same group; the process leaves it when the last handle is dropped.
#[derive(Clone)]
pub struct ProcessGroup {
    pub(crate) shared: Arc<Shared>,
}

pub(crate) struct Shared {
    pub(crate) rendezvous: Rendezvous,
    pub(crate) config: GroupConfig,
    pub(crate) connected: Option<Connected>,
    /// The rank in the group of all processes, for each rank of this group.
    pub(crate) global_ranks: Vec<usize>,
    /// The number of subgroups created from this group.
    pub(crate) subgroups: AtomicU64,
    /// The group that this is a subgroup of; it owns the store.
    pub(crate) _parent: Option<ProcessGroup>,
}

pub(crate) struct Connected {
    /// The monitor; `None` only during the drop.
    monitor: Option<Monitor>,
    pub(crate) group: Arc<Group>,
    pub(crate) store: Store,
    pub(crate) store_host: StoreHost,
    /// The connection without a key prefix; on the rank that hosts the store it is the server.
    _root: Option<Store>,
}

/// The progress of a rank in the collectives of a group.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// The number of collectives started.
    pub started: u64,
    /// The number of started collectives that are not complete.
    pub active: u64,
    /// The name of the collective started last.
    pub last: Option<String>,
}

/// A process's access to the store of a group, and its ranks.
pub(crate) struct Membership {
    pub(crate) store: Store,
    pub(crate) root: Option<Store>,
    pub(crate) store_host: StoreHost,
    pub(crate) global_ranks: Vec<usize>,
    pub(crate) parent: Option<ProcessGroup>,
}

impl Drop for Connected {
    fn drop(&mut self) {
        let Some(monitor) = self.monitor.take() else {
            return;
        };
        // The failure must be read before the monitor, which holds it, is dropped.
        let failed = monitor.failure().is_some();
        drop(monitor);
        if failed {
            // The destructor of the last handle would wait for collectives that never complete, so one
            // handle is leaked.
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

/// Creates the group that the launcher's variables describe ([`Rendezvous::from_env`]); all processes call
/// it. Without variables it is a world of one.
///
/// # Errors
/// As [`Rendezvous::from_env`] and [`ProcessGroup::new`].
pub fn init_process_group(config: GroupConfig) -> Result<ProcessGroup> {
    ProcessGroup::new(Rendezvous::from_env()?, config)
}

impl ProcessGroup {
    /// Returns a world of one.
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
                subgroups: AtomicU64::new(0),
                _parent: None,
            }),
        }
    }

    /// Waits for the other processes at the store and connects to them.
    ///
    /// # Errors
    /// [`Error::Store`], [`Error::Incomplete`] with the ranks that did not join,
    /// [`Error::Disagreement`], and errors of libtorch about the connections.
    pub fn new(rendezvous: Rendezvous, mut config: GroupConfig) -> Result<Self> {
        config.timeout = config.timeout.min(MAX_TIMEOUT);
        let (rank, world_size) = (rendezvous.rank, rendezvous.world_size);
        let expected = format!("less than the world size, {world_size}");
        overdrive_core::check_option(rank < world_size, "rank", rank, expected)?;
        // Every rank has an entry in several lists.
        let most = 1 << 20;
        let expected = format!("at most {most}");
        overdrive_core::check_option(world_size <= most, "world size", world_size, expected)?;
        // A single process needs no store, no port and no threads.
        if world_size == 1 {
            return Ok(Self::alone(rendezvous, config, vec![0]));
        }
        let hosts_store = rank == 0 && !rendezvous.launcher_hosts_store;
        let root = open_store(&rendezvous, hosts_store, config.timeout)?;
        // A launcher's store outlives a restart: the keys of the processes before must not count.
        let prefix = format!(
            "overdrive/{}/{}",
            rendezvous.run_id, rendezvous.restart_count
        );
        let generation = root.prefixed(&prefix)?;
        // A process may create several groups one after another; each needs its own keys.
        static GROUPS: AtomicU64 = AtomicU64::new(0);
        let number = GROUPS.fetch_add(1, Ordering::SeqCst);
        let store = generation.prefixed(&format!("group{number}"))?;
        let store_host = StoreHost {
            rank: (!rendezvous.launcher_hosts_store).then_some(0),
            is_this_process: hosts_store,
            name: match (rendezvous.launcher_hosts_store, hosts_store) {
                (true, _) => "the launcher".to_owned(),
                (false, true) => format!("rank 0 (this process, at {})", rendezvous.master_addr),
                (false, false) => format!("rank 0 (at {})", rendezvous.master_addr),
            },
            is_launcher: rendezvous.launcher_hosts_store,
            address: (rendezvous.master_addr.clone(), rendezvous.master_port),
        };
        let membership = Membership {
            store,
            root: Some(root),
            store_host,
            global_ranks: (0..world_size).collect(),
            parent: None,
        };
        Self::join(rendezvous, config, membership)
    }

    /// Waits for the other processes at an open store and connects to them.
    pub(crate) fn join(
        rendezvous: Rendezvous,
        config: GroupConfig,
        membership: Membership,
    ) -> Result<Self> {
        let (rank, world_size) = (rendezvous.rank, rendezvous.world_size);
        let Membership {
            store,
            root,
            store_host,
            global_ranks,
            parent,
        } = membership;
        wait_for_all_ranks(&store, &rendezvous, config.timeout)?;
        let group = Arc::new(connect(&store, &rendezvous, &config)?);
        if parent.is_some() {
            group.label(&format!(" (rank {} of all)", global_ranks[rank]))?;
        }
        let names = (0..world_size).map(|rank| match parent {
            Some(_) => format!("rank {rank} (rank {} of all)", global_ranks[rank]),
            None => format!("rank {rank}"),
        });
        let options = MonitorOptions {
            rank,
            names: names.collect(),
            interval: config.heartbeat(),
            store_host: store_host.clone(),
            // The monitor of the group of all processes ends the process, not that of a subgroup.
            stop_grace: parent.is_none().then(stop_grace).flatten(),
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
                    store_host,
                    _root: root,
                }),
                global_ranks,
                subgroups: AtomicU64::new(0),
                _parent: parent,
            }),
        };
        // After the barrier every rank has sent a heartbeat.
        joined.barrier()?;
        Ok(joined)
    }

    /// Returns the rank of this process, from 0.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.shared.rendezvous.rank
    }

    /// Returns the number of processes in the group.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.shared.rendezvous.world_size
    }

    /// Returns the rank of this process on its machine.
    #[must_use]
    pub fn local_rank(&self) -> usize {
        self.shared.rendezvous.local_rank
    }

    /// Returns the number of processes on this machine.
    #[must_use]
    pub fn local_world_size(&self) -> usize {
        self.shared.rendezvous.local_world_size
    }

    /// Returns, for each rank of this group, its rank in the group of all processes. They differ in a
    /// subgroup ([`new_group`](Self::new_group)).
    #[must_use]
    pub fn global_ranks(&self) -> &[usize] {
        &self.shared.global_ranks
    }

    /// Returns `true` on rank 0, the one that logs and saves.
    #[must_use]
    pub fn is_main(&self) -> bool {
        self.rank() == 0
    }

    /// Returns the ranks and addresses with which the group was created.
    #[must_use]
    pub fn rendezvous(&self) -> &Rendezvous {
        &self.shared.rendezvous
    }

    /// Returns the default timeout of a collective.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.shared.config.timeout
    }

    /// Returns the device of this process: the CUDA device of its local rank if CUDA is available, else the
    /// CPU.
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

    /// Returns the cause if the group has failed. A failed group cannot be used again: restart the processes,
    /// or create a new group of those that are alive.
    #[must_use]
    pub fn failure(&self) -> Option<Failure> {
        let connected = self.shared.connected.as_ref()?;
        connected.monitor.as_ref()?.failure()
    }

    /// Returns the ranks that are known to be lost, have left or do not beat, for a wait that is no collective: such as
    /// for a file that another rank writes. The first calls return none: heartbeats are compared from then on.
    pub(crate) fn lost_ranks(&self) -> Vec<usize> {
        let connected = self.shared.connected.as_ref();
        let monitor = connected.and_then(|connected| connected.monitor.as_ref());
        monitor.map_or_else(Vec::new, Monitor::lost_ranks)
    }

    /// Returns how many collectives this rank has started and how many of them are active, including those of
    /// backward. Both are 0 in a world of one.
    ///
    /// # Errors
    /// [`Error::Sys`] if memory runs out.
    pub fn progress(&self) -> Result<Progress> {
        let Some(connected) = &self.shared.connected else {
            return Ok(Progress::default());
        };
        let state = connected.group.poll(Duration::ZERO)?;
        Ok(Progress {
            started: state.started,
            active: state.started.saturating_sub(state.finished),
            last: state.recent.last().map(|started| started.what.clone()),
        })
    }

    /// Returns the error that names the rank at fault, if the group has failed: for errors of other calls, such
    /// as a plain `backward`. `error` is the error of that call.
    #[must_use]
    pub fn explain(&self, error: &dyn std::error::Error) -> Option<Error> {
        let failure = self.failure()?;
        let seen = overdrive_sys::without_backtrace(&error.to_string());
        Some(Error::Collective {
            ranks: failure.ranks,
            message: if seen.contains(&failure.text) {
                seen.trim().to_owned()
            } else {
                format!("{} [reported here as: {}]", failure.text, seen.trim())
            },
        })
    }

    /// Returns the backend.
    #[must_use]
    pub fn backend(&self) -> Backend {
        self.shared.config.backend
    }

    /// Returns the group's store; `None` in a world of one.
    pub(crate) fn store(&self) -> Option<&Store> {
        self.shared
            .connected
            .as_ref()
            .map(|connected| &connected.store)
    }

    /// Converts the error of a call that used the group; the cause counts if the group has failed.
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

/// Returns the time that [`Launch`](crate::Launch) gives this process to end after SIGTERM; `None` if another
/// launcher started it.
fn stop_grace() -> Option<Duration> {
    let seconds: f64 = std::env::var(STOP_GRACE).ok()?.parse().ok()?;
    Duration::try_from_secs_f64(seconds).ok()
}

fn without_operation(error: overdrive_sys::Error) -> String {
    match error {
        overdrive_sys::Error::Torch { message, .. } => message,
        other => other.to_string(),
    }
}
