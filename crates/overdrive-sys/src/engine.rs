//! The backward engine with all its options, and the modes of a thread.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ptr;

use tch::Tensor;

use crate::error::{Result, check};
use crate::ffi::{self, RawTensor};
use crate::function::handle;

fn handles(tensors: &[&Tensor]) -> Vec<RawTensor> {
    tensors.iter().map(|tensor| handle(tensor)).collect()
}

/// One handle an output; null stands for "ones, of a scalar".
fn gradient_handles(n: usize, gradients: &[Option<&Tensor>]) -> Vec<RawTensor> {
    (0..n)
        .map(|index| match gradients.get(index) {
            Some(Some(gradient)) => handle(gradient),
            _ => ptr::null_mut(),
        })
        .collect()
}

/// `torch.autograd.backward`: adds the gradients of the leaves under `outputs` to theirs, or only those
/// of `inputs` where that is not empty. `gradients` holds those of the outputs; scalars need none.
///
/// # Errors
/// libtorch's, and whatever a function or a hook on the way returned ([`crate::Error::Callback`]).
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

/// `torch.autograd.grad`: the gradients of `inputs`, returned and not accumulated; `None` for one that
/// the outputs do not depend on, where that is allowed.
///
/// # Errors
/// As for [`backward`]; an unused input unless `allow_unused`.
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
    // SAFETY: as in `backward`; `out` has room for one handle an input.
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

/// Whether operators are recorded for backward on this thread.
pub fn is_grad_enabled() -> bool {
    // SAFETY: reads a thread-local flag.
    unsafe { ffi::od_grad_mode_get() != 0 }
}

/// Switches recording on this thread until dropped, also by a panic.
#[derive(Debug)]
#[must_use = "the mode ends when the guard is dropped"]
pub struct GradMode {
    before: bool,
    /// The flag is the thread's: the guard stays there.
    on_this_thread: PhantomData<*const ()>,
}

impl GradMode {
    /// Records (`true`) or does not (`false`) from here on.
    pub fn new(enabled: bool) -> Self {
        let before = is_grad_enabled();
        // SAFETY: sets a thread-local flag.
        unsafe { ffi::od_grad_mode_set(i32::from(enabled)) };
        Self {
            before,
            on_this_thread: PhantomData,
        }
    }
}

impl Drop for GradMode {
    fn drop(&mut self) {
        // SAFETY: as in `new`.
        unsafe { ffi::od_grad_mode_set(i32::from(self.before)) };
    }
}

/// libtorch's inference mode on this thread until dropped: no recording, no version counters.
#[derive(Debug)]
#[must_use = "the mode ends when the guard is dropped"]
pub struct InferenceMode {
    raw: *mut c_void,
}

impl InferenceMode {
    /// Enters the mode (`true`), or leaves it for the guard's life (`false`).
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn new(enabled: bool) -> Result<Self> {
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` is written only on success; the pointer makes this type `!Send`, so the guard
        // is left on the thread that entered it, and Rust drops guards in reverse order.
        let status = unsafe { ffi::od_inference_mode_enter(i32::from(enabled), &raw mut raw) };
        check(status, "entering inference mode")?;
        Ok(Self { raw })
    }
}

impl Drop for InferenceMode {
    fn drop(&mut self) {
        // SAFETY: made by `new`, left once.
        unsafe { ffi::od_inference_mode_exit(self.raw) }
    }
}

/// Whether this thread is in inference mode.
pub fn is_inference_mode_enabled() -> bool {
    // SAFETY: reads a thread-local flag.
    unsafe { ffi::od_inference_mode_get() != 0 }
}

/// Whether the tensor was made in inference mode, and so can never be saved for backward.
pub fn is_inference(tensor: &Tensor) -> bool {
    // SAFETY: the handle is valid while borrowed.
    unsafe { ffi::od_is_inference(handle(tensor)) != 0 }
}
