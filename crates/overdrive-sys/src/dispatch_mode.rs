//! Seeing every operator that a thread calls, and answering in its place: what a `TorchDispatchMode`
//! is in Python.
//!
//! A mode stands right below autograd: it sees the operators that kernels exist for (`aten::addmm`,
//! not `aten::linear`), those of backward too while a backward pass runs on its thread, and not those
//! that a kernel calls itself. It costs about a microsecond an operator on the threads that have one.

use std::cell::RefCell;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::ptr;
use std::rc::Rc;
use std::sync::{Arc, Once};

use tch::Tensor;

use crate::callback::{self, CallbackResult};
use crate::error::{Result, check, take_string};
use crate::ffi::{self, RawTensor};

/// What a thread's operators are shown to.
pub trait DispatchMode {
    /// Before the operator runs; what is returned takes the place of its results, and it does not run.
    ///
    /// # Errors
    /// What is returned becomes the error of the operator.
    fn before(&self, call: &OperatorCall) -> CallbackResult<Option<Arc<Results>>> {
        let _ = call;
        Ok(None)
    }

    /// After it ran, or was answered. Not called if it failed.
    ///
    /// # Errors
    /// What is returned becomes the error of the operator.
    fn after(&self, call: &OperatorCall) -> CallbackResult<()> {
        let _ = call;
        Ok(())
    }
}

/// An operator that is being called.
#[derive(Debug)]
pub struct OperatorCall {
    raw: *mut ffi::RawDispatched,
}

impl OperatorCall {
    /// Its name, such as `aten::addmm`.
    pub fn name(&self) -> &str {
        let mut len = 0;
        // SAFETY: the call is alive while modes see it; operator names live as long as their operator,
        // are UTF-8 (ASCII) and have `len` bytes.
        unsafe {
            let text = ffi::od_dispatched_name(self.raw, &raw mut len);
            str_of(text, len)
        }
    }

    /// Its overload, such as `Tensor`; often empty.
    pub fn overload(&self) -> &str {
        let mut len = 0;
        // SAFETY: as in `name`.
        unsafe {
            let text = ffi::od_dispatched_overload(self.raw, &raw mut len);
            str_of(text, len)
        }
    }

    /// Name and overload, such as `aten::add.Tensor`.
    pub fn full_name(&self) -> String {
        match self.overload() {
            "" => self.name().to_owned(),
            overload => format!("{}.{overload}", self.name()),
        }
    }

    /// Whether it writes to an argument (`aten::add_`, `aten::copy_`, `out=`).
    ///
    /// # Errors
    /// Only if libtorch throws.
    pub fn mutates(&self) -> Result<bool> {
        Ok(self.flags()? & ffi::MUTATES != 0)
    }

    /// Whether a result shares memory with an argument (views, in-place operators).
    ///
    /// # Errors
    /// Only if libtorch throws.
    pub fn aliases(&self) -> Result<bool> {
        Ok(self.flags()? & ffi::ALIASES != 0)
    }

    /// Whether it draws from a random generator.
    ///
    /// # Errors
    /// Only if libtorch throws.
    pub fn is_random(&self) -> Result<bool> {
        Ok(self.flags()? & ffi::RANDOM != 0)
    }

    fn flags(&self) -> Result<i32> {
        let mut flags = 0;
        // SAFETY: the call is alive; `flags` is written only on success.
        let status = unsafe { ffi::od_dispatched_flags(self.raw, &raw mut flags) };
        check(status, "reading a schema")?;
        Ok(flags)
    }

    /// The tensors among its arguments ([`DispatchMode::before`]) or its results
    /// ([`DispatchMode::after`]), those in lists too.
    ///
    /// # Errors
    /// Only if memory runs out.
    pub fn tensors(&self) -> Result<Vec<Tensor>> {
        let mut tensors: Vec<Tensor> = Vec::new();
        // SAFETY: the call is alive; `push` is given the vector that it expects.
        let status =
            unsafe { ffi::od_dispatched_tensors(self.raw, (&raw mut tensors).cast(), push) };
        check(status, "reading the tensors of a call")?;
        Ok(tensors)
    }

