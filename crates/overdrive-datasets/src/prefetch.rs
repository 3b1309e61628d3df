//! Items prepared ahead by a thread.

use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;

use crate::{Error, Result};

/// An iterator that runs on a thread of its own and stays at most `depth` items ahead.
///
/// The items and their order are those of the iterator. The thread waits when it is far enough
/// ahead, and ends when this is dropped.
#[derive(Debug)]
pub struct Prefetch<T> {
    // `Some` until it is dropped: the channel closes first, then the thread is joined.
    receiver: Option<Receiver<Result<T>>>,
    thread: Option<JoinHandle<()>>,
}

impl<T: Send + 'static> Prefetch<T> {
    /// Starts the thread. A `depth` of 0 counts as 1.
    ///
    /// # Errors
    /// When the system starts no thread.
    pub fn new(
        iterator: impl Iterator<Item = Result<T>> + Send + 'static,
        depth: usize,
    ) -> Result<Self> {
        // One more item is in the thread's hands while it waits to hand it over.
        let (sender, receiver) = sync_channel(depth.max(1) - 1);
        let work = move || {
            for item in iterator {
                // Nobody listens any more: the batches were dropped.
                if sender.send(item).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("overdrive-prefetch".to_owned())
            .spawn(work)
            .map_err(|error| Error::Threads {
                what: "the thread that prepares batches",
                problem: error.to_string(),
            })?;
        Ok(Self {
            receiver: Some(receiver),
            thread: Some(thread),
        })
    }
}

impl<T> Iterator for Prefetch<T> {
    type Item = Result<T>;

    fn next(&mut self) -> Option<Self::Item> {
        if let Ok(item) = self.receiver.as_ref()?.recv() {
            return Some(item);
        }
        self.receiver = None;
        // The thread has ended: at the end of its items, or by a panic.
        match self.thread.take()?.join() {
            Ok(()) => None,
            Err(_) => Some(Err(Error::WorkerPanicked)),
        }
    }
}

impl<T> Drop for Prefetch<T> {
    fn drop(&mut self) {
        self.receiver = None;
        if let Some(thread) = self.thread.take() {
            // A panic was the thread's own, and is on standard error already.
            let _ = thread.join();
        }
    }
}
