//! Gradients by backward, accumulated or returned.

use overdrive_sys::engine;
use tch::Tensor;

use crate::Result;

/// The options of [`backward`]; the defaults are PyTorch's.
#[derive(Debug, Clone, Copy, Default)]
pub struct BackwardOptions<'a> {
    /// The gradients of the outputs, in their order. A scalar output needs none; its gradient is 1.
    pub gradients: &'a [Option<&'a Tensor>],
    /// If `true`, the graph is kept for another backward pass. Default: the value of `create_graph`.
    pub retain_graph: Option<bool>,
    /// If `true`, the backward pass is recorded, for gradients of gradients. The gradients then own the
    /// graph: clear them afterwards, or its memory is not freed. Default: `false`.
    pub create_graph: bool,
    /// The tensors whose gradients are accumulated; empty (the default) for all leaves of the graph.
    pub inputs: &'a [&'a Tensor],
}

/// Accumulates the gradients of `outputs` into the leaves of the graph (`torch.autograd.backward`).
///
/// # Errors
/// [`crate::Error::Sys`] with libtorch's error (a graph used twice without `retain_graph`, a non-scalar
/// output without a gradient, a saved tensor changed in place) or the error of a function or a hook in
/// the graph. A panic in one of those resumes here.
pub fn backward(outputs: &[&Tensor], options: &BackwardOptions<'_>) -> Result<()> {
    Ok(engine::backward(
        outputs,
        options.gradients,
        options.inputs,
        options.retain_graph.unwrap_or(options.create_graph),
        options.create_graph,
    )?)
}

/// The options of [`grad`]; the defaults are PyTorch's.
#[derive(Debug, Clone, Copy, Default)]
pub struct GradOptions<'a> {
    /// The gradients of the outputs, in their order. A scalar output needs none; its gradient is 1.
    pub gradients: &'a [Option<&'a Tensor>],
    /// If `true`, the graph is kept for another backward pass. Default: the value of `create_graph`.
    pub retain_graph: Option<bool>,
    /// If `true`, the backward pass is recorded, for gradients of gradients. Default: `false`.
    pub create_graph: bool,
    /// If `true`, inputs that the outputs do not depend on get `None`; otherwise they are an error. Default:
    /// `false`.
    pub allow_unused: bool,
    /// If `true`, inputs that the outputs do not depend on get zeros. Implies `allow_unused`. Default:
    /// `false`.
    pub materialize_grads: bool,
}

/// Returns the gradients of `inputs` without accumulating them (`torch.autograd.grad`).
///
/// An element is `None` only with `allow_unused`.
///
/// # Errors
/// As [`backward`]; [`crate::Error::Sys`] for an input that the outputs do not depend on, unless
/// `allow_unused`.
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
    // The engine has no such option; PyTorch's Python side fills in the zeros too.
    if options.materialize_grads {
        for (gradient, input) in gradients.iter_mut().zip(inputs) {
            if gradient.is_none() {
                *gradient = Some(input.f_zeros_like()?);
            }
        }
    }
    Ok(gradients)
}
