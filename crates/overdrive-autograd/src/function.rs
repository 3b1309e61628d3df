//! The trait of custom functions, and the contexts of their forward and backward.

use std::marker::PhantomData;

use tch::Tensor;

/// The error of a function or a hook. It must be able to cross threads, because libtorch runs the
/// backward pass of a GPU on its own threads. `?` converts an error of tch into it.
pub type FunctionError = overdrive_sys::CallbackError;

/// The result of a function or a hook.
pub type FunctionResult<T> = std::result::Result<T, FunctionError>;

/// A function with its own backward (`torch.autograd.Function`).
///
/// The fields of the type hold sizes and options; [`apply`](crate::apply) consumes the value. Tensors that
/// backward needs must be saved by [`ForwardContext::save_for_backward`] rather than in fields: libtorch then
/// frees them with the graph and detects in-place changes.
pub trait Function: Send + 'static {
    /// The name of the node in the graph, which appears in errors.
    const NAME: &'static str;

    /// If `true`, [`backward`](Self::backward) consists of differentiable operators and may be
    /// differentiated. Otherwise differentiating it is an error (PyTorch's `once_differentiable`).
    /// Default: `false`.
    const TWICE_DIFFERENTIABLE: bool = false;

    /// Computes the outputs from the inputs. It runs without gradient recording.
    ///
    /// # Errors
    /// Any error; [`apply`](crate::apply) returns it as [`crate::Error::Forward`].
    fn forward(
        &mut self,
        context: &mut ForwardContext<'_>,
        inputs: &[&Tensor],
    ) -> FunctionResult<Vec<Tensor>>;

    /// Computes the gradient of each input (or `None`) from the gradients of the outputs.
    ///
    /// It runs once for each backward pass, on a thread that the engine chooses; a backward pass that it runs
    /// itself must not reach its own node, and returns an error there. Gradients are recorded
    /// only under `create_graph`, and only for functions that are twice differentiable. Gradients of
    /// inputs for which [`BackwardContext::needs_input_grad`] returns `false` are discarded.
    ///
    /// # Errors
    /// Any error; the call that started the backward pass returns it.
    fn backward(
        &self,
        context: &BackwardContext,
        gradients: &[Option<Tensor>],
    ) -> FunctionResult<Vec<Option<Tensor>>>;
}

/// The context of a forward: it saves tensors for backward and marks inputs and outputs.
#[derive(Debug)]
pub struct ForwardContext<'a> {
    pub(crate) needs: Vec<bool>,
    pub(crate) saved: Vec<Tensor>,
    pub(crate) dirty: Vec<usize>,
    pub(crate) non_differentiable: Vec<usize>,
    pub(crate) materialize: bool,
    pub(crate) inputs: PhantomData<&'a [&'a Tensor]>,
}

impl ForwardContext<'_> {
    /// Saves tensors (inputs, outputs or others) for backward, which gets them in the same order. A
    /// second call appends to the first.
    pub fn save_for_backward(&mut self, tensors: &[&Tensor]) {
        self.saved
            .extend(tensors.iter().map(|tensor| tensor.shallow_clone()));
    }

    /// Returns `true` if backward may have to compute the gradient of input `index`. Tensors that only the
    /// gradients of other inputs need do not have to be saved.
    pub fn needs_input_grad(&self, index: usize) -> bool {
        self.needs.get(index).copied().unwrap_or(false)
    }

    /// Returns `true` if backward may have to compute any gradient. Otherwise no tensor has to be saved.
    pub fn needs_any_grad(&self) -> bool {
        self.needs.contains(&true)
    }

    /// Marks input `index` as changed in place by forward; that input must also be an output.
    pub fn mark_dirty(&mut self, index: usize) {
        self.dirty.push(index);
    }

    /// Marks output `index` as not differentiable (an index, a mask).
    pub fn mark_non_differentiable(&mut self, index: usize) {
        self.non_differentiable.push(index);
    }

    /// Sets whether backward receives zeros (the default) or `None` as the gradients of outputs on which the
    /// result does not depend.
    pub fn set_materialize_grads(&mut self, materialize: bool) {
        self.materialize = materialize;
    }
}

/// The context of a backward: the saved tensors and the inputs that need gradients.
#[derive(Debug)]
pub struct BackwardContext {
    pub(crate) saved: Vec<Tensor>,
    pub(crate) needs: Vec<bool>,
}

impl BackwardContext {
    /// Returns the tensors that forward saved, in the order of saving.
    pub fn saved(&self) -> &[Tensor] {
        &self.saved
    }

    /// Returns `true` if this backward pass needs the gradient of input `index`.
    pub fn needs_input_grad(&self, index: usize) -> bool {
        self.needs.get(index).copied().unwrap_or(false)
    }
}