    /// Keeps the results, without their place in the graph, for [`DispatchMode::before`] of a later
    /// call of the same operator. They share memory with what the caller gets.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] before it ran.
    pub fn keep(&self) -> Result<Results> {
        let mut raw = ptr::null_mut();
        // SAFETY: the call is alive; `raw` is written only on success.
        let status = unsafe { ffi::od_dispatched_keep(self.raw, &raw mut raw) };
        check(status, "keeping the results of a call")?;
        Ok(Results { raw })
    }
}

/// # Safety
/// `text` points to `len` bytes of UTF-8 that live as long as the borrow the caller makes of it.
unsafe fn str_of<'a>(text: *const std::ffi::c_char, len: usize) -> &'a str {
    // SAFETY: the caller's promise.
    let bytes = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), len) };
    std::str::from_utf8(bytes).unwrap_or("(a name that is not UTF-8)")
}

unsafe extern "C" fn push(into: *mut c_void, owned: RawTensor) {
    // SAFETY: `into` is the vector of the caller, the handle a new one.
    unsafe { (*into.cast::<Vec<Tensor>>()).push(Tensor::from_ptr(owned.cast())) }
}

/// The results of a call, kept. A tensor among them that was changed in place since makes answering with
/// them an error.
#[derive(Debug)]
pub struct Results {
    raw: *mut ffi::RawResults,
}

// SAFETY: tensors and plain values behind atomic reference counts, never changed after they were made;
// every use makes new handles.
unsafe impl Send for Results {}
// SAFETY: as above.
unsafe impl Sync for Results {}

impl Results {
    /// The tensors among them.
    ///
    /// # Errors
    /// Only if memory runs out.
    pub fn tensors(&self) -> Result<Vec<Tensor>> {
        let mut tensors: Vec<Tensor> = Vec::new();
        // SAFETY: alive with `self`; `push` is given the vector that it expects.
        let status = unsafe { ffi::od_results_tensors(self.raw, (&raw mut tensors).cast(), push) };
        check(status, "reading kept results")?;
        Ok(tensors)
    }
}

impl Drop for Results {
    fn drop(&mut self) {
        // SAFETY: owned by `self`, freed once.
        unsafe { ffi::od_results_free(self.raw) }
    }
}

thread_local! {
    static MODES: RefCell<Vec<(u64, Rc<dyn DispatchMode>)>> = const { RefCell::new(Vec::new()) };
}

/// A mode on this thread's stack, until dropped.
#[derive(Debug)]
#[must_use = "the mode ends when the guard is dropped"]
pub struct ModeGuard {
    id: u64,
    /// The stack is the thread's: the guard stays there.
    on_this_thread: PhantomData<*const ()>,
}

/// Shows every operator of this thread to `mode` until the guard is dropped. The mode pushed last is
/// asked first; one that answers keeps the others from seeing the call.
pub fn push_mode(mode: Rc<dyn DispatchMode>) -> ModeGuard {
    static INSTALLED: Once = Once::new();
    static CALLBACKS: ffi::RawDispatchCallbacks = ffi::RawDispatchCallbacks {
        before: call_before,
        after: call_after,
    };
    // SAFETY: a static of functions that keep the shim's contract.
    INSTALLED.call_once(|| unsafe { ffi::od_dispatch_mode_install(&raw const CALLBACKS) });
    let id = MODES.with_borrow_mut(|modes| {
        let id = modes.last().map_or(0, |(last, _)| last + 1);
        modes.push((id, mode));
        id
    });
    // SAFETY: sets thread-local flags.
    unsafe { ffi::od_dispatch_mode_listen(1) };
    ModeGuard {
        id,
        on_this_thread: PhantomData,
    }
}

