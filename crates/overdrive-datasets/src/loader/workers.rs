//! The worker threads of a loader, which make batches in any order and return them in sequence.
//!
//! Putting a thread to sleep and waking it takes tens of microseconds, in which dozens of small records are read.
//! So if batches take less than [`CHEAP`], the loader makes the next one itself instead of sleeping until a worker
//! has it, and workers that wait for room are woken when half of the queue is free, and not for each batch.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use overdrive_core::panic_text;

use super::LoaderState;
use crate::sampling::BatchSampler;
use crate::{Error, Result};

/// The time below which making a batch is cheaper than waiting for one.
const CHEAP: Duration = Duration::from_micros(100);

/// The source of a loader's batches.
pub(crate) struct Source<T> {
    pub(crate) batches: Box<dyn BatchSampler>,
    /// The function that makes the batch of these records in an epoch; it returns `None` if all of them were
    /// skipped.
    #[allow(clippy::type_complexity, reason = "one function, named by its field")]
    pub(crate) make: Box<dyn Fn(u64, &[usize]) -> Result<Option<T>> + Send + Sync>,
}

/// The next item in the stream of a loader.
pub(crate) enum Next<T> {
    Batch(Result<T>),
    /// A batch whose records were all skipped.
    Nothing,
    EndOfEpoch,
}

impl<T> Source<T> {
    /// Makes the item at `state`.
    pub(crate) fn next(&self, state: LoaderState) -> Next<T> {
        let work = || {
            if state.next_batch >= self.batches.len(state.epoch) {
                return Next::EndOfEpoch;
            }
            let records =
                self.batches
                    .batch_in_groups_of(state.group_len, state.epoch, state.next_batch);
            match (self.make)(state.epoch, &records) {
                Ok(Some(batch)) => Next::Batch(Ok(batch)),
                Ok(None) => Next::Nothing,
                Err(error) => Next::Batch(Err(error)),
            }
        };
        // Samplers, datasets and collate functions are the user's code; a panic in them becomes an error of
        // this batch.
        catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
            let message = panic_text(&*panic).to_owned();
            Next::Batch(Err(Error::Panicked { message }))
        })
    }
}

/// The running threads, which end when it is dropped.
pub(crate) struct Workers<T> {
    shared: Arc<Shared<T>>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared<T> {
    source: Arc<Source<T>>,
    /// The largest number of items of the stream that are being made or ready.
    ahead: usize,
    queue: Mutex<Queue<T>>,
    /// The condition that the loader waits for: the first item is ready.
    ready: Condvar,
    /// The condition that the workers wait for: there is room, or they must stop. There are two
    /// conditions, so that passing on a batch wakes one thread and not all of them.
    room: Condvar,
}

struct Queue<T> {
    /// The state at which the next worker starts.
    cursor: LoaderState,
    /// The items that workers have started and the loader has not taken, in order; `None` if not ready.
    slots: VecDeque<Option<Next<T>>>,
    /// The number of items that were taken before the first slot.
    taken: u64,
    /// The moving average of the time to make a batch; `None` before the first one.
    time: Option<Duration>,
    /// The number of sleeping workers. With this field and the next one, no system call wakes a thread unnecessarily.
    sleeping_workers: usize,
    /// If `true`, the loader sleeps.
    loader_sleeps: bool,
    stopped: bool,
}

impl<T> Queue<T> {
    fn is_cheap(&self) -> bool {
        self.time.is_some_and(|time| time < CHEAP)
    }
}

impl<T: Send + 'static> Workers<T> {
    /// Starts `count` threads that work from `state` on, at most `ahead` items ahead of the loader.
    pub(crate) fn start(
        source: &Arc<Source<T>>,
        state: LoaderState,
        count: usize,
        ahead: usize,
    ) -> Result<Self> {
        let shared = Arc::new(Shared {
            source: Arc::clone(source),
            ahead: ahead.max(1),
            queue: Mutex::new(Queue {
                cursor: state,
                slots: VecDeque::new(),
                taken: 0,
                time: None,
                sleeping_workers: 0,
                loader_sleeps: false,
                stopped: false,
            }),
            ready: Condvar::new(),
            room: Condvar::new(),
        });
        // If a thread cannot be started, dropping this stops the ones that have been.
        let mut workers = Self {
            shared,
            // No capacity is reserved: any number of threads may be requested, and the first one that cannot be
            // started ends the loop.
            threads: Vec::new(),
        };
        for number in 0..count {
            let shared = Arc::clone(&workers.shared);
            let thread = std::thread::Builder::new()
                .name(format!("overdrive-loader-{number}"))
                .spawn(move || shared.work())
                .map_err(|error| Error::Threads {
                    threads: "the workers of a data loader",
                    problem: error.to_string(),
                })?;
            workers.threads.push(thread);
        }
        Ok(workers)
    }

