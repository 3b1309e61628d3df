//! The search for the starts of records, on all cores over a memory map.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Condvar, Mutex, PoisonError};

use crate::{Error, Result};

/// Where the records of a format start.
pub(crate) trait Scan: Sync {
    /// Hands the offset of each record's start to `sink`, in order. Gives the offset at which the
    /// last record ends. `path` is for messages.
    fn scan(
        &self,
        path: &Path,
        data: &[u8],
        threads: usize,
        sink: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<u64>;

    /// What an index of this format depends on besides the data: the format, its options, and a
    /// number that changes when the scan finds other records in the same data.
    fn key(&self) -> Vec<u8>;
}

/// UTF-8's byte order mark, which is no part of the first record.
const BOM: &[u8] = b"\xef\xbb\xbf";

/// Where the records begin: behind the byte order mark, where there is one.
pub(crate) fn text_start(data: &[u8]) -> usize {
    if data.starts_with(BOM) { BOM.len() } else { 0 }
}

/// What JSON calls white space, which has no other character of one byte.
pub(crate) fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\r' | b'\n')
}

/// Runs jobs `0..jobs` on `threads` threads and hands their results to `sink` in order.
///
/// No job starts more than `ahead` places before the one that `sink` waits for, so memory is bounded
/// by that however long one job takes. An error of `sink` ends it.
pub(crate) fn in_order<T: Send>(
    jobs: usize,
    threads: usize,
    ahead: usize,
    work: impl Fn(usize) -> T + Sync,
    mut sink: impl FnMut(T) -> Result<()>,
) -> Result<()> {
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
        // Whichever way this closure is left, the workers are told to stop before they are joined.
        let _stop = StopOnDrop(&queue);
        for number in 0..threads.min(jobs) {
            std::thread::Builder::new()
                .name(format!("overdrive-scan-{number}"))
                .spawn_scoped(scope, || {
                    let _stop = StopOnDrop(&queue);
                    while let Some(job) = queue.take_job() {
                        queue.put(job, work(job));
                    }
                    // The work was not broken off by a panic, so the others may go on.
                    std::mem::forget(_stop);
                })
                .map_err(|error| Error::Threads {
                    what: "the threads that index files",
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
    /// How many results have been handed on; `slots[0]` is the result of this job.
    taken: usize,
    slots: VecDeque<Option<T>>,
    stopped: bool,
}

impl<T> Queue<T> {
    fn lock(&self) -> std::sync::MutexGuard<'_, State<T>> {
        // The state is whole at every point where the lock is given back.
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

/// The number of cores.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
