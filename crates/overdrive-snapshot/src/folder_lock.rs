use std::fs::{self, File};
use std::io::ErrorKind;
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
    /// The folder itself; `None` where the system opens no folders. While it is open, no other folder has its number.
    opened: Option<Arc<File>>,
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
        let path = folder.join(LOCK_FILE);
        let lock = FileLock::try_acquire(&path)?.ok_or_else(|| Error::Locked {
            folder: folder.to_path_buf(),
            holder: FileLock::holder(&path),
        })?;
        if let Some(error) = lock.unsupported() {
            tracing::warn!(
                "the file system of {} does not support locks ({error}); make sure that no other run writes into \
                 this folder",
                folder.display()
            );
        }
        let opened = File::open(folder).ok().filter(|_| cfg!(unix));
        Ok(FolderLock {
            folder: folder.to_path_buf(),
            lock: Arc::new(lock),
            opened: opened.map(Arc::new),
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

    /// Checks that the folder still has its path, before something is written there: a run whose folder was moved must
    /// not begin a second one under the old path.
    ///
    /// # Errors
    /// [`Error::Moved`].
    pub fn check_in_place(&self) -> Result<()> {
        let is_moved = match fs::metadata(&self.folder) {
            Err(error) => error.kind() == ErrorKind::NotFound,
            Ok(found) => self.opened.as_ref().is_some_and(|opened| {
                let opened = opened.metadata();
                opened.is_ok_and(|opened| !is_same(&opened, &found))
            }),
        };
        match is_moved {
            true => Err(Error::Moved {
                folder: self.folder.clone(),
                now: self.opened.as_deref().and_then(path_of),
            }),
            false => Ok(()),
        }
    }
}

/// Returns the present path of an open folder, which Linux tells.
fn path_of(opened: &File) -> Option<PathBuf> {
    #[cfg(target_os = "linux")]
    {
        use std::os::fd::AsRawFd;
        let path = fs::read_link(format!("/proc/self/fd/{}", opened.as_raw_fd())).ok()?;
        // The link of a removed folder leads nowhere.
        path.is_dir().then_some(path)
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = opened;
        None
    }
}

#[cfg(unix)]
fn is_same(one: &fs::Metadata, other: &fs::Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

#[cfg(not(unix))]
fn is_same(_one: &fs::Metadata, _other: &fs::Metadata) -> bool {
    true
}
