//! The modes that guards hold on a thread, so that the guards may be dropped in any order.
//!
//! Each mode changes thread-local state of libtorch and restores what it found. Some of them save the state of
//! others too (inference mode saves the grad mode), so modes must be left in reverse order. A guard that is dropped
//! before a later one leaves the later modes first, then its own, and enters the later ones again.

use std::cell::RefCell;
use std::marker::PhantomData;

/// A mode of a thread.
pub(crate) trait ThreadMode {
    /// Stores the state that it finds and sets its own.
    fn enter(&mut self);

    /// Restores the state that it found.
    fn leave(&mut self);
}

thread_local! {
    /// The modes of this thread's guards, with increasing ids.
    static ENTERED: RefCell<Vec<(u64, Box<dyn ThreadMode>)>> = const { RefCell::new(Vec::new()) };
}

/// A guard that leaves its mode when it is dropped.
#[derive(Debug)]
pub(crate) struct Entered {
    id: u64,
    /// Makes the guard `!Send`: the modes are thread-local.
    on_this_thread: PhantomData<*const ()>,
}

/// Keeps `mode`, which has been entered, until the guard is dropped.
pub(crate) fn keep(mode: impl ThreadMode + 'static) -> Entered {
    let id = ENTERED.with_borrow_mut(|modes| {
        let id = modes.last().map_or(0, |(last, _)| last + 1);
        modes.push((id, Box::new(mode)));
        id
    });
    Entered {
        id,
        on_this_thread: PhantomData,
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        // Taken out of the stack first: leaving a mode may drop tensors, and with them closures that use guards.
        let taken = ENTERED.try_with(|modes| {
            let mut modes = modes.borrow_mut();
            let at = modes.iter().rposition(|(id, _)| *id == self.id)?;
            Some(modes.split_off(at))
        });
        // The stack is gone when a guard in another thread-local outlives it; so is the thread, soon.
        let Ok(Some(mut taken)) = taken else { return };
        for (_, mode) in taken.iter_mut().rev() {
            mode.leave();
        }
        let mut later = taken.split_off(1);
        for (_, mode) in &mut later {
            mode.enter();
        }
        let _ = ENTERED.try_with(|modes| modes.borrow_mut().append(&mut later));
    }
}
