//! The folder of a run's snapshots: their names and their order.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::{Error, Result, Snapshot};
use overdrive_core::{Error as CommonError, files};

/// The prefix of a snapshot's folder: `checkpoint-120`, as transformers' Trainer names its checkpoints.
const PREFIX: &str = "checkpoint-";
/// The prefix of a folder with the snapshots of an abandoned branch: `abandoned-1`.
const ABANDONED: &str = "abandoned-";
/// The suffix of a complete snapshot that is being replaced by another one of the same step.
const REPLACED: &str = ".replaced";

pub(crate) fn path_of(folder: &Path, step: u64) -> PathBuf {
    folder.join(format!("{PREFIX}{step}"))
}

/// Returns the folder in which a snapshot is written before it is renamed.
pub(crate) fn unfinished(folder: &Path, step: u64, run: u64) -> PathBuf {
    folder.join(format!(".{PREFIX}{step}.{run:016x}.tmp"))
}

/// Returns the step in the name of a snapshot's folder; `None` for names that [`path_of`] does not return.
fn step_of(path: &Path) -> Option<u64> {
    let name = path.file_name()?.to_str()?;
    let step: u64 = name.strip_prefix(PREFIX)?.parse().ok()?;
    // Numbers also parse with a sign or leading zeros.
    (name == format!("{PREFIX}{step}")).then_some(step)
}

/// Returns `true` for the name of a folder with the snapshots of an abandoned branch.
fn is_abandoned(path: &Path) -> bool {
    is_numbered(path, ABANDONED)
}

fn is_numbered(path: &Path, prefix: &str) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let number = name.strip_prefix(prefix);
    number.is_some_and(|number| number.parse::<u64>().is_ok())
}

/// Returns the folders and files in `folder` that have the name of a snapshot.
pub(crate) fn named(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).map_err(CommonError::io("list", folder))?;
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    Ok(paths.filter(|path| is_numbered(path, PREFIX)).collect())
}

/// Returns the folders in `folder` with the snapshots of abandoned branches.
pub(crate) fn abandoned(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = folders(folder)?;
    found.retain(|path| is_abandoned(path));
    Ok(found)
}

/// Returns the folder of the run to which the snapshot at `path` belongs.
pub(crate) fn run_of(path: &Path) -> Option<&Path> {
    let parent = path.parent()?;
    // A snapshot of an abandoned branch lies one folder deeper.
    match is_abandoned(parent) {
        true => parent.parent(),
        false => Some(parent),
    }
}

/// The snapshots in a folder.
#[derive(Debug, Default)]
pub(crate) struct Listing {
    /// The snapshots with valid manifests and file lengths, the newest first.
    pub(crate) snapshots: Vec<Snapshot>,
    /// The damaged snapshots, each with the reason.
    pub(crate) damaged: Vec<(PathBuf, String)>,
}

/// Returns the snapshots with valid manifests and file lengths, the newest first. Copies that a user made under other
/// names are left out: they may belong to an abandoned branch, and rotation must not delete them.
pub(crate) fn list(folder: &Path) -> Result<Vec<Snapshot>> {
    Ok(scan(folder)?.snapshots)
}

/// Returns the snapshots of a folder, and those that are damaged.
pub(crate) fn scan(folder: &Path) -> Result<Listing> {
    let mut found: Vec<Snapshot> = Vec::new();
    let mut damaged = Vec::new();
    for path in folders(folder)? {
        let Some(step) = step_of(&path) else {
            continue;
        };
        match Snapshot::open_unverified(&path) {
            Ok(snapshot) if snapshot.step() != step => tracing::warn!(
                "snapshot skipped: {} holds a snapshot of step {}",
                path.display(),
                snapshot.step()
            ),
            Ok(snapshot) => found.push(snapshot),
            Err(Error::Damaged { path, .. }) if is_gone(&path) => {}
            Err(Error::Damaged { path, reason }) => damaged.push((path, reason)),
            // A file that currently cannot be read may still be intact.
            Err(error) => return Err(error),
        }
    }
    found.sort_by_key(|snapshot| std::cmp::Reverse(snapshot.step()));
    Ok(Listing {
        snapshots: found,
        damaged,
    })
}

