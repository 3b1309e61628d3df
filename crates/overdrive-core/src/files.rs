//! Atomic file writes: a file exists as a whole or not at all.
//!
//! [`write()`] replaces a small file atomically. A large one is written to an [`unfinished`] file, which [`commit`]
//! gives its name. Unfinished files lie in the folder of the file that they become, because a rename is atomic only
//! within a file system. They are created exclusively and with random names: the processes of two containers can
//! have the same id and share a folder.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use tempfile::{Builder, NamedTempFile, TempDir};

pub use crate::lock::FileLock;
use crate::{Error, Result};

/// The suffix of the names of unfinished files and folders.
const UNFINISHED: &str = ".tmp";

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

/// Creates an unfinished file for `path`, with the usual permissions. Dropping the handle removes the file.
///
/// # Errors
/// [`Error::Io`] with `path`.
pub fn unfinished(path: impl AsRef<Path>) -> Result<NamedTempFile> {
    let path = path.as_ref();
    let created = beginning(path).and_then(|beginning| {
        let mut builder = Builder::new();
        builder.prefix(&beginning).suffix(UNFINISHED);
        // By default only the owner could read it. The umask of the process still applies.
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
        builder.tempfile_in(folder_of(path))
    });
    created.map_err(Error::io("write", path))
}

/// Creates an unfinished folder for `path`. Dropping the handle removes the folder, unless it was renamed.
///
/// # Errors
/// [`Error::Io`] with `path`.
pub fn unfinished_folder(path: impl AsRef<Path>) -> Result<TempDir> {
    let path = path.as_ref();
    let created = beginning(path).and_then(|beginning| {
        Builder::new()
            .prefix(&beginning)
            .suffix(UNFINISHED)
            .tempdir_in(folder_of(path))
    });
    created.map_err(Error::io("create the folder", path))
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

/// Returns `true` if `name` is the name of an unfinished file or folder for `path`.
pub fn is_unfinished(name: &OsStr, path: &Path) -> bool {
    let name = name.as_encoded_bytes();
    beginning(path).is_ok_and(|beginning| name.starts_with(beginning.as_encoded_bytes()))
        && name.ends_with(UNFINISHED.as_bytes())
}

/// Returns the prefix of the names of unfinished files for `path`.
fn beginning(path: &Path) -> io::Result<OsString> {
    let name = path
        .file_name()
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the path names no file"))?;
    let mut hidden = OsString::from(".");
    hidden.push(name);
    hidden.push(".");
    Ok(hidden)
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn an_unfinished_file_is_found_by_its_name_and_removed_when_it_is_dropped() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("a.json");
        let (one, other) = (unfinished(&path), unfinished(&path));
        let (one, other) = (one.expect("made"), other.expect("made"));
        assert_ne!(one.path(), other.path());
        for name in names(folder.path()) {
            assert!(is_unfinished(&name, &path), "{name:?}");
            assert!(!is_unfinished(&name, &folder.path().join("b.json")));
        }
        assert!(!is_unfinished(OsStr::new("a.json"), &path));
        drop((one, other));
        let made = unfinished_folder(&path).expect("made");
        assert!(is_unfinished(
            made.path().file_name().expect("a name"),
            &path
        ));
        drop(made);
        assert!(names(folder.path()).is_empty());
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
