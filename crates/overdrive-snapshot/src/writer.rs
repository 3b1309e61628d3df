//! Writing snapshots, also on a background thread.

use std::path::PathBuf;
use std::thread::{self, JoinHandle};
use std::time::Instant;

use crate::contents::Entry;
use crate::options::Best;
use crate::rotation::rotate;
use crate::save_job::SaveJob;
use crate::{Error, Result};

/// The outcome of saving a snapshot.
#[derive(Debug)]
pub struct SaveOutcome {
    /// The step of the snapshot.
    pub step: u64,
    /// The report, or the error. After an error the earlier snapshots are unchanged, and training can continue.
    pub result: Result<SaveReport>,
}

/// A report on a written snapshot.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct SaveReport {
    /// The folder of the snapshot.
    pub path: PathBuf,
    /// The number of bytes that this process wrote; on rank 0, the total of all ranks.
    pub bytes: u64,
    /// The time that writing took, in seconds.
    pub seconds: f64,
    /// The time that training was blocked, in seconds.
    pub blocked_seconds: f64,
    /// The snapshots that were deleted to keep the limit.
    pub removed: Vec<PathBuf>,
    /// The error, if deleting old snapshots failed.
    pub rotation_error: Option<String>,
}

/// The snapshots that are kept after a new one was written.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rotation {
    pub(crate) limit: usize,
    pub(crate) best: Option<Best>,
}

/// Writes one snapshot and deletes old ones. Returns the host copies, for reuse.
pub(crate) fn save(
    job: SaveJob,
    rotation: Option<Rotation>,
    blocked: f64,
) -> (SaveOutcome, Vec<Entry>) {
    let began = Instant::now();
    let result = job.write().map(|(path, bytes)| {
        let rotated = rotation.map(|Rotation { limit, best }| rotate(&job.folder, limit, best));
        let (removed, rotation_error) = match rotated.transpose() {
            Ok(removed) => (removed.unwrap_or_default(), None),
            // A failure to delete an old snapshot does not make the new one a failure.
            Err(error) => (Vec::new(), Some(error.to_string())),
        };
        SaveReport {
            path,
            bytes,
            seconds: began.elapsed().as_secs_f64(),
            blocked_seconds: blocked,
            removed,
            rotation_error,
        }
    });
    let outcome = SaveOutcome {
        step: job.step,
        result,
    };
    (outcome, job.entries)
}

/// A finished save, with the host copies for reuse.
pub(crate) type Done = (SaveOutcome, Vec<Entry>);

/// A snapshot that a thread writes.
#[derive(Debug)]
pub(crate) struct BackgroundSave(Option<JoinHandle<Done>>);

impl BackgroundSave {
    pub(crate) fn start(
        job: SaveJob,
        rotation: Option<Rotation>,
        blocked: f64,
    ) -> std::io::Result<Self> {
        let thread = thread::Builder::new().name("overdrive-snapshot".into());
        let handle = thread.spawn(move || save(job, rotation, blocked))?;
        Ok(Self(Some(handle)))
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.0.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits until the snapshot is on disk.
    pub(crate) fn wait(mut self) -> Result<Done> {
        let handle = self.0.take().ok_or(Error::WriterEnded)?;
        handle.join().map_err(|_| Error::WriterEnded)
    }
}

impl Drop for BackgroundSave {
    fn drop(&mut self) {
        if let Some(handle) = self.0.take() {
            // A panic of the writer cannot be returned from a destructor; its message is on standard error.
            let _ = handle.join();
        }
    }
}
