//! A process group as the ranks of a snapshot.

use std::io;

use overdrive_snapshot::Ranks;

use crate::ProcessGroup;

/// Makes a process group the ranks of a snapshot: each rank writes its own shard into one folder, and all of
/// them resume from the newest step that is complete on every rank.
///
/// ```
/// use overdrive_distributed::ProcessGroup;
/// use overdrive_snapshot::{SnapshotManager, SnapshotOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// # let folder = dir.path().join("run");
/// let group = ProcessGroup::single();
/// let ranks = Box::new(group.clone());
/// let snapshots = SnapshotManager::with_ranks(&folder, SnapshotOptions::default(), ranks)?;
/// assert!(snapshots.latest()?.is_none());
/// # Ok(())
/// # }
/// ```
impl Ranks for ProcessGroup {
    fn rank(&self) -> usize {
        ProcessGroup::rank(self)
    }

    fn world_size(&self) -> usize {
        ProcessGroup::world_size(self)
    }

    fn all_gather(&self, own: &[u64]) -> io::Result<Vec<Vec<u64>>> {
        let bytes: Vec<u8> = own.iter().flat_map(|number| number.to_le_bytes()).collect();
        let all = self.all_gather_bytes(&bytes).map_err(io::Error::other)?;
        let numbers = |bytes: Vec<u8>| {
            let (numbers, _) = bytes.as_chunks::<8>();
            numbers
                .iter()
                .map(|number| u64::from_le_bytes(*number))
                .collect()
        };
        Ok(all.into_iter().map(numbers).collect())
    }
}
