//! Hooks on the tensors that the graph saves for backward: what
//! `torch.autograd.graph.saved_tensors_hooks` is in Python.
//!
//! While a [`HooksGuard`] lives, everything that an operator saves on this thread goes through its
//! `pack`, and what that returned stands in the graph in the tensor's place until backward asks for
//! the tensor again. Activation checkpointing and offloading are made of this.
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
use crate::error::{Result, check};
use crate::ffi::{self, RawTensor};
use crate::function::{handle, into_handle};

/// A tensor that the graph is about to save.
#[derive(Debug)]
pub struct Saved {
    /// The tensor. It may hold the node that saves it (an operator that saves its own result): keep
    /// `tensor.f_detach()` rather than this, or neither is ever freed.
    pub tensor: Tensor,
    /// Whether it is a leaf that requires a gradient, or a view of one: a weight, whose memory is
    /// taken anyway.
    pub is_parameter: bool,
}

/// What stands in the graph for a saved tensor. Dropped when the graph lets go of it, on any thread.
pub trait Packed: Send {
    /// The tensor again, of the same shape, dtype and device. May be asked for more than once where a
    /// graph is retained, and on whichever thread runs backward.
    ///
    /// # Errors
    /// What is returned becomes the error of the backward pass.
    fn unpack(&self) -> CallbackResult<Tensor>;
}

type PackHook = dyn Fn(Saved) -> CallbackResult<Box<dyn Packed>>;

thread_local! {
    static STACK: RefCell<Vec<(u64, Rc<PackHook>)>> = const { RefCell::new(Vec::new()) };
}

/// Hooks on this thread's stack, until dropped. Guards may be dropped in any order; the one pushed last
/// is the one that is called.
#[derive(Debug)]
#[must_use = "the hooks are gone when the guard is dropped"]
pub struct HooksGuard {
    id: u64,
    /// The stack is the thread's: the guard stays there.
    on_this_thread: PhantomData<*const ()>,
}

/// Pushes a hook. It is called without gradient recording; an error of it becomes the error of the
/// operator that saves.
///
/// # Errors
/// [`crate::Error::Torch`] if another autograd engine has taken over in this process (libtorch's Python
/// part was loaded).
pub fn push_hooks(
    pack: impl Fn(Saved) -> CallbackResult<Box<dyn Packed>> + 'static,
) -> Result<HooksGuard> {
    static INSTALLED: Once = Once::new();
    static CALLBACKS: ffi::RawSavedTensorCallbacks = ffi::RawSavedTensorCallbacks {
        pack: call_pack,
        unpack: call_unpack,
        drop: drop_packed,
    };
    // SAFETY: a static of functions that keep the shim's contract.
    INSTALLED.call_once(|| unsafe { ffi::od_saved_tensors_install(&raw const CALLBACKS) });
    let (id, depth) = STACK.with_borrow_mut(|stack| {
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
        // Taken out first and dropped last: a hook may own anything.
        let removed = STACK.with_borrow_mut(|stack| {
            let at = stack.iter().position(|(id, _)| *id == self.id)?;
            Some((stack.remove(at), stack.len()))
        });
        if let Some((_hook, depth)) = removed {
            // Fewer hooks than before, for which nothing is checked but the number 0 or the engine that
            // was there when this guard was made.
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
    callback::contain(|| {
        let hook = STACK
            .with_borrow(|stack| stack.last().map(|(_, hook)| Rc::clone(hook)))
            .ok_or_else(|| CallbackError::from("no hook on this thread's stack"))?;
        let value = hook(Saved {
            tensor,
            is_parameter: parameter != 0,
        })?;
        // SAFETY: a place for one pointer, given back to `call_unpack` and once to `drop_packed`.
        unsafe { *packed = Box::into_raw(Box::new(value)).cast() };
        Ok(())
    })
}

unsafe extern "C" fn call_unpack(packed: *mut c_void, out: *mut RawTensor) -> ffi::RawFailure {
    callback::contain(|| {
        // SAFETY: made by `call_pack`, not dropped yet; the shim lets one thread at a time in.
        let value = unsafe { &*packed.cast::<Box<dyn Packed>>().cast_const() };
        let tensor = value.unpack()?;
        // SAFETY: a place for one handle, which the shim takes over.
        unsafe { *out = into_handle(tensor) };
        Ok(())
    })
}

unsafe extern "C" fn drop_packed(packed: *mut c_void) {
    // A panic in a destructor has nobody to go to; it must not unwind into C++ either.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: made by `call_pack`, dropped once.
        unsafe { drop(Box::from_raw(packed.cast::<Box<dyn Packed>>())) }
    }));
}

/// A tensor saved as a node of the graph saves its inputs: it goes through the hooks of the thread that
/// makes it, keeps its place in the graph, and is checked for in-place changes when it is taken out.
#[derive(Debug)]
pub struct SavedVariable {
    raw: *mut ffi::RawSavedVariable,
}

// SAFETY: it is what libtorch's nodes hold, which go from thread to thread; what stands behind hooks is
// `Send` (see `Packed`).
unsafe impl Send for SavedVariable {}

impl SavedVariable {
    /// Saves `tensor`.
    ///
    /// # Errors
    /// libtorch's for tensors made in inference mode, or what a hook returned.
    pub fn new(tensor: &Tensor) -> Result<Self> {
        let mut raw = ptr::null_mut();
        // SAFETY: the handle is valid while borrowed; `raw` is written only on success.
        let status = unsafe { ffi::od_saved_variable_new(handle(tensor), &raw mut raw) };
        check(status, "saving a tensor")?;
        Ok(Self { raw })
    }

    /// The tensor, with its place in the graph.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] if it was changed in place since, or what a hook returned.
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

/// A number for the backward pass that this thread is in, different for each; `None` outside of one.
pub fn backward_pass() -> Option<u64> {
    // SAFETY: reads a thread-local.
    u64::try_from(unsafe { ffi::od_graph_task_id() }).ok()
}

/// Backward passes that this thread starts run on this thread alone until the guard is dropped, on a
/// GPU too (`torch.autograd.set_multithreading_enabled(False)`).
#[derive(Debug)]
#[must_use = "the setting ends when the guard is dropped"]
pub struct BackwardOnThisThread {
    before: i32,
    on_this_thread: PhantomData<*const ()>,
}

impl BackwardOnThisThread {
    /// From here on.
    pub fn new() -> Self {
        Self {
            // SAFETY: sets a thread-local flag.
            before: unsafe { ffi::od_backward_threads_set(0) },
            on_this_thread: PhantomData,
        }
    }
}

impl Default for BackwardOnThisThread {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for BackwardOnThisThread {
    fn drop(&mut self) {
        // SAFETY: sets a thread-local flag.
        unsafe { ffi::od_backward_threads_set(self.before) };
    }
}
