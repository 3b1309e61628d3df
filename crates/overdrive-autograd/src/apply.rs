use std::marker::PhantomData;

use overdrive_sys::function::{Record, record};
use overdrive_sys::raw::data_address;
use tch::Tensor;

use crate::guards::{NoGradGuard, is_grad_enabled};
use crate::{BackwardContext, Error, ForwardContext, Function, Result};

/// Runs the forward of a [`Function`] and records it in the graph (`Function.apply`).
///
/// If no input requires a gradient, or recording is disabled, the outputs are plain tensors and the
/// tensors that forward saved are freed.
///
/// An output that is a view of a tensor made in forward (a reshaped result, for example) is an ordinary tensor
/// afterwards, which may be changed in place. PyTorch refuses to change it. A view of an input, or an output that shares
/// elements with another output, stays a view that must not be changed in place, as in PyTorch.
///
/// # Errors
/// [`Error::Forward`] with the error of forward; [`Error::Contract`] if forward marked an input or output
/// that does not exist; [`Error::Sys`] with libtorch's error (a leaf was changed in place).
pub fn apply<F: Function>(mut function: F, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
    let recording = is_grad_enabled();
    let mut context = ForwardContext {
        needs: inputs
            .iter()
            .map(|input| recording && input.requires_grad())
            .collect(),
        saved: Vec::new(),
        dirty: Vec::new(),
        non_differentiable: Vec::new(),
        materialize: true,
        inputs: PhantomData,
    };
    let outputs = {
        // The graph gets one node for the function instead of the operators of its forward.
        let _no_grad = NoGradGuard::new();
        function.forward(&mut context, inputs)
    }
    .map_err(|source| Error::Forward {
        function: F::NAME,
        source,
    })?;
    // Before the shim, which would only report an index out of range.
    check_marks::<F>("input", &context.dirty, inputs.len())?;
    check_marks::<F>("output", &context.non_differentiable, outputs.len())?;

    if !recording && is_plain(&context, inputs, &outputs) {
        return Ok(outputs);
    }
    let node = Record {
        name: F::NAME,
        inputs,
        outputs: &outputs,
        saved: &context.saved,
        dirty: &context.dirty,
        non_differentiable: &context.non_differentiable,
        materialize_grads: context.materialize,
        twice_differentiable: F::TWICE_DIFFERENTIABLE,
    };
    Ok(record(&node, move |call| {
        let context = BackwardContext {
            saved: call.saved,
            needs: call.needs_input_grad,
        };
        function.backward(&context, &call.gradients)
    })?)
}

/// Returns `true` if libtorch would return the outputs unchanged, given that recording is disabled: no input was
/// changed, and no output is an input, which would have to become a view of itself.
fn is_plain(context: &ForwardContext<'_>, inputs: &[&Tensor], outputs: &[Tensor]) -> bool {
    // Saves the foreign call where it would do nothing: a decoder makes hundreds of such calls per step.
    if !context.dirty.is_empty() {
        return false;
    }
    // Undefined, sparse and empty tensors have no address to compare.
    let inputs: Option<Vec<_>> = inputs.iter().map(|input| data_address(input)).collect();
    let is_new = |output: &Tensor, inputs: &[_]| {
        data_address(output).is_some_and(|address| !inputs.contains(&address))
    };
    inputs.is_some_and(|inputs| outputs.iter().all(|output| is_new(output, &inputs)))
}

fn check_marks<F: Function>(what: &str, marks: &[usize], len: usize) -> Result<()> {
    match marks.iter().find(|mark| **mark >= len) {
        None => Ok(()),
        Some(mark) => Err(Error::Contract {
            function: F::NAME,
            problem: format!("marked {what} {mark}, but it has {len} {what}s; indices start at 0"),
        }),
    }
}
