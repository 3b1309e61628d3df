//! The interface of the searches for records, and the threads that run them.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Condvar, Mutex, PoisonError};

use crate::{Error, Result};

/// A search for the records of a file format.
pub(crate) trait Scan: Sync {
    /// Passes the offset of each record's start to `sink`, in order. Returns the offset at which the last
    /// record ends. `path` is used in error messages.
    fn scan(
        &self,
        path: &Path,
        data: &[u8],
        threads: usize,
        sink: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<u64>;

    /// Returns a key of everything that an index depends on besides the data: the format, its options, and a
    /// version that changes when the scan finds other records in the same data.
    fn key(&self) -> Vec<u8>;
}

/// The size of the chunks that are searched in parallel: large enough that the cost of passing them on is
/// negligible, small enough for the second-level cache.
pub(crate) const CHUNK_BYTES: usize = 1 << 20;

/// The byte order mark of UTF-8, which is not part of the first record.
const BOM: &[u8] = b"\xef\xbb\xbf";

/// Returns the offset of the first record, after a byte order mark.
pub(crate) fn text_start(data: &[u8]) -> usize {
    if data.starts_with(BOM) { BOM.len() } else { 0 }
}

/// Returns `true` for white space as JSON defines it.
pub(crate) fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\r' | b'\n')
}

/// Runs the jobs `0..jobs` on `threads` threads and passes their results to `sink` in order.
///
/// No job starts more than `ahead` jobs before the one that `sink` waits for, which bounds the memory however
/// long one job takes. An error of `sink` ends the run.
pub(crate) fn in_order<T: Send>(
    jobs: usize,
    threads: usize,
    ahead: usize,
    work: impl Fn(usize) -> T + Sync,
    mut sink: impl FnMut(T) -> Result<()>,
) -> Result<()> {
    // With one thread the work is done in the caller's, without a queue.
    if threads <= 1 || jobs <= 1 {
        return (0..jobs).try_for_each(|job| sink(work(job)));
    }
    let queue = Queue {
        state: Mutex::new(State {
            next_job: 0,
            taken: 0,
            slots: VecDeque::new(),
            stopped: false,
        }),
        changed: Condvar::new(),
        jobs,
        ahead: ahead.max(1),
    };
    std::thread::scope(|scope| {
        // The scope joins the workers when this closure ends, also after an error or a panic, so the workers
        // must be stopped first.
        let _stop = StopOnDrop(&queue);
        for number in 0..threads.min(jobs) {
            std::thread::Builder::new()
                .name(format!("overdrive-scan-{number}"))
                .spawn_scoped(scope, || {
                    let _stop = StopOnDrop(&queue);
                    while let Some(job) = queue.take_job() {
                        queue.put(job, work(job));
                    }
                    // Reached only without a panic of `work`, so the other workers must not be stopped.
                    std::mem::forget(_stop);
                })
                .map_err(|error| Error::Threads {
                    threads: "the threads that index files",
                    problem: error.to_string(),
                })?;
        }
        for _ in 0..jobs {
            sink(queue.take_result().ok_or(Error::WorkerPanicked)?)?;
        }
        Ok(())
    })
}

struct Queue<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
    jobs: usize,
    ahead: usize,
}

struct State<T> {
    next_job: usize,
    /// The number of results that have been passed on; `slots[0]` is the result of the job with this number.
    taken: usize,
    slots: VecDeque<Option<T>>,
    stopped: bool,
}

impl<T> Queue<T> {
    fn lock(&self) -> std::sync::MutexGuard<'_, State<T>> {
        // The state is valid whenever the lock is released, so a poisoned lock is harmless.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(
        &self,
        guard: std::sync::MutexGuard<'a, State<T>>,
    ) -> std::sync::MutexGuard<'a, State<T>> {
        self.changed
            .wait(guard)
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn take_job(&self) -> Option<usize> {
        let mut state = self.lock();
        loop {
            if state.stopped || state.next_job == self.jobs {
                return None;
            }
            if state.next_job < state.taken + self.ahead {
                state.next_job += 1;
                return Some(state.next_job - 1);
            }
            state = self.wait(state);
        }
    }

    fn put(&self, job: usize, result: T) {
        let mut state = self.lock();
        let slot = job - state.taken;
        while state.slots.len() <= slot {
            state.slots.push_back(None);
        }
        // Both the workers and the receiver wait for this condition, so all of them are woken.
        state.slots[slot] = Some(result);
        self.changed.notify_all();
    }

    fn take_result(&self) -> Option<T> {
        let mut state = self.lock();
        loop {
            if let Some(result) = state.slots.front_mut().and_then(Option::take) {
                state.slots.pop_front();
                state.taken += 1;
                self.changed.notify_all();
                return Some(result);
            }
            if state.stopped {
                return None;
            }
            state = self.wait(state);
        }
    }
}

struct StopOnDrop<'a, T>(&'a Queue<T>);

impl<T> Drop for StopOnDrop<'_, T> {
    fn drop(&mut self) {
        self.0.lock().stopped = true;
        self.0.changed.notify_all();
    }
}

/// Returns the number of cores that the process may use.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
