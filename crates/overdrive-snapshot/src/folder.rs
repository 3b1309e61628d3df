//! The folder of a run's snapshots: names, order, what may be deleted.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::options::Best;
use crate::{Error, Result, Snapshot};

/// How a snapshot's folder is called: `checkpoint-120`, as transformers' Trainer calls its own.
const PREFIX: &str = "checkpoint-";

pub(crate) fn path_of(folder: &Path, step: u64) -> PathBuf {
    folder.join(format!("{PREFIX}{step}"))
}

/// Where a snapshot is written before it has its name.
pub(crate) fn unfinished(folder: &Path, step: u64, run: u64) -> PathBuf {
    folder.join(format!(".{PREFIX}{step}.{run:016x}.tmp"))
}

/// The snapshots whose lists and lengths are right, the newest first. Others are told of and passed
/// over.
pub(crate) fn list(folder: &Path) -> Result<Vec<Snapshot>> {
    let mut found: Vec<Snapshot> = Vec::new();
    for path in folders(folder)? {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if !name.starts_with(PREFIX) {
            continue;
        }
        match Snapshot::look(&path) {
            Ok(snapshot) => found.push(snapshot),
            Err(error) => tracing::warn!("passed over: {error}"),
        }
    }
    // A copy that somebody made comes after the one with the right name.
    let copied = |snapshot: &Snapshot| snapshot.path() != path_of(folder, snapshot.step());
    found.sort_by_key(|snapshot| (std::cmp::Reverse(snapshot.step()), copied(snapshot)));
    Ok(found)
}

/// The best of some snapshots, the earlier one of equals.
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

/// Deletes the oldest snapshots until `limit` are left; the newest and the best always stay. Returns
/// what was deleted.
pub(crate) fn rotate(folder: &Path, limit: usize, best: Option<Best>) -> Result<Vec<PathBuf>> {
    let snapshots = list(folder)?;
    let best = best.and_then(|best| best_of(&snapshots, best));
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

/// Deletes a snapshot: first its name, so that half of one is never taken for a whole.
pub(crate) fn remove(path: &Path) -> Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let hidden = path.with_file_name(format!(".{name}.deleted"));
    let _ = fs::remove_dir_all(&hidden);
    fs::rename(path, &hidden).map_err(Error::io("delete", path))?;
    fs::remove_dir_all(&hidden).map_err(Error::io("delete", &hidden))
}

/// Removes what killed processes have left: unfinished and half-deleted snapshots. A whole one that
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
            if !original.exists() && Snapshot::open(&path).is_ok() {
                fs::rename(&path, &original).map_err(Error::io("rename", &path))?;
                continue;
            }
        }
        if name.ends_with(".tmp") || name.ends_with(".deleted") || name.ends_with(REPLACED) {
            fs::remove_dir_all(&path).map_err(Error::io("delete", &path))?;
        }
    }
    Ok(())
}

const REPLACED: &str = ".replaced";

/// Gives a finished folder its name, in place of what has it.
pub(crate) fn publish(unfinished: &Path, path: &Path) -> Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let replaced = path.with_file_name(format!(".{name}{REPLACED}"));
    let taken = path.exists();
    if taken {
        let _ = fs::remove_dir_all(&replaced);
        fs::rename(path, &replaced).map_err(Error::io("rename", path))?;
    }
    if let Err(source) = fs::rename(unfinished, path) {
        if taken {
            // What was there before is better than nothing; the first error is the one to tell.
            let _ = fs::rename(&replaced, path);
        }
        return Err(Error::io("rename", unfinished)(source));
    }
    let parent = path.parent().unwrap_or(Path::new("."));
    flush(parent)?;
    if taken {
        fs::remove_dir_all(&replaced).map_err(Error::io("delete", &replaced))?;
    }
    Ok(())
}

/// Makes the names in a folder last through a crash of the machine.
pub(crate) fn flush(folder: &Path) -> Result<()> {
    if !cfg!(unix) {
        return Ok(());
    }
    let flushed = fs::File::open(folder).and_then(|folder| folder.sync_all());
    flushed.map_err(Error::io("flush", folder))
}

/// The folders in `folder`; none where it is not there.
fn folders(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        read => read.map_err(Error::io("list", folder))?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(Error::io("list", folder))?.path();
        if path.is_dir() {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}
