//! Atomic file writes: a file exists as a whole or not at all.
//!
//! [`write()`] replaces a small file atomically. A large one is written to an [`unfinished`] file, which [`commit`]
//! gives its name. Unfinished files lie in the folder of the file that they become, because a rename is atomic only
//! within a file system. They are created exclusively and with random names: the processes of two containers can
//! have the same id and share a folder. What a killed process has left is removed by the next one that writes into the
//! folder, and [`remove_unfinished`] removes what this process has not finished when a signal ends it.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use tempfile::NamedTempFile;

pub use crate::file_map::{FileMap, MappedRegion};
pub use crate::lock::FileLock;
pub use crate::unfinished::{
    UnfinishedFolder, is_unfinished, remove_unfinished, unfinished, unfinished_folder,
};
use crate::{Error, Result};

/// Writes `bytes` to `path` atomically: after a crash or an error the file has its old content or the new one.
///
/// ```
/// # let folder = tempfile::tempdir()?;
/// let path = folder.path().join("config.json");
/// overdrive_core::files::write(&path, b"{}")?;
/// assert_eq!(std::fs::read(&path)?, b"{}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Error::Io`]; an existing file at `path` is then unchanged.
pub fn write(path: impl AsRef<Path>, bytes: &[u8]) -> Result<()> {
    let path = path.as_ref();
    let mut file = unfinished(path)?;
    file.as_file_mut()
        .write_all(bytes)
        .map_err(Error::io("write", path))?;
    commit(file, path)
}

/// Flushes an unfinished file to the disk, renames it to `path`, and flushes the folder.
///
/// # Errors
/// [`Error::Io`]; if the rename did not happen, an existing file at `path` is unchanged.
pub fn commit(file: NamedTempFile, path: impl AsRef<Path>) -> Result<()> {
    let path = path.as_ref();
    // The data must be on the disk before the name is: after a power cut a renamed file could be empty.
    file.as_file()
        .sync_all()
        .map_err(Error::io("write", path))?;
    file.persist(path)
        .map_err(|error| Error::io("write", path)(error.error))?;
    sync_folder(folder_of(path))
}

/// Flushes a folder, so that the names in it survive a crash of the machine.
///
/// # Errors
/// [`Error::Io`].
pub fn sync_folder(folder: impl AsRef<Path>) -> Result<()> {
    let folder = folder.as_ref();
    // Only Unix can open and sync a folder.
    if !cfg!(unix) {
        return Ok(());
    }
    File::open(folder)
        .and_then(|folder| folder.sync_all())
        .map_err(Error::io("flush the folder", folder))
}

/// Returns the folder in which the file at `path` lies.
pub fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::fs;

    use super::*;

    fn names(folder: &Path) -> Vec<OsString> {
        let entries = fs::read_dir(folder).expect("a folder");
        let names = entries.map(|entry| entry.expect("an entry").file_name());
        names.collect()
    }

    #[test]
    fn a_file_is_replaced_and_not_written_in_place() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let (path, old) = (folder.path().join("a.json"), folder.path().join("old"));
        write(&path, b"old").expect("writes");
        // A second name of the old file: it keeps the old bytes, because the new ones are in another file.
        fs::hard_link(&path, &old).expect("links");
        write(&path, b"new").expect("writes");
        assert_eq!(fs::read(&path).expect("reads"), b"new");
        assert_eq!(fs::read(&old).expect("reads"), b"old");
        assert_eq!(names(folder.path()).len(), 2, "nothing else is left");
    }

    #[cfg(unix)]
    #[test]
    fn others_may_read_what_the_umask_allows() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().expect("temporary folder");
        let (usual, path) = (folder.path().join("usual"), folder.path().join("a"));
        fs::write(&usual, "").expect("writes");
        write(&path, b"").expect("writes");
        let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode();
        assert_eq!(mode(&path), mode(&usual));
    }

    #[test]
    fn an_error_names_the_file_and_leaves_it_as_it_was() {
        let folder = tempfile::tempdir().expect("temporary folder");
        // A file cannot replace a folder that has files.
        let path = folder.path().join("a");
        fs::create_dir(&path).expect("made");
        fs::write(path.join("kept"), "").expect("writes");
        let error = write(&path, b"").expect_err("a folder").to_string();
        assert!(
            error.starts_with(&format!("cannot write {}", path.display())),
            "{error}"
        );
        assert!(path.join("kept").exists());
        assert_eq!(names(folder.path()).len(), 1, "nothing is left of it");
        assert!(write("..", b"").is_err());
    }
}
