//! The two forms of a checkpoint: with a closure that owns its captures, and with one that borrows in a
//! scope.

use std::rc::Rc;
use std::sync::Arc;

use overdrive_autograd::{BackwardOnThisThread, BackwardOptions, backward, is_grad_enabled};
use overdrive_sys::CallbackResult;
use overdrive_sys::scoped_closure;
use parking_lot::ReentrantMutex;
use tch::Tensor;

use crate::frame::{Frame, Region};
use crate::{CheckpointOptions, Error, Result};

/// The result of a checkpointed closure, with any error type.
pub type RegionResult<T> = CallbackResult<T>;

/// The value of a checkpointed closure in the short forms: a tensor, or a `Result` with any error type.
pub trait RegionValue {
    /// The value without its error.
    type Output;

    /// Returns the value, or the error.
    ///
    /// # Errors
    /// The error of the closure.
    fn into_result(self) -> RegionResult<Self::Output>;
}

impl RegionValue for Tensor {
    type Output = Self;

    fn into_result(self) -> RegionResult<Self> {
        Ok(self)
    }
}

impl<T, E: Into<Box<dyn std::error::Error + Send + Sync>>> RegionValue
    for std::result::Result<T, E>
{
    type Output = T;

    fn into_result(self) -> RegionResult<T> {
        self.map_err(Into::into)
    }
}

/// Runs `region` on `input` and saves only the input for backward, which runs `region` again to recompute the
/// other tensors that its operators save (`torch.utils.checkpoint.checkpoint`). The default options apply;
/// [`checkpoint_with`] takes options, several inputs, and results of any structure.
///
/// The graph outlives this call and runs the closure in backward, so the closure is moved into it and cannot
/// borrow a layer: in Python the graph would share ownership of the module. Layers are used without clones
/// in two ways:
///
/// * [`Scope::checkpoint`] takes a closure that borrows: `scope.checkpoint(&x, |x| block.forward(x))`. Forward and
///   backward run in one [`scope`].
/// * [`Shared::checkpoint`](crate::Shared::checkpoint) lends its layer to the closure:
///   `block.checkpoint(&x, |block, x| block.forward(x))`. This suits a model whose `forward` does not see backward.
///
/// # Errors
/// As [`checkpoint_with`].
///
/// ```
/// use overdrive_checkpointing::checkpoint;
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let x = Tensor::randn([8, 16], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let y = checkpoint(&x, |x| x.f_gelu("none")?.f_dropout(0.1, true))?;
/// y.f_sum(Kind::Float)?.f_backward()?;
/// assert!(x.grad().defined());
/// # Ok(())
/// # }
/// ```
pub fn checkpoint<V, F>(input: &Tensor, region: F) -> Result<V::Output>
where
    V: RegionValue,
    F: Fn(&Tensor) -> V + Send + 'static,
{
    checkpoint_with(&[input], &CheckpointOptions::default(), move |inputs| {
        region(&inputs[0]).into_result()
    })
}

/// As [`checkpoint`], with any number of inputs, results of any type, and options.
///
/// * Gradients equal those without a checkpoint bit for bit, if the closure computes the same in both passes.
/// * The closure may return any type: tensors, differentiable or not, in any structure.
/// * Tensors that it captures (weights) get gradients as they do without a checkpoint. The closure is
///   moved into the graph, so it must own its captures: shallow clones, or a [`Shared`](crate::Shared)
///   layer. To borrow layers, see [`scope`].
/// * Checkpoints may be nested, in each other and in autocast. Under `no_grad` the closure only runs.
/// * A surrounding checkpoint can recompute the tensors in `inputs`; captured activations stay in memory.
///
/// Memory between the passes: the inputs, which the preceding graph usually holds anyway, and the results
/// that [`CheckpointOptions::policy`] keeps. Time: one more run of the closure, up to its last saving
/// operator.
///
/// # Errors
/// [`Error::Closure`] with the error of the closure; a panic of the closure is not caught. Errors of the
/// recomputation are errors of backward: [`Error::Recomputation`], [`Error::Panic`],
/// [`Error::Mismatch`], [`Error::Count`], [`Error::ChangedInPlace`].
///
/// ```
/// use overdrive_checkpointing::{CheckpointOptions, SavePolicy, checkpoint_with};
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let x = Tensor::randn([8, 16], (Kind::Float, Device::Cpu));
/// let weight = Tensor::randn([16, 16], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let captured = weight.shallow_clone();
/// let options = CheckpointOptions::keeping(SavePolicy::Matmuls);
/// let y = checkpoint_with(&[&x], &options, move |inputs| {
///     Ok(inputs[0].f_matmul(&captured)?.f_gelu("none")?.f_dropout(0.1, true)?)
/// })?;
/// y.f_sum(Kind::Float)?.f_backward()?;
/// assert!(weight.grad().defined());
/// # Ok(())
/// # }
/// ```
pub fn checkpoint_with<T, F>(
    inputs: &[&Tensor],
    options: &CheckpointOptions,
    region: F,
) -> Result<T>
where
    F: Fn(&[Tensor]) -> RegionResult<T> + Send + 'static,
{
    let inputs: Vec<Tensor> = inputs.iter().map(|tensor| tensor.shallow_clone()).collect();
    if !is_grad_enabled() {
        return region(&inputs).map_err(Error::Closure);
    }
    // Reentrant, for closures that run backward inside; an `Arc`, because the first pass runs here while
    // the graph owns the closure.
    let region = Arc::new(ReentrantMutex::new(region));
    let again = Arc::clone(&region);
    let frame = Frame::new(
        Region::Owned(Box::new(move |inputs| {
            let run = again.lock();
            run(inputs).map(drop)
        })),
        &inputs,
        options,
    )?;
    let run = region.lock();
    first_pass(&frame, || run(&inputs))
}

fn first_pass<T>(frame: &Arc<Frame>, run: impl FnOnce() -> RegionResult<T>) -> Result<T> {
    let recording = frame.record()?;
    let outputs = run().map_err(Error::Closure)?;
    drop(recording);
    frame.forward_done();
    Ok(outputs)
}

/// A scope for checkpoints whose closures borrow, created by [`scope`]. It is a handle that can be copied.
#[derive(Debug, Clone, Copy)]
pub struct Scope<'scope, 'env: 'scope> {
    closures: &'scope scoped_closure::Scope<'scope, 'env>,
}

