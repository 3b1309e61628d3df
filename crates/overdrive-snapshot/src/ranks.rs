use std::io;

/// The processes of a run, as far as snapshots must know them.
///
/// Snapshots speak through the shared folder while training goes on; only opening a folder
/// ([`SnapshotManager::with_ranks`](crate::SnapshotManager::with_ranks)) and choosing where to resume
/// ([`SnapshotManager::latest`](crate::SnapshotManager::latest)) are collective.
pub trait Ranks: Send + Sync {
    /// This process, from 0.
    fn rank(&self) -> usize;

    /// All processes.
    fn world_size(&self) -> usize;

    /// The numbers of each rank, in their order. All ranks call it at the same point of the program.
    ///
    /// # Errors
    /// When a rank is lost.
    fn all_gather(&self, own: &[u64]) -> io::Result<Vec<Vec<u64>>>;
}

/// A run of one process.
#[derive(Debug, Clone, Copy, Default)]
pub struct Alone;

impl Ranks for Alone {
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
