//! Modes that see every operator that a thread calls and can replace its results (`TorchDispatchMode`).
//!
//! A mode acts directly below autograd: it sees the operators that have kernels (`aten::addmm`, not
//! `aten::linear`), including those of a backward pass on its thread, but not the operators that a kernel
//! calls itself. It costs about a microsecond per operator, and only on the threads that have a mode.

use std::cell::RefCell;
use std::ffi::CStr;
use std::ptr;
use std::rc::Rc;
use std::sync::{Arc, Once};

use tch::Tensor;

use crate::callback::{self, CallbackResult};
use crate::error::{Result, check, take_string};
use crate::ffi;
use crate::function::push_tensor;
use crate::mode_stack::{Entered, ThreadMode, keep};

/// An observer of the operators of a thread.
pub trait DispatchMode {
    /// Is called before the operator runs. If it returns results, they replace the operator's own, and the
    /// operator does not run.
    ///
    /// # Errors
    /// An error becomes the error of the operator.
    fn before(&self, call: &OperatorCall) -> CallbackResult<Option<Arc<Results>>> {
        let _ = call;
        Ok(None)
    }

    /// Is called after the operator ran or its results were replaced. It is not called if the operator
    /// failed.
    ///
    /// # Errors
    /// An error becomes the error of the operator.
    fn after(&self, call: &OperatorCall) -> CallbackResult<()> {
        let _ = call;
        Ok(())
    }
}

/// A call of an operator in progress.
#[derive(Debug)]
pub struct OperatorCall {
    raw: *mut ffi::RawDispatched,
}

impl OperatorCall {
    /// Returns the name of the operator, such as `aten::addmm`.
    pub fn name(&self) -> &str {
        let mut len = 0;
        // SAFETY: the call is alive while modes see it; operator names live as long as their operator,
        // are UTF-8 (ASCII) and have `len` bytes.
        unsafe {
            let text = ffi::od_dispatched_name(self.raw, &raw mut len);
            str_of(text, len)
        }
    }

    /// Returns the overload of the operator, such as `Tensor`; it is often empty.
    pub fn overload(&self) -> &str {
        let mut len = 0;
        // SAFETY: as in `name`.
        unsafe {
            let text = ffi::od_dispatched_overload(self.raw, &raw mut len);
            str_of(text, len)
        }
    }

    /// Returns the name with the overload, such as `aten::add.Tensor`.
    pub fn full_name(&self) -> String {
        match self.overload() {
            "" => self.name().to_owned(),
            overload => format!("{}.{overload}", self.name()),
        }
    }

    /// Returns `true` if the operator writes to an argument (`aten::add_`, `aten::copy_`, `out=`).
    ///
    /// # Errors
    /// [`crate::Error::Torch`] if libtorch throws.
    pub fn mutates(&self) -> Result<bool> {
        Ok(self.flags()? & ffi::MUTATES != 0)
    }

    /// Returns `true` if a result shares memory with an argument (views, in-place operators).
    ///
    /// # Errors
    /// [`crate::Error::Torch`] if libtorch throws.
    pub fn aliases(&self) -> Result<bool> {
        Ok(self.flags()? & ffi::ALIASES != 0)
    }

    /// Returns `true` if the operator draws from a random generator.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] if libtorch throws.
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

    /// Returns `true` if the operator has an argument of this name, such as `non_blocking`, that is true. For
    /// [`DispatchMode::before`]: the arguments are gone when the operator has run.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] if the operator has run.
    pub fn is_set(&self, name: &CStr) -> Result<bool> {
        let mut value = 0;
        // SAFETY: the call is alive, `name` ends with a zero byte; `value` is written only on success.
        let status = unsafe { ffi::od_dispatched_bool(self.raw, name.as_ptr(), &raw mut value) };
        check(status, "reading an argument of a call")?;
        Ok(value != 0)
    }

    /// Returns the tensors among the arguments (in [`DispatchMode::before`]) or the results (in
    /// [`DispatchMode::after`]), including those in lists.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn tensors(&self) -> Result<Vec<Tensor>> {
        let mut tensors: Vec<Tensor> = Vec::new();
        // SAFETY: the call is alive; `push_tensor` is given the vector that it expects.
        let status =
            unsafe { ffi::od_dispatched_tensors(self.raw, (&raw mut tensors).cast(), push_tensor) };
        check(status, "reading the tensors of a call")?;
        Ok(tensors)
    }

    /// Returns the results, detached from the graph, for [`DispatchMode::before`] of a later call of the same
    /// operator. They share memory with the results that the caller receives.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] if the operator has not run yet.
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

/// The stored results of a call. Using them as a replacement is an error if a tensor among them was
/// changed in place since.
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
    /// Returns the tensors among the results.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn tensors(&self) -> Result<Vec<Tensor>> {
        let mut tensors: Vec<Tensor> = Vec::new();
        // SAFETY: alive with `self`; `push_tensor` is given the vector that it expects.
        let status =
            unsafe { ffi::od_results_tensors(self.raw, (&raw mut tensors).cast(), push_tensor) };
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

/// A guard that keeps a mode on this thread's stack until it is dropped. Guards may be dropped in any order.
#[derive(Debug)]
#[must_use = "the mode ends when the guard is dropped"]
pub struct ModeGuard {
    id: u64,
    _entered: Entered,
}

