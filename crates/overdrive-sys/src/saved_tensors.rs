//! Hooks on the tensors that the graph saves for backward (`torch.autograd.graph.saved_tensors_hooks`).
//!
//! While a [`HooksGuard`] lives, every tensor that an operator saves on this thread is passed to its pack
//! hook, and the graph holds the result in place of the tensor until backward needs the tensor again.
//! Activation checkpointing and offloading are built on this.
//!
//! libtorch does not check tensors behind hooks for in-place changes.

use std::cell::RefCell;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::rc::Rc;
use std::sync::Once;

use tch::Tensor;

use crate::callback::{self, CallbackError, CallbackResult};
use crate::dispatch_mode;
use crate::error::{Result, check};
use crate::ffi::{self, RawTensor};
use crate::function::{handle, into_handle};
use crate::mode_stack::{Entered, ThreadMode, keep};

/// A tensor that the graph is about to save.
#[derive(Debug)]
pub struct SavedTensor {
    /// The tensor. It may own the node that saves it (if an operator saves its own result): store
    /// `tensor.f_detach()` rather than the tensor itself, or neither is ever freed.
    pub tensor: Tensor,
    /// If `true`, the tensor is a leaf that requires a gradient, or a view of one: a weight, which stays in
    /// memory anyway.
    pub is_parameter: bool,
}

/// The value that the graph holds in place of a saved tensor. It is dropped when the graph is freed, on any
/// thread.
pub trait PackedTensor: Send {
    /// Returns the tensor, with the shape, dtype and device that it had. It is called on the thread that runs
    /// backward, and more than once if the graph is retained.
    ///
    /// # Errors
    /// An error becomes the error of the backward pass.
    fn unpack(&self) -> CallbackResult<Tensor>;
}

type PackHook = dyn Fn(SavedTensor) -> CallbackResult<Box<dyn PackedTensor>>;

thread_local! {
    static STACK: RefCell<Vec<(u64, Rc<PackHook>)>> = const { RefCell::new(Vec::new()) };
}

/// A guard that keeps a hook on this thread's stack until it is dropped. Guards may be dropped in any
/// order; only the hook that was pushed last is called.
#[derive(Debug)]
#[must_use = "the hooks are gone when the guard is dropped"]
pub struct HooksGuard {
    id: u64,
    /// Makes the guard `!Send`: the stack is thread-local.
    on_this_thread: PhantomData<*const ()>,
}

/// Pushes a pack hook on this thread's stack. It is called without gradient recording; its error becomes the
/// error of the operator that saves the tensor.
///
/// # Errors
/// [`crate::Error::Torch`] if another autograd engine has been installed in this process (libtorch's Python
/// library was loaded).
pub fn push_hooks(
    pack: impl Fn(SavedTensor) -> CallbackResult<Box<dyn PackedTensor>> + 'static,
) -> Result<HooksGuard> {
    static INSTALLED: Once = Once::new();
    static CALLBACKS: ffi::RawSavedTensorCallbacks = ffi::RawSavedTensorCallbacks {
        pack: call_pack,
        unpack: call_unpack,
        drop: drop_packed,
    };
    // Installed on first use, so that programs without hooks keep libtorch's path without callbacks.
    // SAFETY: a static table of functions that keep the shim's contract.
    INSTALLED.call_once(|| unsafe { ffi::od_saved_tensors_install(&raw const CALLBACKS) });
    let (id, depth) = STACK.with_borrow_mut(|stack| {
        // Ids increase along the stack, so they stay unique when guards are dropped in any order.
        let id = stack.last().map_or(0, |(last, _)| last + 1);
        stack.push((id, Rc::new(pack)));
        (id, stack.len())
    });
    let guard = HooksGuard {
        id,
        on_this_thread: PhantomData,
    };
    set_depth(depth)?;
    Ok(guard)
}

fn set_depth(depth: usize) -> Result<()> {
    // SAFETY: sets a thread-local number.
    let status =
        unsafe { ffi::od_saved_tensors_set_depth(i32::try_from(depth).unwrap_or(i32::MAX)) };
    check(status, "setting hooks on saved tensors")
}

impl Drop for HooksGuard {
    fn drop(&mut self) {
        // Dropped outside of the borrow: the hook's destructor may push or drop other hooks.
        let removed = STACK.with_borrow_mut(|stack| {
            let at = stack.iter().position(|(id, _)| *id == self.id)?;
            Some((stack.remove(at), stack.len()))
        });
        if let Some((_hook, depth)) = removed {
            // The shim refuses a depth only if the engine was replaced, which cannot be undone here and which
            // `push_hooks` reports.
            let _ = set_depth(depth);
        }
    }
}

unsafe extern "C" fn call_pack(
    tensor: RawTensor,
    parameter: i32,
    packed: *mut *mut c_void,
) -> ffi::RawFailure {
    // SAFETY: the shim gives the handle away.
    let tensor = unsafe { Tensor::from_ptr(tensor.cast()) };
    callback::catch_failure(|| {
        let hook = STACK
            .with_borrow(|stack| stack.last().map(|(_, hook)| Rc::clone(hook)))
            .ok_or_else(|| CallbackError::from("no hook on this thread's stack"))?;
        // Dispatch modes are meant to see the operators of the program, not those of its hooks.
        let value = dispatch_mode::without_modes(|| {
            hook(SavedTensor {
                tensor,
                is_parameter: parameter != 0,
            })
        })?;
        // SAFETY: `packed` points to one pointer, which the shim passes to `call_unpack`, and once to
        // `drop_packed`.
        // Boxed again: a pointer to a trait object is two words, and C passes one.
        unsafe { *packed = Box::into_raw(Box::new(value)).cast() };
        Ok(())
    })
}

