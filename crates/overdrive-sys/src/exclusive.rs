//! A value that one thread uses at a time, and that is never used twice at once.

use std::cell::RefCell;

use parking_lot::ReentrantMutex;

use crate::callback::{CallbackError, CallbackResult};

/// A closure of a graph. Two backward passes may reach it at the same time: the second one waits. If a pass that the
/// closure itself runs reaches it, that is an error, because it would wait for itself.
pub(crate) struct Exclusive<T: ?Sized>(ReentrantMutex<RefCell<T>>);

impl<T> Exclusive<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(ReentrantMutex::new(RefCell::new(value)))
    }
}

impl<T: ?Sized> Exclusive<T> {
    /// Runs `body` on the value; `recursion` is the error if this thread is using it already.
    pub(crate) fn with<R>(
        &self,
        recursion: &'static str,
        body: impl FnOnce(&mut T) -> CallbackResult<R>,
    ) -> CallbackResult<R> {
        let held = self.0.lock();
        let mut value = held
            .try_borrow_mut()
            .map_err(|_| CallbackError::from(recursion))?;
        body(&mut value)
    }
}
