//! A process group as the ranks of a snapshot.

use std::io;

use overdrive_snapshot::Ranks;

use crate::ProcessGroup;

/// Returns the key of the store for a value that is posted.
fn posted_key(key: &str) -> String {
    format!("posted/{key}")
}

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

    fn post(&self, key: &str, value: &str) -> io::Result<()> {
        let Some(store) = self.store() else {
            return Ok(());
        };
        let key = posted_key(key);
        store.set(&key, value.as_bytes()).map_err(io::Error::other)
    }

    fn posted(&self, key: &str) -> io::Result<Option<String>> {
        let Some(store) = self.store() else {
            return Ok(None);
        };
        let key = posted_key(key);
        // `get` of a missing key would wait for it.
        let value = match store.check(&[&key]).map_err(io::Error::other)? {
            true => store.get(&key).map_err(io::Error::other)?,
            false => return Ok(None),
        };
        Ok(Some(String::from_utf8_lossy(&value).into_owned()))
    }

    fn lost(&self) -> Vec<usize> {
        self.lost_ranks()
    }
}
