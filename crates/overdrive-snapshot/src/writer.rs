//! The background thread that writes snapshots.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
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

type Done = (SaveOutcome, Vec<Entry>);

/// A thread that writes one snapshot after another.
#[derive(Debug)]
pub(crate) struct Writer {
    jobs: Option<Sender<(SaveJob, Option<Rotation>, f64)>>,
    done: Receiver<Done>,
    thread: Option<JoinHandle<()>>,
    pending: usize,
}

impl Writer {
    pub(crate) fn start() -> std::io::Result<Writer> {
        let (jobs, todo) = channel::<(SaveJob, Option<Rotation>, f64)>();
        let (send, done) = channel();
        let thread = thread::Builder::new()
            .name("overdrive-snapshot".into())
            .spawn(move || {
                for (job, rotation, blocked) in todo {
                    // The receiver is gone only when the manager is dropped.
                    if send.send(save(job, rotation, blocked)).is_err() {
                        return;
                    }
                }
            })?;
        Ok(Writer {
            jobs: Some(jobs),
            done,
            thread: Some(thread),
            pending: 0,
        })
    }

    pub(crate) fn send(
        &mut self,
        job: SaveJob,
        rotation: Option<Rotation>,
        blocked: f64,
    ) -> Result<()> {
        let jobs = self.jobs.as_ref().ok_or(Error::WriterEnded)?;
        jobs.send((job, rotation, blocked))
            .map_err(|_| Error::WriterEnded)?;
        self.pending += 1;
        Ok(())
    }

    /// Returns a finished snapshot, without waiting; `None` if there is none.
    pub(crate) fn poll(&mut self) -> Result<Option<Done>> {
        match self.done.try_recv() {
            Ok(done) => {
                self.pending -= 1;
                Ok(Some(done))
            }
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) if self.pending == 0 => Ok(None),
            Err(TryRecvError::Disconnected) => Err(Error::WriterEnded),
        }
    }

    /// Waits for the next snapshot; returns `None` if none is being written.
    pub(crate) fn next(&mut self) -> Result<Option<Done>> {
        if self.pending == 0 {
            return Ok(None);
        }
        let done = self.done.recv().map_err(|_| Error::WriterEnded)?;
        self.pending -= 1;
        Ok(Some(done))
    }
}

impl Drop for Writer {
    /// Waits until the pending snapshots are on disk.
    fn drop(&mut self) {
        // Closing the channel ends the thread's loop after the snapshots that it already has.
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the writer cannot be returned from a destructor; its message is on standard error.
            let _ = thread.join();
        }
    }
}