/// Runs `body`, in which closures of checkpoints may borrow values that live outside of it, such as
/// layers, without clones or locks. Backward must run inside `body` too; afterwards the
/// checkpoints of the graph return an error.
///
/// On a GPU libtorch runs backward on its own threads, which must not use the borrowed values. While `body`
/// runs, every backward pass that this thread starts therefore stays on it ([`BackwardOnThisThread`]): that of
/// [`Scope::backward`], of a gradient accumulator, of data parallel training or `Tensor::backward` alike. On a
/// CPU it runs on the calling thread anyway. The devices of a model that is spread over several GPUs then
/// receive their backward work from one thread.
///
/// ```
/// use overdrive_checkpointing::scope;
/// use tch::{Device, Kind, Tensor, nn, nn::Module};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let store = nn::VarStore::new(Device::Cpu);
/// let layers: Vec<nn::Linear> =
///     (0..4).map(|i| nn::linear(store.root() / i, 16, 16, Default::default())).collect();
/// let x = Tensor::randn([8, 16], (Kind::Float, Device::Cpu));
/// scope(|scope| {
///     let mut hidden = x.shallow_clone();
///     for layer in &layers {
///         hidden = scope.checkpoint(&hidden, |x| layer.forward(x).f_gelu("none"))?;
///     }
///     scope.backward(&[&hidden.f_sum(Kind::Float)?])
/// })?;
/// assert!(layers[0].ws.grad().defined());
/// # Ok(())
/// # }
/// ```
pub fn scope<'env, T>(body: impl for<'scope> FnOnce(Scope<'scope, 'env>) -> T) -> T {
    // For the whole body: a backward pass inside it need not know that the graph holds a checkpoint.
    let _on_this_thread = BackwardOnThisThread::new();
    scoped_closure::scope(|closures| body(Scope { closures }))
}

impl<'scope> Scope<'scope, '_> {
    /// As [`checkpoint`], with a closure that may borrow values that live outside of the scope.
    ///
    /// # Errors
    /// As [`checkpoint_with`].
    pub fn checkpoint<V, F>(self, input: &Tensor, region: F) -> Result<V::Output>
    where
        V: RegionValue,
        F: Fn(&Tensor) -> V + 'scope,
    {
        self.checkpoint_with(&[input], &CheckpointOptions::default(), move |inputs| {
            region(&inputs[0]).into_result()
        })
    }

    /// As [`checkpoint_with`], with a closure that may borrow values that live outside of the scope.
    ///
    /// # Errors
    /// As [`checkpoint_with`].
    pub fn checkpoint_with<T, F>(
        self,
        inputs: &[&Tensor],
        options: &CheckpointOptions,
        region: F,
    ) -> Result<T>
    where
        F: Fn(&[Tensor]) -> RegionResult<T> + 'scope,
    {
        let inputs: Vec<Tensor> = inputs.iter().map(|tensor| tensor.shallow_clone()).collect();
        if !is_grad_enabled() {
            return region(&inputs).map_err(Error::Closure);
        }
        let region = Rc::new(region);
        let again = Rc::clone(&region);
        let closure = self
            .closures
            .register(move |inputs| again(inputs).map(drop));
        let frame = Frame::new(Region::Scoped(closure), &inputs, options)?;
        first_pass(&frame, || region(&inputs))
    }

    /// Accumulates the gradients of `outputs` into the leaves of the graph.
    ///
    /// # Errors
    /// As [`overdrive_autograd::backward`].
    pub fn backward(self, outputs: &[&Tensor]) -> Result<()> {
        self.backward_with(outputs, &BackwardOptions::default())
    }

    /// As [`backward`](Self::backward), with options.
    ///
    /// # Errors
    /// As [`overdrive_autograd::backward`].
    pub fn backward_with(self, outputs: &[&Tensor], options: &BackwardOptions<'_>) -> Result<()> {
        Ok(backward(outputs, options)?)
    }
}
