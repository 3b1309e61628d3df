//! The communication of processes; `run_state` restores a run on another number of them.

use std::io;

/// The communication between the processes of a run that snapshots need.
///
/// While training continues, the ranks communicate through the shared folder, and a rank that fails posts the reason,
/// so that the others do not wait for it. Only opening a folder
/// ([`SnapshotManager::with_ranks`](crate::SnapshotManager::with_ranks)) and finding the snapshot to resume from
/// ([`SnapshotManager::latest`](crate::SnapshotManager::latest)) are collective.
pub trait Ranks: Send + Sync {
    /// Returns the rank of this process, counted from 0.
    fn rank(&self) -> usize;

    /// Returns the number of processes.
    fn world_size(&self) -> usize;

    /// Returns the values that each rank passed, in the order of the ranks. This call is collective: all ranks must
    /// make it at the same point of the program.
    ///
    /// # Errors
    /// An error if a rank is lost.
    fn all_gather(&self, own: &[u64]) -> io::Result<Vec<Vec<u64>>>;

    /// Publishes a value under a key for all ranks, without waiting for them. Any thread may call it. The default does
    /// nothing; the ranks then notice a failure during a save only by the timeout.
    ///
    /// # Errors
    /// An error if the value could not be sent.
    fn post(&self, _key: &str, _value: &str) -> io::Result<()> {
        Ok(())
    }

    /// Returns the value that a rank has posted under the key; `None` if there is none. Does not wait.
    ///
    /// # Errors
    /// An error if the request failed.
    fn posted(&self, _key: &str) -> io::Result<Option<String>> {
        Ok(None)
    }

    /// Returns the ranks that are known to be lost or stuck. Default: none.
    fn lost(&self) -> Vec<usize> {
        Vec::new()
    }
}

/// The [`Ranks`] of a single-process run.
#[derive(Debug, Clone, Copy, Default)]
pub struct SingleProcess;

impl Ranks for SingleProcess {
    fn rank(&self) -> usize {
        0
    }

    fn world_size(&self) -> usize {
        1
    }

    fn all_gather(&self, own: &[u64]) -> io::Result<Vec<Vec<u64>>> {
        Ok(vec![own.to_vec()])
    }
}
