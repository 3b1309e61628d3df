//! As many threads inside the compiled code as it has runners.

use std::sync::{Condvar, Mutex, PoisonError};

/// Lets in a number of threads; others wait outside.
///
/// libtorch's container would let them wait inside, where they hold a lock that the first run with new
/// constants needs for itself: with more threads than runners all would wait for one another. And after
/// a run that failed it wakes nobody.
#[derive(Debug)]
pub(crate) struct Gate {
    free: Mutex<usize>,
    left: Condvar,
}

impl Gate {
    pub(crate) fn new(places: usize) -> Gate {
        Gate {
            free: Mutex::new(places),
            left: Condvar::new(),
        }
    }

    /// Waits for a place, which is free again when the guard is dropped.
    pub(crate) fn enter(&self) -> Inside<'_> {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let mut free = self
            .left
            .wait_while(free, |free| *free == 0)
            .unwrap_or_else(PoisonError::into_inner);
        *free -= 1;
        Inside(self)
    }
}

/// A place inside a [`Gate`].
#[must_use]
pub(crate) struct Inside<'a>(&'a Gate);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        *self.0.free.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.0.left.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn no_more_threads_are_inside_than_there_are_places_and_all_come_through() {
        let gate = Gate::new(2);
        let (inside, most, through) = (
            AtomicUsize::new(0),
            AtomicUsize::new(0),
            AtomicUsize::new(0),
        );
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let _place = gate.enter();
                        let now = inside.fetch_add(1, Ordering::SeqCst) + 1;
                        most.fetch_max(now, Ordering::SeqCst);
                        std::thread::yield_now();
                        inside.fetch_sub(1, Ordering::SeqCst);
                        through.fetch_add(1, Ordering::SeqCst);
                    }
                });
            }
        });
        assert!(most.into_inner() <= 2);
        assert_eq!(through.into_inner(), 400);
    }
}
