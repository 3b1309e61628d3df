use std::marker::PhantomData;

use overdrive_sys::function::{Record, record};
use tch::Tensor;

use crate::guards::{NoGradGuard, is_grad_enabled};
use crate::{BackwardContext, Error, ForwardContext, Function, Result};

/// Runs a [`Function`] on its inputs and puts it into the graph (`Function.apply`).
///
/// Where no input requires a gradient, or recording is off, the outputs are plain tensors and what
/// forward saved is freed.
///
/// # Errors
/// [`Error::Forward`] with what forward returned; [`Error::Contract`] if it marked an input or output
/// that there is not; [`Error::Sys`] if libtorch refuses (a leaf changed in place).
pub fn apply<F: Function>(mut function: F, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
    let recording = is_grad_enabled();
    let mut context = ForwardContext {
        needs: inputs
            .iter()
            .map(|input| recording && input.requires_grad())
            .collect(),
        saved: Vec::new(),
        dirty: Vec::new(),
        constant: Vec::new(),
        materialize: true,
        inputs: PhantomData,
    };
    let outputs = {
        let _no_grad = NoGradGuard::new();
        function.forward(&mut context, inputs)
    }
    .map_err(|source| Error::Forward {
        function: F::NAME,
        source,
    })?;
    check_marks::<F>("input", &context.dirty, inputs.len())?;
    check_marks::<F>("output", &context.constant, outputs.len())?;

    if is_plain(&context, inputs, &outputs) {
        return Ok(outputs);
    }
    let record_of = Record {
        name: F::NAME,
        inputs,
        outputs: &outputs,
        saved: &context.saved,
        dirty: &context.dirty,
        constant: &context.constant,
        materialize_grads: context.materialize,
        twice_differentiable: F::TWICE_DIFFERENTIABLE,
    };
    Ok(record(&record_of, move |call| {
        let context = BackwardContext {
            saved: call.saved,
            needs: call.wanted,
        };
        function.backward(&context, &call.gradients)
    })?)
}

/// Whether the outputs are what libtorch would make of them: nothing is recorded, and none of them is an
/// input, which would have to become a view of itself. A decoder makes hundreds of such calls a step.
fn is_plain(context: &ForwardContext<'_>, inputs: &[&Tensor], outputs: &[Tensor]) -> bool {
    let recorded = !context.dirty.is_empty() || context.needs.contains(&true);
    // Others have no address of their elements.
    let strided = |tensor: &Tensor| tensor.defined() && !tensor.is_sparse();
    if recorded || !outputs.iter().all(strided) || !inputs.iter().all(|input| strided(input)) {
        return false;
    }
    let is_input = |output: &Tensor| {
        let data = output.data_ptr();
        inputs.iter().any(|input| input.data_ptr() == data)
    };
    !outputs.iter().any(is_input)
}

fn check_marks<F: Function>(what: &str, marks: &[usize], len: usize) -> Result<()> {
    match marks.iter().find(|mark| **mark >= len) {
        None => Ok(()),
        Some(mark) => Err(Error::Contract {
            function: F::NAME,
            problem: format!("marked {what} {mark}, but it has {len} of them (they count from 0)"),
        }),
    }
}
