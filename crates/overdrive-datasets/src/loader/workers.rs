//! Threads that make the batches of a loader, in any order, and hand them over in theirs.
//!
//! To put a thread to sleep and wake it takes tens of microseconds, in which dozens of small records are read.
//! So where batches are made in less than [`CHEAP`], the loader makes the next one itself rather than sleep until
//! a worker has it, and workers that wait for room are woken when half of it is free, not for each batch.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::LoaderState;
use crate::sampling::BatchSampler;
use crate::{Error, Result};

/// A batch that is made in less time is not worth waiting for.
const CHEAP: Duration = Duration::from_micros(100);

/// What a loader makes its batches of.
pub(crate) struct Source<T> {
    pub(crate) batches: Box<dyn BatchSampler>,
    /// The batch of these records; `None` when all of them were left out.
    #[allow(clippy::type_complexity, reason = "one function, named by its field")]
    pub(crate) make: Box<dyn Fn(&[usize]) -> Result<Option<T>> + Send + Sync>,
}

/// What comes next in the stream of a loader.
pub(crate) enum Next<T> {
    Batch(Result<T>),
    /// A batch of which nothing is left.
    Nothing,
    EndOfEpoch,
}

impl<T> Source<T> {
    /// What is at `state`.
    pub(crate) fn next(&self, state: LoaderState) -> Next<T> {
        let work = || {
            if state.next_batch >= self.batches.len(state.epoch) {
                return Next::EndOfEpoch;
            }
            let records = self.batches.batch(state.epoch, state.next_batch);
            match (self.make)(&records) {
                Ok(Some(batch)) => Next::Batch(Ok(batch)),
                Ok(None) => Next::Nothing,
                Err(error) => Next::Batch(Err(error)),
            }
        };
        // Samplers, datasets and collations are the user's code; a panic there is an error of this
        // batch.
        catch_unwind(AssertUnwindSafe(work)).unwrap_or(Next::Batch(Err(Error::WorkerPanicked)))
    }
}

/// Running threads. They end when this is dropped.
pub(crate) struct Workers<T> {
    shared: Arc<Shared<T>>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared<T> {
    source: Arc<Source<T>>,
    /// How many places of the stream are worked on, or ready, at most.
    ahead: usize,
    queue: Mutex<Queue<T>>,
    /// The first place is ready: for the loader.
    ready: Condvar,
    /// Places were taken, or all is to stop: for the workers. Two conditions, so that handing over a
    /// small batch wakes one thread and not all of them.
    room: Condvar,
}

struct Queue<T> {
    /// The place that the next worker takes.
    cursor: LoaderState,
    /// What was taken by workers and not yet by the loader, in order; `None`: not ready.
    slots: VecDeque<Option<Next<T>>>,
    /// How many slots there were before the first one.
    taken: u64,
    /// How long it took to make a batch, the last ones counting most; `None`: none has been made.
    time: Option<Duration>,
    /// Workers that sleep, and whether the loader does: to wake nobody is a system call too.
    sleeping_workers: usize,
    loader_sleeps: bool,
    stopped: bool,
}

impl<T> Queue<T> {
    fn is_cheap(&self) -> bool {
        self.time.is_some_and(|time| time < CHEAP)
    }
}

impl<T: Send + 'static> Workers<T> {
    /// Starts `count` threads that work from `state` on, and are at most `ahead` places ahead.
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
        // Dropped on an error, it stops those that have started.
        let mut workers = Self {
            shared,
            threads: Vec::with_capacity(count),
        };
        for number in 0..count {
            let shared = Arc::clone(&workers.shared);
            let thread = std::thread::Builder::new()
                .name(format!("overdrive-loader-{number}"))
                .spawn(move || shared.work())
                .map_err(|error| Error::Threads {
                    what: "the workers of a data loader",
                    problem: error.to_string(),
                })?;
            workers.threads.push(thread);
        }
        Ok(workers)
    }

    /// What comes next, once it is ready, and how many places were ready when it was asked for.
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
        // The queue is whole whenever the lock is given back, and no code of the user runs under it
        // but that of a sampler, whose panic `take` catches.
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

    /// The next place of the stream, for which there is room.
    fn take(&self, queue: &mut Queue<T>) -> (u64, LoaderState) {
        let state = queue.cursor;
        let len = catch_unwind(AssertUnwindSafe(|| self.source.batches.len(state.epoch)));
        // An epoch whose length cannot be told ends at once, after the panic's message.
        queue.cursor = state.after(state.next_batch >= len.unwrap_or(0));
        queue.slots.push_back(None);
        (queue.taken + queue.slots.len() as u64 - 1, state)
    }

    /// Makes what is at a place, and puts it there.
    fn make(&self, (place, state): (u64, LoaderState)) -> MutexGuard<'_, Queue<T>> {
        let started = Instant::now();
        let next = self.source.next(state);
        let time = started.elapsed();
        let mut queue = self.lock();
        let before = queue.time.unwrap_or(time);
        queue.time = Some((3 * before + time) / 4);
        // A place is taken out of the queue only when it is ready, so it is still there.
        let slot = (place - queue.taken) as usize;
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
            // A worker catches the panics of what it runs.
            let _ = thread.join();
        }
    }
}
