//! A lock between processes.

use std::fs::{File, TryLockError};
use std::io;
use std::path::Path;

use crate::{Error, Result};

/// An exclusive lock on a file (`flock`), which the operating system releases however the process ends.
///
/// Some network file systems do not support locks. There the lock excludes no other process, and
/// [`unsupported`](FileLock::unsupported) returns the reason; the caller decides whether to continue without a lock.
#[derive(Debug)]
pub struct FileLock {
    _file: File,
    unsupported: Option<io::Error>,
}

impl FileLock {
    /// Locks the file at `path`, which is created if it is missing. Waits while another process holds the lock.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn acquire(path: impl AsRef<Path>) -> Result<FileLock> {
        let path = path.as_ref();
        let file = open(path)?;
        let locked = file.lock();
        FileLock::from_outcome(file, locked).map_err(Error::io("lock", path))
    }

    /// Locks the file as [`acquire`](FileLock::acquire) does, without waiting: returns `None` while another process
    /// (or another part of this one) holds the lock.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn try_acquire(path: impl AsRef<Path>) -> Result<Option<FileLock>> {
        let path = path.as_ref();
        let file = open(path)?;
        let locked = match file.try_lock() {
            Ok(()) => Ok(()),
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        };
        let lock = FileLock::from_outcome(file, locked).map_err(Error::io("lock", path))?;
        Ok(Some(lock))
    }

    /// Returns the error of a file system that does not support locks; `None` if the lock is held.
    pub fn unsupported(&self) -> Option<&io::Error> {
        self.unsupported.as_ref()
    }

    fn from_outcome(file: File, locked: io::Result<()>) -> io::Result<FileLock> {
        let unsupported = match locked {
            Ok(()) => None,
            Err(error) if is_unsupported(&error) => Some(error),
            Err(error) => return Err(error),
        };
        Ok(FileLock {
            _file: file,
            unsupported,
        })
    }
}

fn open(path: &Path) -> Result<File> {
    // For writing: NFS grants an exclusive lock only on such a file.
    let opened = File::options().create(true).append(true).open(path);
    opened.map_err(Error::io("lock", path))
}

/// Returns `true` for the errors of file systems without locks: ENOSYS (Lustre without `-o flock`), EOPNOTSUPP, and
/// ENOLCK (NFS without a lock service).
fn is_unsupported(error: &io::Error) -> bool {
    #[cfg(unix)]
    {
        use rustix::io::Errno;
        let codes = [Errno::NOSYS, Errno::OPNOTSUPP, Errno::NOTSUP, Errno::NOLCK];
        if Errno::from_io_error(error).is_some_and(|code| codes.contains(&code)) {
            return true;
        }
    }
    error.kind() == io::ErrorKind::Unsupported
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_excludes_the_second_until_the_first_is_dropped() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("lock");
        let first = FileLock::try_acquire(&path).expect("opens").expect("free");
        assert!(first.unsupported().is_none());
        assert!(FileLock::try_acquire(&path).expect("opens").is_none());
        drop(first);
        assert!(FileLock::try_acquire(&path).expect("opens").is_some());
    }

    #[cfg(unix)]
    #[test]
    fn a_file_system_without_locks_is_told_apart_from_an_error() {
        use rustix::io::Errno;
        for (code, unsupported) in [
            (Errno::NOLCK, true),
            (Errno::OPNOTSUPP, true),
            (Errno::NOSYS, true),
            (Errno::IO, false),
            (Errno::BADF, false),
        ] {
            let file = tempfile::tempfile().expect("temporary file");
            let answer = io::Error::from_raw_os_error(code.raw_os_error());
            let lock = FileLock::from_outcome(file, Err(answer));
            assert_eq!(lock.is_ok(), unsupported, "{code}");
            if let Ok(lock) = lock {
                let reason = lock.unsupported().expect("the answer");
                assert_eq!(reason.raw_os_error(), Some(code.raw_os_error()));
            }
        }
    }
}
