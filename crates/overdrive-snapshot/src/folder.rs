//! The folder of a run's snapshots: their names, their order and their rotation.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::options::Best;
use crate::{Result, Snapshot};
use overdrive_core::Error as CommonError;

/// The prefix of a snapshot's folder: `checkpoint-120`, as transformers' Trainer names its checkpoints.
const PREFIX: &str = "checkpoint-";
/// The suffix of a complete snapshot that is being replaced by another one of the same step.
const REPLACED: &str = ".replaced";

pub(crate) fn path_of(folder: &Path, step: u64) -> PathBuf {
    folder.join(format!("{PREFIX}{step}"))
}

/// Returns the folder in which a snapshot is written before it is renamed.
pub(crate) fn unfinished(folder: &Path, step: u64, run: u64) -> PathBuf {
    folder.join(format!(".{PREFIX}{step}.{run:016x}.tmp"))
}

/// Returns the snapshots whose manifests and file lengths are right, the newest first. Others are skipped with
/// a warning.
pub(crate) fn list(folder: &Path) -> Result<Vec<Snapshot>> {
    let mut found: Vec<Snapshot> = Vec::new();
    for path in folders(folder)? {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if !name.starts_with(PREFIX) {
            continue;
        }
        match Snapshot::open_unverified(&path) {
            Ok(snapshot) => found.push(snapshot),
            Err(error) => tracing::warn!("snapshot skipped: {error}"),
        }
    }
    // A user may have copied a snapshot to another name: the one with the right name comes first.
    let copied = |snapshot: &Snapshot| snapshot.path() != path_of(folder, snapshot.step());
    found.sort_by_key(|snapshot| (std::cmp::Reverse(snapshot.step()), copied(snapshot)));
    Ok(found)
}

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

/// Deletes a snapshot. It is renamed first, so that a partly deleted one is never taken for a complete one.
pub(crate) fn remove(path: &Path) -> Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let hidden = path.with_file_name(format!(".{name}.deleted"));
    // A deletion that was interrupted may have left a folder of this name.
    let _ = fs::remove_dir_all(&hidden);
    fs::rename(path, &hidden).map_err(CommonError::io("delete", path))?;
    Ok(fs::remove_dir_all(&hidden).map_err(CommonError::io("delete", &hidden))?)
}

/// Removes the unfinished and partly deleted snapshots that killed processes have left. A complete snapshot that
/// was about to be replaced gets its name back.
pub(crate) fn clean(folder: &Path) -> Result<()> {
    for path in folders(folder)? {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let Some(name) = name
            .strip_prefix('.')
            .filter(|name| name.starts_with(PREFIX))
        else {
            continue;
        };
        if let Some(original) = name.strip_suffix(REPLACED) {
            let original = folder.join(original);
            // A killed process may have moved the old snapshot away and not yet renamed the new one.
            if !original.exists() && Snapshot::open(&path).is_ok() {
                fs::rename(&path, &original).map_err(CommonError::io("rename", &path))?;
                continue;
            }
        }
        if name.ends_with(".tmp") || name.ends_with(".deleted") || name.ends_with(REPLACED) {
            fs::remove_dir_all(&path).map_err(CommonError::io("delete", &path))?;
        }
    }
    Ok(())
}

/// Renames a finished folder to `path`, replacing a snapshot of the same name.
pub(crate) fn publish(unfinished: &Path, path: &Path) -> Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let replaced = path.with_file_name(format!(".{name}{REPLACED}"));
    // A folder cannot be renamed onto one that has files, so the old snapshot moves away first.
    let exists = path.exists();
    if exists {
        let _ = fs::remove_dir_all(&replaced);
        fs::rename(path, &replaced).map_err(CommonError::io("rename", path))?;
    }
    if let Err(source) = fs::rename(unfinished, path) {
        if exists {
            // The old snapshot is better than none; the error of the first rename is returned.
            let _ = fs::rename(&replaced, path);
        }
        return Err(CommonError::io("rename", unfinished)(source).into());
    }
    let parent = path.parent().unwrap_or(Path::new("."));
    flush(parent)?;
    if exists {
        fs::remove_dir_all(&replaced).map_err(CommonError::io("delete", &replaced))?;
    }
    Ok(())
}

/// Flushes a folder, so that the names in it survive a crash of the machine.
pub(crate) fn flush(folder: &Path) -> Result<()> {
    // Only Unix can open and sync a folder.
    if !cfg!(unix) {
        return Ok(());
    }
    let flushed = fs::File::open(folder).and_then(|folder| folder.sync_all());
    Ok(flushed.map_err(CommonError::io("flush", folder))?)
}

/// Returns the folders in `folder`, which need not exist.
fn folders(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        read => read.map_err(CommonError::io("list", folder))?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(CommonError::io("list", folder))?.path();
        if path.is_dir() {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}
