//! Work on libtorch's threads, and the first number that cannot be quantized.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Numbers that a job has at least: some tens of microseconds of work.
const JOB_LEN: usize = 64 << 10;

/// How many units (rows, blocks) of `unit` numbers a job takes.
pub(crate) fn units_of_job(unit: usize) -> usize {
    JOB_LEN.div_ceil(unit.max(1))
}

/// Runs `run` once with each job, several at a time.
///
/// A job owns the slices that it writes, so nothing here is unsafe; it is taken out of a mutex that
/// nobody else asks for.
pub(crate) fn run_jobs<J: Send>(jobs: impl Iterator<Item = J>, run: impl Fn(J) + Sync) {
    let jobs: Vec<Mutex<Option<J>>> = jobs.map(|job| Mutex::new(Some(job))).collect();
    overdrive_sys::threads::parallel_for(jobs.len(), 1, |range| {
        for slot in &jobs[range] {
            let job = slot.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(job) = job {
                run(job);
            }
        }
    });
}

/// Where the first number lies that is infinite or NaN.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NotFinite {
    pub(crate) index: usize,
}

/// The first of the bad numbers that several threads meet.
#[derive(Debug)]
pub(crate) struct FirstBad(AtomicUsize);

impl FirstBad {
    pub(crate) fn none() -> Self {
        FirstBad(AtomicUsize::new(usize::MAX))
    }

    pub(crate) fn note(&self, index: usize) {
        self.0.fetch_min(index, Ordering::Relaxed);
    }

    pub(crate) fn into_result(self) -> Result<(), NotFinite> {
        match self.0.into_inner() {
            usize::MAX => Ok(()),
            index => Err(NotFinite { index }),
        }
    }
}
