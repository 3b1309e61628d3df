//! A file lock, so that one process at a time sets up a cache or creates a folder.

use std::fs;
use std::path::Path;

use overdrive_core::Error;
use overdrive_core::files::FileLock;

use crate::failure::{Failure, Result};

/// Takes the lock at `path`. While another process holds it, `say` receives what that process is `doing`, and it waits.
pub(crate) fn take(path: &Path, doing: &str, say: impl FnOnce(&str)) -> Result<FileLock> {
    let fail = |error: &std::io::Error| Failure::io("could not lock", path, error);
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)
            .map_err(|error| Failure::io("could not create", parent, &error))?;
    }
    let lock = FileLock::acquire(path, doing, say).map_err(|error| match error {
        Error::Io { source, .. } => fail(&source),
        other => Failure::new(other.to_string()),
    })?;
    match lock.unsupported() {
        Some(error) => Err(fail(error)),
        None => Ok(lock),
    }
}