    /// Waits for the next item; returns it with the number of items that were ready at the request.
    pub(crate) fn next(&self) -> (Next<T>, usize) {
        let shared = &*self.shared;
        let mut queue = shared.lock();
        let ready = queue.slots.iter().filter(|slot| slot.is_some()).count();
        loop {
            if let Some(next) = queue.slots.front_mut().and_then(Option::take) {
                queue.slots.pop_front();
                queue.taken += 1;
                let is_time = !queue.is_cheap() || queue.slots.len() <= shared.ahead / 2;
                let wakes = is_time && queue.sleeping_workers > 0;
                drop(queue);
                if wakes {
                    shared.room.notify_one();
                }
                return (next, ready);
            }
            if queue.is_cheap() && queue.slots.len() < shared.ahead {
                let job = shared.take(&mut queue);
                drop(queue);
                queue = shared.make(job);
                continue;
            }
            queue.loader_sleeps = true;
            queue = wait(&shared.ready, queue);
            queue.loader_sleeps = false;
        }
    }
}

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, Queue<T>> {
        // The queue is valid whenever the lock is released. The only user code that runs under the lock is a
        // sampler, whose panic `take` catches.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut queue = self.lock();
        loop {
            if queue.stopped {
                return;
            }
            if queue.slots.len() >= self.ahead {
                queue.sleeping_workers += 1;
                queue = wait(&self.room, queue);
                queue.sleeping_workers -= 1;
                continue;
            }
            let job = self.take(&mut queue);
            drop(queue);
            queue = self.make(job);
            if queue.loader_sleeps && queue.slots.front().is_some_and(Option::is_some) {
                self.ready.notify_one();
            }
        }
    }

    /// Takes the next item of the stream, for which there must be room, and returns its number and state.
    fn take(&self, queue: &mut Queue<T>) -> (u64, LoaderState) {
        let state = queue.cursor;
        let len = catch_unwind(AssertUnwindSafe(|| self.source.batches.len(state.epoch)));
        // An epoch whose length cannot be computed ends at once, after the message of the panic.
        queue.cursor = state.after(state.next_batch >= len.unwrap_or(0));
        queue.slots.push_back(None);
        (queue.taken + queue.slots.len() as u64 - 1, state)
    }

    /// Makes the item at a state, and puts it into its slot.
    fn make(&self, (position, state): (u64, LoaderState)) -> MutexGuard<'_, Queue<T>> {
        let started = Instant::now();
        let next = self.source.next(state);
        let time = started.elapsed();
        let mut queue = self.lock();
        let before = queue.time.unwrap_or(time);
        // Three quarters of the weight stay with the past, so that one slow record does not change the mode.
        queue.time = Some((3 * before + time) / 4);
        // A slot is removed only when it is ready, so this one still exists.
        let slot = (position - queue.taken) as usize;
        if let Some(slot) = queue.slots.get_mut(slot) {
            *slot = Some(next);
        }
        queue
    }
}

fn wait<'a, T>(condition: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condition
        .wait(guard)
        .unwrap_or_else(PoisonError::into_inner)
}

impl<T> Drop for Workers<T> {
    fn drop(&mut self) {
        self.shared.lock().stopped = true;
        self.shared.room.notify_all();
        for thread in self.threads.drain(..) {
            // The panics of the user's code are caught, so a worker does not panic.
            let _ = thread.join();
        }
    }
}
