//! Closures that borrow, for callers without lifetimes.
//!
//! A backward pass may run the closure of a checkpointed region long after it was passed to libtorch.
//! [`scope`] makes borrowing closures safe there as `std::thread::scope` does for threads: all of them
//! are dropped before the borrowed values can be.

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::thread::{self, ThreadId};

use tch::Tensor;

use crate::callback::CallbackResult;

type Borrowing<'a> = dyn Fn(&[Tensor]) -> CallbackResult<()> + 'a;

/// A closure whose lifetime was erased; empty once its scope has ended.
struct State {
    owner: ThreadId,
    /// Is read and emptied on the owner's thread only.
    call: RefCell<Option<Rc<Borrowing<'static>>>>,
}

// SAFETY: `ScopedClosure` checks the thread before it touches the closure, and `scope` empties the state
// on its own thread before the borrows end: a state that is dropped on another thread is empty.
unsafe impl Send for State {}
// SAFETY: as above.
unsafe impl Sync for State {}

/// A closure that was registered in a [`Scope`]. It can be stored anywhere, and called on the thread of the
/// scope until the scope ends.
#[derive(Clone)]
pub struct ScopedClosure(Arc<State>);

impl std::fmt::Debug for ScopedClosure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("ScopedClosure").field(&self.0.owner).finish()
    }
}

impl ScopedClosure {
    /// Calls the closure.
    ///
    /// # Errors
    /// Returns an error on another thread than that of the scope and after the scope has ended, and the closure's own
    /// errors.
    pub fn call(&self, inputs: &[Tensor]) -> CallbackResult<()> {
        // Checked first: another thread must not even borrow the cell.
        if thread::current().id() != self.0.owner {
            return Err(
                "the closure borrows from the thread that registered it, and this is another thread: run \
                 backward on that thread and keep it there (BackwardOnThisThread)"
                    .into(),
            );
        }
        // Cloned, so that the cell is not borrowed while the closure runs: it may end itself.
        let call = self.0.call.borrow().clone();
        let call = call
            .ok_or("the closure was called after its scope ended: run backward inside the scope")?;
        call(inputs)
    }

    /// Drops the closure before the scope ends. Has no effect on another thread than that of the scope.
    pub fn end(&self) {
        if thread::current().id() == self.0.owner {
            let closure = self.0.call.take();
            drop(closure);
        }
    }
}

/// The closures of a scope.
#[derive(Debug, Default)]
struct Registered {
    closures: RefCell<Vec<ScopedClosure>>,
    ended: Cell<bool>,
}

/// A scope that registers closures; see [`scope`].
#[derive(Debug)]
pub struct Scope<'scope, 'env: 'scope> {
    registered: Rc<Registered>,
    /// Invariant, as in `std::thread::Scope`: the compiler can neither lengthen nor shorten the lifetime.
    scope: PhantomData<&'scope mut &'scope ()>,
    env: PhantomData<&'env mut &'env ()>,
}

impl<'scope> Scope<'scope, '_> {
    /// Registers a closure until the scope ends. While it ends, a destructor of a captured value may still
    /// register one; that closure is dropped at once.
    pub fn register(
        &self,
        closure: impl Fn(&[Tensor]) -> CallbackResult<()> + 'scope,
    ) -> ScopedClosure {
        let closure: Rc<Borrowing<'scope>> = Rc::new(closure);
        let call = match self.registered.ended.get() {
            true => None,
            // SAFETY: only the lifetime changes. `scope` takes the closure out of the state before 'scope ends,
            // however its body ends, and on the thread that all calls are made on; a call holds its own
            // reference only while it runs, on the stack above that body.
            false => Some(unsafe {
                std::mem::transmute::<Rc<Borrowing<'scope>>, Rc<Borrowing<'static>>>(closure)
            }),
        };
        let scoped = ScopedClosure(Arc::new(State {
            owner: thread::current().id(),
            call: RefCell::new(call),
        }));
        let mut closures = self.registered.closures.borrow_mut();
        // Removes the closures that ended early, so that a long scope does not grow without bound; only
        // when the vector is full, so that the cost per closure stays constant.
        if closures.len() == closures.capacity() {
            closures.retain(|scoped| scoped.0.call.borrow().is_some());
        }
        closures.push(scoped.clone());
        scoped
    }
}

/// Runs `body` with a scope. Every closure that was registered has been dropped when this returns;
/// calling one later is an error. A panic of a captured value's destructor resumes here, once all are dropped.
///
/// Closures may borrow values that live outside of `body`:
///
/// ```
/// use overdrive_sys::scoped_closure::scope;
///
/// let weight = tch::Tensor::from(2.0);
/// let kept = scope(|scope| {
///     let closure = scope.register(|inputs| Ok(drop(inputs[0].f_mul(&weight)?)));
///     closure.call(&[tch::Tensor::from(1.0)]).map(|()| closure)
/// })?;
/// assert!(kept.call(&[tch::Tensor::from(1.0)]).is_err());
/// # Ok::<(), overdrive_sys::CallbackError>(())
/// ```
///
/// but not values that live inside:
///
/// ```compile_fail,E0597
/// overdrive_sys::scoped_closure::scope(|scope| {
///     let weight = tch::Tensor::from(2.0);
///     scope.register(|inputs| Ok(drop(inputs[0].f_mul(&weight)?)));
/// });
/// ```
pub fn scope<'env, T>(body: impl for<'scope> FnOnce(&'scope Scope<'scope, 'env>) -> T) -> T {
    struct End(Rc<Registered>);
    impl Drop for End {
        fn drop(&mut self) {
            // All closures are out of reach before the first is dropped: the destructor of a captured value may
            // call another closure, register one or panic.
            self.0.ended.set(true);
            let registered = self.0.closures.take();
            let revoked: Vec<_> = registered
                .iter()
                .filter_map(|scoped| scoped.0.call.take())
                .collect();
            let mut panic = None;
            for closure in revoked {
                if let Err(payload) = catch_unwind(AssertUnwindSafe(|| drop(closure))) {
                    panic.get_or_insert(payload);
                }
            }
            // A second panic during an unwinding would abort.
            if let Some(payload) = panic.filter(|_| !thread::panicking()) {
                resume_unwind(payload);
            }
        }
    }
    let scope = Scope {
        registered: Rc::default(),
        scope: PhantomData,
        env: PhantomData,
    };
    // Declared after the scope, so dropped before it: the closures may hold references to the scope.
    let _end = End(Rc::clone(&scope.registered));
    body(&scope)
}
