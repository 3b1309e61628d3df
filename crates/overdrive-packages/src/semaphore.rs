//! A counting semaphore that admits one thread to the compiled code for each runner.

use std::sync::{Condvar, Mutex, PoisonError};

/// Admits a fixed number of threads; the others wait outside.
///
/// libtorch's container would let them wait inside, where they hold a lock that the first run with new
/// constants needs exclusively: with more threads than runners, all would deadlock. Nor does it wake waiting
/// threads after a failed run.
#[derive(Debug)]
pub(crate) struct Semaphore {
    available: Mutex<usize>,
    released: Condvar,
}

impl Semaphore {
    pub(crate) fn new(permits: usize) -> Semaphore {
        Semaphore {
            available: Mutex::new(permits),
            released: Condvar::new(),
        }
    }

    /// Waits for a permit, which the guard returns when it is dropped.
    pub(crate) fn acquire(&self) -> Permit<'_> {
        // The counter is valid even after a panic, so a poisoned lock is no reason to fail.
        let available = self
            .available
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mut available = self
            .released
            .wait_while(available, |available| *available == 0)
            .unwrap_or_else(PoisonError::into_inner);
        *available -= 1;
        Permit(self)
    }
}

/// A permit of a [`Semaphore`] to run the compiled code.
#[must_use]
pub(crate) struct Permit<'a>(&'a Semaphore);

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        *self
            .0
            .available
            .lock()
            .unwrap_or_else(PoisonError::into_inner) += 1;
        self.0.released.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn no_more_threads_run_than_there_are_permits_and_all_finish() {
        let semaphore = Semaphore::new(2);
        let (running, most, finished) = (
            AtomicUsize::new(0),
            AtomicUsize::new(0),
            AtomicUsize::new(0),
        );
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let _permit = semaphore.acquire();
                        let now = running.fetch_add(1, Ordering::SeqCst) + 1;
                        most.fetch_max(now, Ordering::SeqCst);
                        std::thread::yield_now();
                        running.fetch_sub(1, Ordering::SeqCst);
                        finished.fetch_add(1, Ordering::SeqCst);
                    }
                });
            }
        });
        assert!(most.into_inner() <= 2);
        assert_eq!(finished.into_inner(), 400);
    }
}
