//! The rotation of snapshots: the newest and the best are kept.

use std::path::{Path, PathBuf};

use crate::folder::{list, remove};
use crate::options::Best;
use crate::{Result, Snapshot};

/// Returns the snapshot with the best metric, the earliest of equals.
pub(crate) fn best_of(snapshots: &[Snapshot], best: Best) -> Option<&Snapshot> {
    let rated = snapshots.iter().filter_map(|snapshot| {
        let metric = snapshot.metric()?;
        let rank = match best {
            Best::Lowest => metric,
            Best::Highest => -metric,
        };
        Some((rank, snapshot.step(), snapshot))
    });
    let least = rated.min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    least.map(|(_, _, snapshot)| snapshot)
}

/// Deletes the oldest snapshots until `limit` are left; the newest and the best are always kept. Returns the
/// deleted folders.
pub(crate) fn rotate(folder: &Path, limit: usize, best: Option<Best>) -> Result<Vec<PathBuf>> {
    let snapshots = list(folder)?;
    let best = best.and_then(|best| best_of(&snapshots, best));
    // The newest snapshot is never deleted: a run must always have one to resume from.
    let stays = [snapshots.first(), best].map(|kept| kept.map(Snapshot::path));
    let (kept, others): (Vec<_>, Vec<_>) = snapshots
        .iter()
        .map(Snapshot::path)
        .partition(|path| stays.contains(&Some(*path)));
    let mut removed = Vec::new();
    for path in others.into_iter().skip(limit.saturating_sub(kept.len())) {
        remove(path)?;
        removed.push(path.to_path_buf());
    }
    Ok(removed)
}