impl Drop for ModeGuard {
    fn drop(&mut self) {
        let removed = MODES.with_borrow_mut(|modes| {
            let at = modes.iter().position(|(id, _)| *id == self.id)?;
            let mode = modes.remove(at);
            if modes.is_empty() {
                // SAFETY: sets thread-local flags.
                unsafe { ffi::od_dispatch_mode_listen(0) };
            }
            Some(mode)
        });
        // Outside of the borrow: a mode may own anything.
        drop(removed);
    }
}

/// Keeps what `body` calls from this thread's modes.
pub(crate) fn unseen<T>(body: impl FnOnce() -> T) -> T {
    struct Resume;
    impl Drop for Resume {
        fn drop(&mut self) {
            // SAFETY: sets thread-local flags.
            unsafe { ffi::od_dispatch_mode_listen(1) };
        }
    }
    if MODES.with_borrow(Vec::is_empty) {
        return body();
    }
    // SAFETY: sets thread-local flags.
    unsafe { ffi::od_dispatch_mode_listen(0) };
    let _resume = Resume;
    body()
}

/// Whether anything on this thread would see an operator.
pub(crate) fn has_modes() -> bool {
    MODES.with_borrow(|modes| !modes.is_empty())
}

/// The mode on top first.
fn modes() -> Vec<Rc<dyn DispatchMode>> {
    MODES.with_borrow(|modes| {
        modes
            .iter()
            .rev()
            .map(|(_, mode)| Rc::clone(mode))
            .collect()
    })
}

thread_local! {
    /// How many modes, from the top, saw the call that is under way. Calls do not nest: a mode is off
    /// while an operator runs.
    static ASKED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

unsafe extern "C" fn call_before(raw: *mut ffi::RawDispatched) -> ffi::RawFailure {
    callback::contain(|| {
        let call = OperatorCall { raw };
        let modes = modes();
        ASKED.set(modes.len());
        for (index, mode) in modes.iter().enumerate() {
            if let Some(results) = mode.before(&call)? {
                ASKED.set(index + 1);
                // SAFETY: the call is alive, the results too.
                let status = unsafe { ffi::od_dispatched_replace(raw, results.raw) };
                return Ok(check(status, call.name())?);
            }
        }
        Ok(())
    })
}

unsafe extern "C" fn call_after(raw: *mut ffi::RawDispatched) -> ffi::RawFailure {
    callback::contain(|| {
        let call = OperatorCall { raw };
        let asked = ASKED.get();
        modes()
            .iter()
            .take(asked)
            .rev()
            .try_for_each(|mode| mode.after(&call))
    })
}

/// Keeps track of the names of the operators under way on this thread, for [`operator_under_way`],
/// until dropped. Costs under a microsecond an operator.
#[derive(Debug)]
#[must_use = "the names are kept until the guard is dropped"]
pub struct OperatorNames {
    before: i32,
    on_this_thread: PhantomData<*const ()>,
}

impl OperatorNames {
    /// From here on.
    pub fn new() -> Self {
        Self {
            // SAFETY: sets a thread-local flag.
            before: unsafe { ffi::od_operator_names_set(1) },
            on_this_thread: PhantomData,
        }
    }
}

impl Default for OperatorNames {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for OperatorNames {
    fn drop(&mut self) {
        // SAFETY: sets a thread-local flag.
        unsafe { ffi::od_operator_names_set(self.before) };
    }
}

/// The innermost operator that this thread is in, as seen from above autograd, such as `aten::addmm`;
/// `None` outside of all and without [`OperatorNames`].
///
/// # Errors
/// Only if memory runs out.
pub fn operator_under_way() -> Result<Option<String>> {
    let mut text = ptr::null_mut();
    // SAFETY: `text` is written only on success, and then taken once.
    let name = unsafe {
        check(
            ffi::od_operator_under_way(&raw mut text),
            "naming an operator",
        )?;
        take_string(text)
    };
    Ok((!name.is_empty()).then_some(name))
}
