//! A file lock, so that one process at a time sets up a cache or creates a folder.

use std::fs;
use std::path::Path;

use overdrive_core::Error;
use overdrive_core::files::FileLock;

use crate::failure::{Failure, Result};

/// Takes the lock at `path`. If another process holds it, prints what that process is `doing` and waits.
pub(crate) fn take(path: &Path, doing: &str, say: impl FnOnce(&str)) -> Result<FileLock> {
    let fail = |error: &std::io::Error| Failure::io("could not lock", path, error);
    let refused = |error: Error| match error {
        Error::Io { source, .. } => fail(&source),
        other => Failure::new(other.to_string()),
    };
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)
            .map_err(|error| Failure::io("could not create", parent, &error))?;
    }
    let lock = match FileLock::try_acquire(path).map_err(refused)? {
        Some(lock) => lock,
        None => {
            // Only for the message: a holder that has not written its process id yet is "another".
            let holder = fs::read_to_string(path).unwrap_or_default();
            let holder = match holder.trim() {
                "" => "another process".to_owned(),
                pid => format!("process {pid}"),
            };
            say(&format!(
                "{holder} is {doing}; waiting for it to finish ({})",
                path.display()
            ));
            FileLock::acquire(path).map_err(refused)?
        }
    };
    if let Some(error) = lock.unsupported() {
        return Err(fail(error));
    }
    // The process id is only for the message of waiting processes; the lock itself is the system's.
    let _ = fs::write(path, std::process::id().to_string());
    Ok(lock)
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
        let first = take(&path, "at it", |_| panic!("nobody else holds it")).unwrap();
        let done = AtomicBool::new(false);
        let (said, hears) = mpsc::channel();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let lock = take(&path, "at it", |text| said.send(text.to_owned()).unwrap());
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
        drop(take(&path, "at it", |_| panic!("it was freed")).unwrap());
    }
}
