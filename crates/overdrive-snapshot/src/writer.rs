//! The thread that writes.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use crate::contents::Part;
use crate::folder;
use crate::options::Best;
use crate::write::Job;
use crate::{Error, Result};

/// How a snapshot ended.
#[derive(Debug)]
pub struct SaveOutcome {
    /// The step it is of.
    pub step: u64,
    /// What was written, or why it was not. After an error the snapshots before are untouched, and
    /// training can go on.
    pub result: Result<SaveReport>,
}

/// A snapshot that is on the disk.
#[derive(Debug, Clone)]
pub struct SaveReport {
    /// Its folder.
    pub path: PathBuf,
    /// Bytes that this process wrote (rank 0: of all).
    pub bytes: u64,
    /// Seconds that writing took.
    pub seconds: f64,
    /// Seconds that training stood still for it.
    pub blocked_seconds: f64,
    /// Snapshots that were deleted to keep the limit.
    pub removed: Vec<PathBuf>,
    /// Why old ones could not be deleted, where that failed.
    pub rotation_error: Option<String>,
}

/// What is deleted after a snapshot.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rotation {
    pub(crate) limit: usize,
    pub(crate) best: Option<Best>,
}

/// Writes one snapshot and rotates. Returns the copies, to be filled again.
pub(crate) fn save(job: Job, rotation: Option<Rotation>, blocked: f64) -> (SaveOutcome, Vec<Part>) {
    let began = Instant::now();
    let result = job.write().map(|(path, bytes)| {
        let rotated =
            rotation.map(|Rotation { limit, best }| folder::rotate(&job.folder, limit, best));
        let (removed, rotation_error) = match rotated.transpose() {
            Ok(removed) => (removed.unwrap_or_default(), None),
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
    (outcome, job.parts)
}

type Done = (SaveOutcome, Vec<Part>);

/// A thread that writes one snapshot after another.
#[derive(Debug)]
pub(crate) struct Writer {
    jobs: Option<Sender<(Job, Option<Rotation>, f64)>>,
    done: Receiver<Done>,
    thread: Option<JoinHandle<()>>,
    pending: usize,
}

impl Writer {
    pub(crate) fn start() -> std::io::Result<Writer> {
        let (jobs, todo) = channel::<(Job, Option<Rotation>, f64)>();
        let (send, done) = channel();
        let thread = thread::Builder::new()
            .name("overdrive-snapshot".into())
            .spawn(move || {
                for (job, rotation, blocked) in todo {
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
        job: Job,
        rotation: Option<Rotation>,
        blocked: f64,
    ) -> Result<()> {
        let jobs = self.jobs.as_ref().ok_or(Error::WriterEnded)?;
        jobs.send((job, rotation, blocked))
            .map_err(|_| Error::WriterEnded)?;
        self.pending += 1;
        Ok(())
    }

    /// What is done already.
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

    /// Waits for the next one, if one is under way.
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
    /// Waits until what was begun is on the disk.
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the writer has nobody to be told to here.
            let _ = thread.join();
        }
    }
}