/// Returns `true` if a snapshot was deleted after its folder was listed, for example by another rank's rotation.
pub(crate) fn is_gone(path: &Path) -> bool {
    let found = fs::symlink_metadata(path);
    found.is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// Moves the snapshots of `folder` that a run from `snapshot` abandons to a new folder `abandoned-<n>`: those of
/// later steps, or all of them if `snapshot` lies in another folder.
pub(crate) fn abandon_after(folder: &Path, snapshot: &Snapshot) -> Result<()> {
    let parent = fs::canonicalize(files::folder_of(snapshot.path()));
    // Canonical paths are compared, because one of them may be relative or contain a link.
    let is_own = parent.is_ok_and(|parent| fs::canonicalize(folder).is_ok_and(|own| own == parent));
    abandon(folder, |step| !is_own || step > snapshot.step())
}

/// Moves the snapshots that belong to another branch than the snapshot of `step` that is being saved. Steps only grow
/// within a run: if there is a snapshot of a later step, the run has started again without these snapshots.
pub(crate) fn abandon_for(folder: &Path, step: u64) -> Result<()> {
    let has_later = folders(folder)?
        .iter()
        .any(|path| step_of(path).is_some_and(|other| other > step));
    match has_later {
        true => abandon(folder, |other| other >= step),
        false => Ok(()),
    }
}

fn abandon(folder: &Path, is_abandoned: impl Fn(u64) -> bool) -> Result<()> {
    let found = folders(folder)?.into_iter();
    let mut abandoned: Vec<(u64, PathBuf)> = found
        .filter_map(|path| Some((step_of(&path)?, path)))
        .filter(|(step, _)| is_abandoned(*step))
        .collect();
    if abandoned.is_empty() {
        return Ok(());
    }
    let aside = new_abandoned(folder)?;
    // The newest first: a process that is killed here leaves an earlier state of the same branch.
    abandoned.sort_by_key(|(step, _)| std::cmp::Reverse(*step));
    for (step, path) in &abandoned {
        fs::rename(path, path_of(&aside, *step)).map_err(CommonError::io("move", path))?;
    }
    files::sync_folder(&aside)?;
    files::sync_folder(folder)?;
    let steps = abandoned.iter().rev().map(|(step, _)| step.to_string());
    tracing::warn!(
        "the run continues without the snapshots of steps {}; they were moved to {}, where they are never deleted",
        steps.collect::<Vec<_>>().join(", "),
        aside.display()
    );
    Ok(())
}

/// Creates a folder `abandoned-<n>` with the next free number.
fn new_abandoned(folder: &Path) -> Result<PathBuf> {
    let mut number = 1u64;
    loop {
        let path = folder.join(format!("{ABANDONED}{number}"));
        match fs::create_dir(&path) {
            Ok(()) => return Ok(path),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
            Err(source) => return Err(CommonError::io("create", path)(source).into()),
        }
    }
}

/// Deletes a snapshot. It is renamed first, so that a partly deleted snapshot is never taken for a complete one.
pub(crate) fn remove(path: &Path) -> Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let hidden = path.with_file_name(format!(".{name}.deleted"));
    // A deletion that was interrupted may have left a folder of this name.
    let _ = fs::remove_dir_all(&hidden);
    fs::rename(path, &hidden).map_err(CommonError::io("delete", path))?;
    Ok(fs::remove_dir_all(&hidden).map_err(CommonError::io("delete", &hidden))?)
}

/// Removes the unfinished and partly deleted snapshots that killed processes left behind. A complete snapshot that
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
            if !original.exists() {
                match Snapshot::open(&path) {
                    Ok(_) => {
                        fs::rename(&path, &original).map_err(CommonError::io("rename", &path))?;
                        continue;
                    }
                    Err(Error::Damaged { .. }) => {}
                    // The snapshot may be intact, so it is not deleted.
                    Err(error) => return Err(error),
                }
            }
        }
        if name.ends_with(".tmp") || name.ends_with(".deleted") || name.ends_with(REPLACED) {
            fs::remove_dir_all(&path).map_err(CommonError::io("delete", &path))?;
        }
    }
    Ok(())
}

/// Checks that no plain file has the name of a snapshot's folder: such a file is the user's and must not be replaced.
pub(crate) fn check_no_file(path: &Path) -> Result<()> {
    match fs::metadata(path) {
        Ok(found) if !found.is_dir() => Err(Error::InTheWay {
            path: path.to_path_buf(),
        }),
        _ => Ok(()),
    }
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
            // Restores the old snapshot; the error of the first rename is returned.
            let _ = fs::rename(&replaced, path);
        }
        return Err(CommonError::io("rename", unfinished)(source).into());
    }
    files::sync_folder(files::folder_of(path))?;
    if exists {
        fs::remove_dir_all(&replaced).map_err(CommonError::io("delete", &replaced))?;
    }
    Ok(())
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
        match fs::metadata(&path) {
            Ok(metadata) if metadata.is_dir() => found.push(path),
            Ok(_) => {}
            // A dangling link, or a file that was removed in the meantime.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(CommonError::io("read", path)(error).into()),
        }
    }
    found.sort();
    Ok(found)
}