/// Pushes `mode` on this thread's stack until the guard is dropped. The mode that was pushed last is called
/// first; if it replaces the results, the modes below it do not see the call.
pub fn push_mode(mode: Rc<dyn DispatchMode>) -> ModeGuard {
    static INSTALLED: Once = Once::new();
    static CALLBACKS: ffi::RawDispatchCallbacks = ffi::RawDispatchCallbacks {
        before: call_before,
        after: call_after,
    };
    // SAFETY: a static table of functions that keep the shim's contract.
    INSTALLED.call_once(|| unsafe { ffi::od_dispatch_mode_install(&raw const CALLBACKS) });
    let id = MODES.with_borrow_mut(|modes| {
        // Ids increase along the stack, so they stay unique when guards are dropped in any order.
        let id = modes.last().map_or(0, |(last, _)| last + 1);
        modes.push((id, mode));
        id
    });
    ModeGuard {
        id,
        _entered: listen(true),
    }
}

impl Drop for ModeGuard {
    fn drop(&mut self) {
        let removed = MODES.try_with(|modes| {
            let mut modes = modes.borrow_mut();
            let at = modes.iter().position(|(id, _)| *id == self.id)?;
            Some(modes.remove(at))
        });
        // Dropped outside of the borrow: the mode's destructor may push or drop other modes.
        drop(removed);
    }
}

/// Sets whether this thread's modes are called, until the guard is dropped.
fn listen(enabled: bool) -> Entered {
    let mut mode = Listening { enabled, before: 0 };
    mode.enter();
    keep(mode)
}

struct Listening {
    enabled: bool,
    before: i32,
}

impl ThreadMode for Listening {
    fn enter(&mut self) {
        // SAFETY: sets thread-local flags.
        self.before = unsafe { ffi::od_dispatch_mode_listen(i32::from(self.enabled)) };
    }

    fn leave(&mut self) {
        // SAFETY: sets thread-local flags.
        unsafe { ffi::od_dispatch_mode_listen(self.before) };
    }
}

/// Runs `body` without this thread's modes.
pub(crate) fn without_modes<T>(body: impl FnOnce() -> T) -> T {
    let _without = has_modes().then(|| listen(false));
    body()
}

/// Returns `true` if this thread has a mode.
pub(crate) fn has_modes() -> bool {
    MODES.with_borrow(|modes| !modes.is_empty())
}

/// Returns the modes of this thread, the one pushed last first. They are cloned, because a mode may push or
/// drop modes while it runs.
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
    /// The number of modes, from the top, that saw the current call. One number is enough, because calls do
    /// not nest: modes are disabled while an operator runs.
    static MODES_CALLED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

unsafe extern "C" fn call_before(raw: *mut ffi::RawDispatched) -> ffi::RawFailure {
    callback::catch_failure(|| {
        let call = OperatorCall { raw };
        let modes = modes();
        // `after` must be called on exactly the modes whose `before` was called.
        MODES_CALLED.set(modes.len());
        for (index, mode) in modes.iter().enumerate() {
            if let Some(results) = mode.before(&call)? {
                MODES_CALLED.set(index + 1);
                // SAFETY: the call is alive, the results too.
                let status = unsafe { ffi::od_dispatched_replace(raw, results.raw) };
                return Ok(check(status, call.name())?);
            }
        }
        Ok(())
    })
}

unsafe extern "C" fn call_after(raw: *mut ffi::RawDispatched) -> ffi::RawFailure {
    callback::catch_failure(|| {
        let call = OperatorCall { raw };
        let called = MODES_CALLED.get();
        modes()
            .iter()
            .take(called)
            .rev()
            .try_for_each(|mode| mode.after(&call))
    })
}

/// A guard that records the names of the running operators of this thread, for [`current_operator`], until it
/// is dropped. Costs less than a microsecond per operator.
#[derive(Debug)]
#[must_use = "the names are recorded until the guard is dropped"]
pub struct OperatorNames {
    _entered: Entered,
}

impl OperatorNames {
    /// Starts to record the names.
    pub fn new() -> Self {
        let mut mode = Named { before: 0 };
        mode.enter();
        Self {
            _entered: keep(mode),
        }
    }
}

impl Default for OperatorNames {
    fn default() -> Self {
        Self::new()
    }
}

struct Named {
    before: i32,
}

impl ThreadMode for Named {
    fn enter(&mut self) {
        // SAFETY: sets a thread-local flag.
        self.before = unsafe { ffi::od_operator_names_set(1) };
    }

    fn leave(&mut self) {
        // SAFETY: sets a thread-local flag.
        unsafe { ffi::od_operator_names_set(self.before) };
    }
}

/// Returns the innermost operator that this thread is running, as seen from above autograd, such as
/// `aten::addmm`; `None` outside of operators and without [`OperatorNames`].
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn current_operator() -> Result<Option<String>> {
    let mut text = ptr::null_mut();
    // SAFETY: `text` is written only on success, and then taken once.
    let name = unsafe {
        check(
            ffi::od_current_operator(&raw mut text),
            "naming an operator",
        )?;
        take_string(text)
    };
    Ok((!name.is_empty()).then_some(name))
}
