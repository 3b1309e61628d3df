use std::marker::PhantomData;

use tch::Tensor;

/// The error that a function or hook may return: any that can cross threads, since libtorch runs
/// backward on threads of its own on a GPU. `?` on an error of tch makes one.
pub type FunctionError = overdrive_sys::CallbackError;

/// The result of a function or hook.
pub type FunctionResult<T> = std::result::Result<T, FunctionError>;

/// A function with a backward of its own, as `torch.autograd.Function`.
///
/// The value holds what is not a tensor (sizes, options); [`apply`](crate::apply) consumes it.
/// Tensors that backward needs belong in [`ForwardContext::save_for_backward`], not in fields: libtorch
/// then frees them with the graph and finds out when they were changed in place.
pub trait Function: Send + 'static {
    /// The name that the graph and errors show.
    const NAME: &'static str;

    /// Whether [`backward`](Self::backward) consists of differentiable operators, so that it may be
    /// differentiated in turn. Where it may not, differentiating it is an error that says so
    /// (PyTorch's `once_differentiable`).
    const TWICE_DIFFERENTIABLE: bool = false;

    /// The outputs for the inputs. Runs without gradient recording.
    ///
    /// # Errors
    /// Whatever it wants to say; [`apply`](crate::apply) returns it as [`crate::Error::Forward`].
    fn forward(
        &mut self,
        context: &mut ForwardContext<'_>,
        inputs: &[&Tensor],
    ) -> FunctionResult<Vec<Tensor>>;

    /// The gradient of each input (or `None`) for the gradients of the outputs.
    ///
    /// Runs once for each backward pass, on whichever thread the engine uses, with gradient recording
    /// on only under `create_graph` for functions that are twice differentiable. Gradients of inputs
    /// that [`BackwardContext::needs_input_grad`] says no to are thrown away.
    ///
    /// # Errors
    /// Whatever it wants to say; the call that started the backward pass returns it.
    fn backward(
        &self,
        context: &BackwardContext,
        gradients: &[Option<Tensor>],
    ) -> FunctionResult<Vec<Option<Tensor>>>;
}

/// What a forward can say about its inputs and outputs.
#[derive(Debug)]
pub struct ForwardContext<'a> {
    pub(crate) needs: Vec<bool>,
    pub(crate) saved: Vec<Tensor>,
    pub(crate) dirty: Vec<usize>,
    pub(crate) constant: Vec<usize>,
    pub(crate) materialize: bool,
    pub(crate) inputs: PhantomData<&'a [&'a Tensor]>,
}

impl ForwardContext<'_> {
    /// Keeps tensors (inputs, outputs or others) for backward, which finds them in the same order.
    /// A second call adds to the first.
    pub fn save_for_backward(&mut self, tensors: &[&Tensor]) {
        self.saved
            .extend(tensors.iter().map(|tensor| tensor.shallow_clone()));
    }

    /// Whether the gradient of input `index` may be asked for. Nothing needs to be saved for an input
    /// that needs none.
    pub fn needs_input_grad(&self, index: usize) -> bool {
        self.needs.get(index).copied().unwrap_or(false)
    }

    /// Whether any gradient may be asked for; if not, nothing needs to be saved at all.
    pub fn needs_any_grad(&self) -> bool {
        self.needs.contains(&true)
    }

    /// Says that forward changed input `index` in place; that input must also be an output.
    pub fn mark_dirty(&mut self, index: usize) {
        self.dirty.push(index);
    }

    /// Says that output `index` has no gradient (an index, a mask).
    pub fn mark_non_differentiable(&mut self, index: usize) {
        self.constant.push(index);
    }

    /// Whether gradients of outputs that nothing depends on reach backward as zeros (the default) or
    /// as `None`.
    pub fn set_materialize_grads(&mut self, materialize: bool) {
        self.materialize = materialize;
    }
}

/// What a backward is given beside the gradients.
#[derive(Debug)]
pub struct BackwardContext {
    pub(crate) saved: Vec<Tensor>,
    pub(crate) needs: Vec<bool>,
}

impl BackwardContext {
    /// The tensors that forward saved, in its order.
    pub fn saved(&self) -> &[Tensor] {
        &self.saved
    }

    /// Whether the gradient of input `index` is asked for in this pass.
    pub fn needs_input_grad(&self, index: usize) -> bool {
        self.needs.get(index).copied().unwrap_or(false)
    }
}
