//! Functions whose backward is Rust code: what `torch.autograd.Function` is in Python.
//!
//! This is the plain mechanism; `overdrive-autograd` has the trait that users implement.

use std::ffi::c_void;
use std::ptr;

use tch::Tensor;

use crate::callback::{self, CallbackError, CallbackResult};
use crate::error::{Result, check};
use crate::ffi::{self, RawTensor};

/// A function that has run, to be put into the graph.
#[derive(Debug)]
pub struct Record<'a> {
    /// Shown in the graph and in errors.
    pub name: &'a str,
    /// What the function was given.
    pub inputs: &'a [&'a Tensor],
    /// What it made, without gradient recording.
    pub outputs: &'a [Tensor],
    /// Tensors that backward needs: inputs, outputs or others.
    pub saved: &'a [Tensor],
    /// Indices of inputs that the function changed in place.
    pub dirty: &'a [usize],
    /// Indices of outputs that are not differentiable.
    pub constant: &'a [usize],
    /// Whether absent gradients of outputs reach backward as zeros.
    pub materialize_grads: bool,
    /// Whether backward may itself be differentiated.
    pub twice_differentiable: bool,
}

/// What backward is given.
#[derive(Debug)]
pub struct BackwardCall {
    /// The gradient of each output; `None` only where they are not materialized.
    pub gradients: Vec<Option<Tensor>>,
    /// The saved tensors, found unchanged since they were saved.
    pub saved: Vec<Tensor>,
    /// Whether the gradient of each input is wanted.
    pub wanted: Vec<bool>,
}

type Backward = dyn Fn(BackwardCall) -> CallbackResult<Vec<Option<Tensor>>> + Send;

/// Puts the function into the graph and returns its outputs as parts of it.
///
/// `backward` gives one gradient (or `None`) for each input. It runs on whichever thread runs the
/// backward pass, and once for each pass.
///
/// # Errors
/// [`crate::Error::Torch`] if libtorch refuses: a view changed in place, an index out of range.
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
        constant: record.constant.as_ptr(),
        n_constant: record.constant.len(),
        materialize_grads: i32::from(record.materialize_grads),
        twice_differentiable: i32::from(record.twice_differentiable),
    };
    let boxed: Box<Backward> = Box::new(backward);
    let mut out: Vec<RawTensor> = vec![ptr::null_mut(); outputs.len()];
    // SAFETY: all pointers borrow from locals that outlive the call; the closure is owned by the shim
    // from here on; `out` has room for one handle an output.
    let status = unsafe {
        ffi::od_function_record(
            &raw const raw,
            callback::closure(boxed),
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

pub(crate) fn handle(tensor: &Tensor) -> RawTensor {
    tensor.as_ptr().cast_mut().cast()
}

/// New tensors for borrowed handles; `None` for null ones.
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
    callback::contain(|| {
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
                wanted: (0..call.n_out)
                    .map(|index| *call.wanted.add(index) != 0)
                    .collect(),
            }
        };
        let gradients = backward(arguments)?;
        if gradients.len() != call.n_out {
            return Err(CallbackError::from(format!(
                "backward returned {} gradients for {} inputs: it must return one for each, `None` \
                 where there is none",
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

/// Gives a tensor's handle away.
pub(crate) fn into_handle(tensor: Tensor) -> RawTensor {
    let raw = handle(&tensor);
    std::mem::forget(tensor);
    raw
}
