//! Functions whose backward is Rust code (`torch.autograd.Function`).
//!
//! `overdrive-autograd` builds a trait for users on this mechanism.

use std::ffi::c_void;
use std::ptr;

use tch::Tensor;

use crate::callback::{self, CallbackError, CallbackResult};
use crate::error::{Result, check};
use crate::exclusive::Exclusive;
use crate::ffi::{self, RawTensor};

/// A function whose forward has run, to be recorded in the graph.
#[derive(Debug)]
pub struct Record<'a> {
    /// The name of its node in the graph, which appears in errors.
    pub name: &'a str,
    /// The inputs of the function.
    pub inputs: &'a [&'a Tensor],
    /// The results of its forward, which ran without gradient recording.
    pub outputs: &'a [Tensor],
    /// Tensors that backward needs: inputs, outputs or others.
    pub saved: &'a [Tensor],
    /// The indices of inputs that the function changed in place.
    pub dirty: &'a [usize],
    /// The indices of outputs that are not differentiable.
    pub non_differentiable: &'a [usize],
    /// If `true`, backward receives zeros for absent gradients of outputs.
    pub materialize_grads: bool,
    /// If `true`, backward may itself be differentiated.
    pub twice_differentiable: bool,
}

/// The arguments of a backward function.
#[derive(Debug)]
pub struct BackwardCall {
    /// The gradient of each output; `None` only where absent gradients are not materialized.
    pub gradients: Vec<Option<Tensor>>,
    /// The saved tensors. libtorch has checked that they were not changed in place since.
    pub saved: Vec<Tensor>,
    /// For each input, `true` if its gradient is needed.
    pub needs_input_grad: Vec<bool>,
}

// Exclusive, because two backward passes may call one at the same time, and it need not be `Sync`.
type Backward = Exclusive<dyn Fn(BackwardCall) -> CallbackResult<Vec<Option<Tensor>>> + Send>;

const RECURSION: &str = "the backward of a function ran a backward pass that reaches the function's own node: compute \
                         the gradient from detached tensors";

/// Records the function in the graph and returns its outputs, attached to the graph.
///
/// `backward` returns one gradient (or `None`) for each input. It runs once for each backward pass, on the
/// thread that runs the pass. It must not run a backward pass through its own node, which is an error there.
///
/// # Errors
/// [`crate::Error::Torch`] if a view was changed in place or an index is out of range.
pub fn record<F>(record: &Record<'_>, backward: F) -> Result<Vec<Tensor>>
where
    F: Fn(BackwardCall) -> CallbackResult<Vec<Option<Tensor>>> + Send + 'static,
{
    let inputs: Vec<RawTensor> = record.inputs.iter().map(|t| handle(t)).collect();
    let outputs: Vec<RawTensor> = record.outputs.iter().map(handle).collect();
    let saved: Vec<RawTensor> = record.saved.iter().map(handle).collect();
    let raw = ffi::RawFunction {
        name: record.name.as_ptr().cast(),
        name_len: record.name.len(),
        inputs: inputs.as_ptr(),
        n_inputs: inputs.len(),
        outputs: outputs.as_ptr(),
        n_outputs: outputs.len(),
        saved: saved.as_ptr(),
        n_saved: saved.len(),
        dirty: record.dirty.as_ptr(),
        n_dirty: record.dirty.len(),
        non_differentiable: record.non_differentiable.as_ptr(),
        n_non_differentiable: record.non_differentiable.len(),
        materialize_grads: i32::from(record.materialize_grads),
        twice_differentiable: i32::from(record.twice_differentiable),
    };
    // Boxed again by `into_raw_closure`: a pointer to a trait object is two words, and C passes one.
    let boxed: Box<Backward> = Box::new(Exclusive::new(backward));
    let mut out: Vec<RawTensor> = vec![ptr::null_mut(); outputs.len()];
    // SAFETY: all pointers borrow from locals that outlive the call; the closure is owned by the shim
    // from here on; `out` has room for one handle per output.
    let status = unsafe {
        ffi::od_function_record(
            &raw const raw,
            callback::into_raw_closure(boxed),
            call_backward,
            out.as_mut_ptr(),
        )
    };
    check(status, record.name)?;
    // SAFETY: on success each element is a new handle that nobody else owns.
    Ok(out
        .into_iter()
        .map(|raw| unsafe { Tensor::from_ptr(raw.cast()) })
        .collect())
}

/// Returns the handle of a tensor, which stays owned by the tensor.
pub(crate) fn handle(tensor: &Tensor) -> RawTensor {
    tensor.as_ptr().cast_mut().cast()
}

/// Returns new tensors for borrowed handles; `None` for null handles.
///
/// # Safety
/// `handles` has `len` elements, each null or a valid `at::Tensor*`.
unsafe fn tensors(handles: *const RawTensor, len: usize) -> Vec<Option<Tensor>> {
    (0..len)
        .map(|index| {
            // SAFETY: the caller's promise; a shallow clone owns its own handle.
            unsafe {
                let raw = *handles.add(index);
                (!raw.is_null()).then(|| Tensor::clone_from_ptr(raw.cast()))
            }
        })
        .collect()
}

unsafe extern "C" fn call_backward(
    closure: *mut c_void,
    call: *const ffi::RawBackwardCall,
) -> ffi::RawFailure {
    callback::catch_failure(|| {
        // SAFETY: the shim passes the closure that `record` gave it (alive as long as its node) and
        // arguments that live until this returns.
        let (backward, call) = unsafe { (&*closure.cast::<Box<Backward>>(), &*call) };
        // SAFETY: as above: the lengths are those of the arrays.
        let arguments = unsafe {
            BackwardCall {
                gradients: tensors(call.gradients, call.n_gradients),
                saved: tensors(call.saved, call.n_saved)
                    .into_iter()
                    .flatten()
                    .collect(),
                needs_input_grad: (0..call.n_out)
                    .map(|index| *call.needs_input_grad.add(index) != 0)
                    .collect(),
            }
        };
        let gradients = backward.with(RECURSION, |backward| backward(arguments))?;
        // `out` has `n_out` elements, so more gradients would be written out of bounds.
        if gradients.len() != call.n_out {
            return Err(CallbackError::from(format!(
                "backward returned {} gradients for {} inputs; it must return one for each input, and \
                 `None` for an input without a gradient",
                gradients.len(),
                call.n_out
            )));
        }
        for (index, gradient) in gradients.into_iter().enumerate() {
            if let Some(gradient) = gradient {
                // SAFETY: `out` has `n_out` elements; the shim takes the handle over.
                unsafe { *call.out.add(index) = into_handle(gradient) };
            }
        }
        Ok(())
    })
}

/// Converts a tensor into its handle, which the caller then owns.
pub(crate) fn into_handle(tensor: Tensor) -> RawTensor {
    let raw = handle(&tensor);
    // Dropping the tensor would free the handle that the caller now owns.
    std::mem::forget(tensor);
    raw
}

/// Adds a tensor to a vector that C++ fills: the callback of functions that return any number of tensors.
///
/// # Safety
/// `into` is a `Vec<Tensor>`, and `owned` a new `at::Tensor*`, which the vector owns from here on.
pub(crate) unsafe extern "C" fn push_tensor(into: *mut c_void, owned: RawTensor) {
    // SAFETY: the caller's promise.
    unsafe { (*into.cast::<Vec<Tensor>>()).push(Tensor::from_ptr(owned.cast())) }
}
