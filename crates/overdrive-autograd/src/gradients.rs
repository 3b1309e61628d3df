use overdrive_sys::engine;
use tch::Tensor;

use crate::Result;

/// Options of [`backward`]; the defaults are PyTorch's.
#[derive(Debug, Clone, Copy, Default)]
pub struct BackwardOptions<'a> {
    /// The gradient of each output, in their order. A scalar needs none: it gets 1.
    pub gradients: &'a [Option<&'a Tensor>],
    /// Keeps the graph for another pass. Default: what `create_graph` is.
    pub retain_graph: Option<bool>,
    /// Records the backward itself, for gradients of gradients. The gradients then hold the graph:
    /// clear them when done, or memory stays.
    pub create_graph: bool,
    /// If not empty: only the gradients of these tensors are accumulated.
    pub inputs: &'a [&'a Tensor],
}

/// Adds the gradients of `outputs` to those of the leaves they came from (`torch.autograd.backward`).
///
/// # Errors
/// libtorch's (a graph used twice without `retain_graph`, a non-scalar without gradient, a saved tensor
/// changed in place); what a function or a hook on the way returned. A panic in one of those goes on
/// as a panic here.
pub fn backward(outputs: &[&Tensor], options: &BackwardOptions<'_>) -> Result<()> {
    Ok(engine::backward(
        outputs,
        options.gradients,
        options.inputs,
        options.retain_graph.unwrap_or(options.create_graph),
        options.create_graph,
    )?)
}

/// Options of [`grad`]; the defaults are PyTorch's.
#[derive(Debug, Clone, Copy, Default)]
pub struct GradOptions<'a> {
    /// The gradient of each output, in their order. A scalar needs none: it gets 1.
    pub gradients: &'a [Option<&'a Tensor>],
    /// Keeps the graph for another pass. Default: what `create_graph` is.
    pub retain_graph: Option<bool>,
    /// Records the backward itself, for gradients of gradients.
    pub create_graph: bool,
    /// Inputs that the outputs do not depend on get `None` instead of being an error.
    pub allow_unused: bool,
    /// Inputs that the outputs do not depend on get zeros. Implies `allow_unused`.
    pub materialize_grads: bool,
}

/// The gradients of `inputs`, returned instead of accumulated (`torch.autograd.grad`).
///
/// An element is `None` only under `allow_unused`.
///
/// # Errors
/// As for [`backward`]; an input that the outputs do not depend on, unless it is allowed.
pub fn grad(
    outputs: &[&Tensor],
    inputs: &[&Tensor],
    options: &GradOptions<'_>,
) -> Result<Vec<Option<Tensor>>> {
    let mut gradients = engine::grad(
        outputs,
        options.gradients,
        inputs,
        options.retain_graph.unwrap_or(options.create_graph),
        options.create_graph,
        options.allow_unused || options.materialize_grads,
    )?;
    if options.materialize_grads {
        for (gradient, input) in gradients.iter_mut().zip(inputs) {
            if gradient.is_none() {
                *gradient = Some(input.f_zeros_like()?);
            }
        }
    }
    Ok(gradients)
}
