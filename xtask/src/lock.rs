//! A file lock, so that one process at a time sets up a cache or creates a folder.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::Path;

use crate::failure::{Failure, Result};

/// The lock; it is released on drop, and by the system when the process ends.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

impl Lock {
    /// Takes the lock at `path`. If another process holds it, prints what that process is `doing` and waits.
    pub(crate) fn take(path: &Path, doing: &str, say: impl FnOnce(&str)) -> Result<Self> {
        let fail = |error: std::io::Error| Failure::io("could not lock", path, &error);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)
                .map_err(|error| Failure::io("could not create", parent, &error))?;
        }
        let mut file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(path)
            .map_err(fail)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                // Only for the message: a holder that has not written its process id yet is "another".
                let _ = file.read_to_string(&mut holder);
                let holder = match holder.trim() {
                    "" => "another process".to_owned(),
                    pid => format!("process {pid}"),
                };
                say(&format!(
                    "{holder} is {doing}; waiting until it is done ({})",
                    path.display()
                ));
                file.lock().map_err(fail)?;
            }
            Err(TryLockError::Error(error)) => return Err(fail(error)),
        }
        // The process id is only for the message of waiting processes; the lock itself is the system's.
        let _ = file
            .set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| write!(file, "{}", std::process::id()));
        Ok(Self { _file: file })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_second_waits_says_for_whom_and_gets_it_when_the_first_is_done() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sub/folder.lock");
        let first = Lock::take(&path, "at it", |_| panic!("nobody else holds it")).unwrap();
        let done = AtomicBool::new(false);
        let (said, hears) = mpsc::channel();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let lock = Lock::take(&path, "at it", |text| said.send(text.to_owned()).unwrap());
                assert!(done.load(Ordering::SeqCst), "it did not wait");
                lock.unwrap()
            });
            let text = hears.recv_timeout(Duration::from_secs(10)).unwrap();
            assert!(
                text.contains(&format!("process {} is at it", std::process::id())),
                "{text}"
            );
            assert!(text.contains("waiting"), "{text}");
            done.store(true, Ordering::SeqCst);
            drop(first);
            drop(waiter.join().unwrap());
        });
        drop(Lock::take(&path, "at it", |_| panic!("it was freed")).unwrap());
    }
}
