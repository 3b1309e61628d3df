use std::io;

/// The processes of a run, as far as snapshots need them.
///
/// While training continues, the ranks communicate through the shared folder; only opening a folder
/// ([`SnapshotManager::with_ranks`](crate::SnapshotManager::with_ranks)) and finding the snapshot to resume from
/// ([`SnapshotManager::latest`](crate::SnapshotManager::latest)) are collective.
pub trait Ranks: Send + Sync {
    /// Returns the rank of this process, counted from 0.
    fn rank(&self) -> usize;

    /// Returns the number of processes.
    fn world_size(&self) -> usize;

    /// Returns the numbers that each rank has passed, in the order of the ranks. It is collective: all ranks call
    /// it at the same point of the program.
    ///
    /// # Errors
    /// An error if a rank is lost.
    fn all_gather(&self, own: &[u64]) -> io::Result<Vec<Vec<u64>>>;
}

/// The [`Ranks`] of a run of one process.
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
