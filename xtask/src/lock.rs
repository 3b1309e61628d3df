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
                text.contains(&format!("process {} has been at it", std::process::id())),
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
