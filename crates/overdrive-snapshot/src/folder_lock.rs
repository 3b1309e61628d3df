use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use overdrive_core::Error as CommonError;
use overdrive_core::files::FileLock;

use crate::{Error, Result};

/// The name of the file that a running process keeps locked.
const LOCK_FILE: &str = ".lock";

/// The lock on the folder of a run, held by one run at a time. A program that writes other files into the folder, or
/// replaces a run, takes the lock first and passes it on in [`SnapshotOptions::lock`](crate::SnapshotOptions::lock).
///
/// Clones share the lock. It is released when the last one is dropped, and by the operating system however the
/// process ends.
#[derive(Debug, Clone)]
pub struct FolderLock {
    folder: PathBuf,
    lock: Arc<FileLock>,
}

impl FolderLock {
    /// Creates the folder if it does not exist, and locks it.
    ///
    /// On a file system without locks, logs a warning and locks nothing, so that runs are possible there.
    ///
    /// # Errors
    /// [`Error::Locked`] while another run holds the lock, [`Error::Common`] if the folder cannot be written.
    pub fn acquire(folder: impl AsRef<Path>) -> Result<FolderLock> {
        let folder = folder.as_ref();
        fs::create_dir_all(folder).map_err(CommonError::io("create the folder", folder))?;
        let lock = FileLock::try_acquire(folder.join(LOCK_FILE))?.ok_or_else(|| Error::Locked {
            folder: folder.to_path_buf(),
        })?;
        if let Some(error) = lock.unsupported() {
            tracing::warn!(
                "the file system of {} does not support locks ({error}); make sure that no other run writes into \
                 this folder",
                folder.display()
            );
        }
        Ok(FolderLock {
            folder: folder.to_path_buf(),
            lock: Arc::new(lock),
        })
    }

    /// Returns the folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns `true` if other runs are excluded, `false` on a file system without locks.
    pub fn is_exclusive(&self) -> bool {
        self.lock.unsupported().is_none()
    }
}