unsafe extern "C" fn call_unpack(packed: *mut c_void, out: *mut RawTensor) -> ffi::RawFailure {
    callback::catch_failure(|| {
        // SAFETY: made by `call_pack`, not dropped yet; the shim admits one thread at a time.
        let value = unsafe { &*packed.cast::<Box<dyn PackedTensor>>().cast_const() };
        let tensor = value.unpack()?;
        // SAFETY: `out` points to one handle, which the shim owns from here on.
        unsafe { *out = into_handle(tensor) };
        Ok(())
    })
}

unsafe extern "C" fn drop_packed(packed: *mut c_void) {
    // C++ destructors cannot report a panic, and it must not unwind into C++.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: made by `call_pack`, dropped once.
        unsafe { drop(Box::from_raw(packed.cast::<Box<dyn PackedTensor>>())) }
    }));
}

/// A tensor that is saved as a node of the graph saves its inputs: it is passed to the hooks of the
/// thread that saves it, stays attached to the graph, and is checked for in-place changes when it is
/// unpacked.
#[derive(Debug)]
pub struct SavedVariable {
    raw: *mut ffi::RawSavedVariable,
}

// SAFETY: libtorch's nodes hold the same type and move between threads; values behind hooks are `Send` (see
// `PackedTensor`).
unsafe impl Send for SavedVariable {}

impl SavedVariable {
    /// Saves `tensor`.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] for tensors created in inference mode, or the error of a hook.
    pub fn new(tensor: &Tensor) -> Result<Self> {
        let mut raw = ptr::null_mut();
        // SAFETY: the handle is valid while borrowed; `raw` is written only on success.
        let status = unsafe { ffi::od_saved_variable_new(handle(tensor), &raw mut raw) };
        check(status, "saving a tensor")?;
        Ok(Self { raw })
    }

    /// Returns the tensor, attached to the graph.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] if it was changed in place since, or the error of a hook.
    pub fn unpack(&self) -> Result<Tensor> {
        let mut raw = ptr::null_mut();
        // SAFETY: alive with `self`; on success `raw` is a new handle that nobody else owns.
        unsafe {
            let status = ffi::od_saved_variable_unpack(self.raw, &raw mut raw);
            check(status, "taking out a saved tensor")?;
            Ok(Tensor::from_ptr(raw.cast()))
        }
    }
}

impl Drop for SavedVariable {
    fn drop(&mut self) {
        // SAFETY: owned by `self`, freed once.
        unsafe { ffi::od_saved_variable_free(self.raw) }
    }
}

/// Returns the number of the backward pass that this thread is running, which differs for each pass; `None`
/// outside of a backward pass.
pub fn backward_pass() -> Option<u64> {
    // SAFETY: reads a thread-local.
    u64::try_from(unsafe { ffi::od_graph_task_id() }).ok()
}

/// A guard that keeps backward passes on the thread that starts them, on a GPU too, until it is dropped
/// (`torch.autograd.set_multithreading_enabled(False)`).
///
/// On a GPU libtorch otherwise runs backward on a thread of its own for each device. A loop needs the guard if
/// something in the graph belongs to the thread of the loop: thread-local state that a hook reads, or a dispatch
/// mode that is to see the operators of backward. Checkpoints that borrow (`overdrive_checkpointing::scope`) set
/// it themselves. It applies to every backward pass, however it is started.
#[derive(Debug)]
#[must_use = "the setting ends when the guard is dropped"]
pub struct BackwardOnThisThread {
    _entered: Entered,
}

impl BackwardOnThisThread {
    /// Keeps the backward passes that this thread starts on this thread.
    pub fn new() -> Self {
        let mut mode = OnThisThread { before: 0 };
        mode.enter();
        Self {
            _entered: keep(mode),
        }
    }
}

impl Default for BackwardOnThisThread {
    fn default() -> Self {
        Self::new()
    }
}

struct OnThisThread {
    before: i32,
}

impl ThreadMode for OnThisThread {
    fn enter(&mut self) {
        // SAFETY: sets a thread-local flag.
        self.before = unsafe { ffi::od_backward_threads_set(0) };
    }

    fn leave(&mut self) {
        // SAFETY: sets a thread-local flag.
        unsafe { ffi::od_backward_threads_set(self.before) };
    }
}

/// Returns `true` if backward passes that this thread starts stay on it ([`BackwardOnThisThread`]).
#[must_use]
pub fn backward_stays_on_this_thread() -> bool {
    // SAFETY: sets a thread-local flag, and sets it back: the setter returns the value before.
    unsafe {
        let before = ffi::od_backward_threads_set(0);
        ffi::od_backward_threads_set(before);
        before == 0
    }
}
