//! The autograd engine with all its options, and the grad and inference modes of a thread.

use std::ffi::c_void;
use std::ptr;

use tch::Tensor;

use crate::error::{Result, check};
use crate::ffi::{self, RawTensor};
use crate::function::handle;
use crate::mode_stack::{Entered, ThreadMode, keep};

fn handles(tensors: &[&Tensor]) -> Vec<RawTensor> {
    tensors.iter().map(|tensor| handle(tensor)).collect()
}

/// Returns one handle for each output. Null means "ones", which the engine accepts for scalar outputs.
fn gradient_handles(n: usize, gradients: &[Option<&Tensor>]) -> Vec<RawTensor> {
    (0..n)
        .map(|index| match gradients.get(index) {
            Some(Some(gradient)) => handle(gradient),
            _ => ptr::null_mut(),
        })
        .collect()
}

/// Accumulates the gradients of `outputs` into the leaves of the graph (`torch.autograd.backward`), or only
/// into `inputs` where that is not empty. `gradients` are the gradients of the outputs; scalar outputs need
/// none.
///
/// # Errors
/// libtorch's errors, and the error of a function or a hook in the graph ([`crate::Error::Callback`]).
pub fn backward(
    outputs: &[&Tensor],
    gradients: &[Option<&Tensor>],
    inputs: &[&Tensor],
    retain_graph: bool,
    create_graph: bool,
) -> Result<()> {
    let raw_outputs = handles(outputs);
    let raw_gradients = gradient_handles(outputs.len(), gradients);
    let raw_inputs = handles(inputs);
    // SAFETY: the arrays live until the call returns; the handles are valid while borrowed.
    let status = unsafe {
        ffi::od_backward(
            raw_outputs.as_ptr(),
            raw_gradients.as_ptr(),
            raw_outputs.len(),
            raw_inputs.as_ptr(),
            raw_inputs.len(),
            i32::from(retain_graph),
            i32::from(create_graph),
        )
    };
    check(status, "backward")
}

/// Returns the gradients of `inputs` without accumulating them (`torch.autograd.grad`). The gradient is
/// `None` for an input that the outputs do not depend on, if `allow_unused`.
///
/// # Errors
/// As [`backward`]; [`crate::Error::Torch`] for an unused input unless `allow_unused`.
pub fn grad(
    outputs: &[&Tensor],
    gradients: &[Option<&Tensor>],
    inputs: &[&Tensor],
    retain_graph: bool,
    create_graph: bool,
    allow_unused: bool,
) -> Result<Vec<Option<Tensor>>> {
    let raw_outputs = handles(outputs);
    let raw_gradients = gradient_handles(outputs.len(), gradients);
    let raw_inputs = handles(inputs);
    let mut out: Vec<RawTensor> = vec![ptr::null_mut(); inputs.len()];
    // SAFETY: as in `backward`; `out` has room for one handle per input.
    let status = unsafe {
        ffi::od_grad(
            raw_outputs.as_ptr(),
            raw_gradients.as_ptr(),
            raw_outputs.len(),
            raw_inputs.as_ptr(),
            raw_inputs.len(),
            i32::from(retain_graph),
            i32::from(create_graph),
            i32::from(allow_unused),
            out.as_mut_ptr(),
        )
    };
    check(status, "grad")?;
    Ok(out
        .into_iter()
        // SAFETY: on success each element is null or a new handle that nobody else owns.
        .map(|raw| (!raw.is_null()).then(|| unsafe { Tensor::from_ptr(raw.cast()) }))
        .collect())
}

/// Returns `true` if this thread records operators for backward.
pub fn is_grad_enabled() -> bool {
    // SAFETY: reads a thread-local flag.
    unsafe { ffi::od_grad_mode_get() != 0 }
}

/// A guard that enables or disables gradient recording on this thread until it is dropped, also by a panic. Guards
/// may be dropped in any order: the one that was created last, among those still alive, applies.
#[derive(Debug)]
#[must_use = "the mode ends when the guard is dropped"]
pub struct GradMode {
    _entered: Entered,
}

impl GradMode {
    /// Enables (`true`) or disables (`false`) recording.
    pub fn new(enabled: bool) -> Self {
        let mut mode = Recording {
            enabled,
            before: false,
        };
        mode.enter();
        Self {
            _entered: keep(mode),
        }
    }
}

struct Recording {
    enabled: bool,
    before: bool,
}

impl ThreadMode for Recording {
    fn enter(&mut self) {
        self.before = is_grad_enabled();
        // SAFETY: sets a thread-local flag.
        unsafe { ffi::od_grad_mode_set(i32::from(self.enabled)) };
    }

    fn leave(&mut self) {
        // SAFETY: as in `enter`.
        unsafe { ffi::od_grad_mode_set(i32::from(self.before)) };
    }
}

/// A guard that keeps this thread in libtorch's inference mode until it is dropped: operators are not
/// recorded, and new tensors have no version counter. Guards may be dropped in any order.
#[derive(Debug)]
#[must_use = "the mode ends when the guard is dropped"]
pub struct InferenceMode {
    _entered: Entered,
}

impl InferenceMode {
    /// Enters the mode (`true`), or leaves it for the lifetime of the guard (`false`).
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn new(enabled: bool) -> Result<Self> {
        let mut mode = Inference {
            enabled,
            raw: ptr::null_mut(),
        };
        mode.try_enter()?;
        Ok(Self {
            _entered: keep(mode),
        })
    }
}

struct Inference {
    enabled: bool,
    /// The state to restore; null outside of the mode.
    raw: *mut c_void,
}

impl Inference {
    fn try_enter(&mut self) -> Result<()> {
        // SAFETY: `raw` is written only on success. The stack of modes is thread-local, and leaves its modes in
        // reverse order.
        let status =
            unsafe { ffi::od_inference_mode_enter(i32::from(self.enabled), &raw mut self.raw) };
        check(status, "entering inference mode")
    }
}

impl ThreadMode for Inference {
    fn enter(&mut self) {
        // A second entry fails only if a few bytes cannot be allocated; a destructor cannot report it.
        let entered = self.try_enter();
        debug_assert!(entered.is_ok());
    }

    fn leave(&mut self) {
        // SAFETY: null, which has no effect, or made by `enter` and left once.
        unsafe { ffi::od_inference_mode_exit(std::mem::replace(&mut self.raw, ptr::null_mut())) }
    }
}

/// Returns `true` if this thread is in inference mode.
pub fn is_inference_mode_enabled() -> bool {
    // SAFETY: reads a thread-local flag.
    unsafe { ffi::od_inference_mode_get() != 0 }
}

/// Returns `true` if the tensor was created in inference mode. Such a tensor cannot be saved for backward.
pub fn is_inference(tensor: &Tensor) -> bool {
    // SAFETY: the handle is valid while borrowed.
    unsafe { ffi::od_is_inference(handle(tensor)) != 0 }
}
