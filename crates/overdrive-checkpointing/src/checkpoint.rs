//! The two forms of a checkpoint: with a closure that owns what it uses, and within a scope that lends.

use std::rc::Rc;
use std::sync::Arc;

use overdrive_autograd::{BackwardOptions, backward, is_grad_enabled};
use overdrive_sys::CallbackResult;
use overdrive_sys::saved_tensors::{BackwardOnThisThread, Lender, lending};
use parking_lot::ReentrantMutex;
use tch::Tensor;

use crate::frame::{Frame, Region};
use crate::{CheckpointOptions, Error, Result};

/// What a checkpointed closure returns: any error will do.
pub type RegionResult<T> = CallbackResult<T>;

/// Runs `region` on `inputs` and keeps, of all that its operators save for backward, nothing but the
/// inputs; backward runs it again for the rest (`torch.utils.checkpoint.checkpoint`).
///
/// * Gradients are those of the plain run, bit for bit, if the closure computes the same each time.
/// * The closure may return anything: tensors, differentiable or not, in any structure.
/// * Tensors that it captures (weights) get gradients as they do in the plain run. It is moved into the
///   graph, so it owns what it uses: shallow clones, or a [`Shared`](crate::Shared) layer. To borrow
///   layers, see [`scope`].
/// * Checkpoints may be nested, in each other and in autocast. Under `no_grad` the closure just runs.
/// * Only inputs that come in through `inputs` are offered to a surrounding checkpoint to recompute;
///   captured activations are kept.
///
/// Memory between the passes: the inputs, which the graph before usually holds anyway, and what
/// [`CheckpointOptions::policy`] keeps. Time: the closure once more, up to its last saving operator.
///
/// # Errors
/// [`Error::Closure`] with what the closure returned; a panic of it goes on. What goes wrong in the
/// recomputation is the error of backward: [`Error::Recomputation`], [`Error::Panic`],
/// [`Error::Mismatch`], [`Error::Count`], [`Error::ChangedInPlace`].
///
/// ```
/// use overdrive_checkpointing::{CheckpointOptions, checkpoint};
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let x = Tensor::randn([8, 16], (Kind::Float, Device::Cpu));
/// let weight = Tensor::randn([16, 16], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let captured = weight.shallow_clone();
/// let y = checkpoint(&[&x], &CheckpointOptions::default(), move |inputs| {
///     Ok(inputs[0].f_matmul(&captured)?.f_gelu("none")?.f_dropout(0.1, true)?)
/// })?;
/// y.f_sum(Kind::Float)?.f_backward()?;
/// assert!(weight.grad().defined());
/// # Ok(())
/// # }
/// ```
pub fn checkpoint<T, F>(inputs: &[&Tensor], options: &CheckpointOptions, region: F) -> Result<T>
where
    F: Fn(&[Tensor]) -> RegionResult<T> + Send + 'static,
{
    let inputs: Vec<Tensor> = inputs.iter().map(|tensor| tensor.shallow_clone()).collect();
    if !is_grad_enabled() {
        return region(&inputs).map_err(Error::Closure);
    }
    // Reentrant, for closures that run backward inside; shared, because the first pass is run here.
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

/// A scope for checkpoints whose closures borrow; made by [`scope`]. It is a handle: copy it.
#[derive(Debug, Clone, Copy)]
pub struct Scope<'scope, 'env: 'scope> {
    lender: &'scope Lender<'scope, 'env>,
}

/// Runs `body`, in which closures of checkpoints may borrow what lives outside of it: layers behind
/// `&self`, without clones or locks. Backward must run inside too; afterwards the graph's checkpoints
/// answer with an error.
///
/// On a GPU libtorch runs backward on threads of its own, which must not touch what this thread lends:
/// [`Scope::backward`] keeps it here. On a CPU it runs on the thread that calls it anyway.
///
/// ```
/// use overdrive_checkpointing::{CheckpointOptions, scope};
/// use tch::{Device, Kind, Tensor, nn, nn::Module};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let store = nn::VarStore::new(Device::Cpu);
/// let layers: Vec<nn::Linear> =
///     (0..4).map(|i| nn::linear(store.root() / i, 16, 16, Default::default())).collect();
/// let x = Tensor::randn([8, 16], (Kind::Float, Device::Cpu));
/// let options = CheckpointOptions::default();
/// scope(|scope| {
///     let mut hidden = x.shallow_clone();
///     for layer in &layers {
///         hidden = scope.checkpoint(&[&hidden], &options, |inputs| {
///             Ok(layer.forward(&inputs[0]).f_gelu("none")?)
///         })?;
///     }
///     scope.backward(&[&hidden.f_sum(Kind::Float)?])
/// })?;
/// assert!(layers[0].ws.grad().defined());
/// # Ok(())
/// # }
/// ```
pub fn scope<'env, T>(body: impl for<'scope> FnOnce(Scope<'scope, 'env>) -> T) -> T {
    lending(|lender| body(Scope { lender }))
}

impl<'scope> Scope<'scope, '_> {
    /// As [`checkpoint`], with a closure that may borrow what lives outside of the scope.
    ///
    /// # Errors
    /// As [`checkpoint`].
    pub fn checkpoint<T, F>(
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
        let lent = self.lender.lend(move |inputs| again(inputs).map(drop));
        let frame = Frame::new(Region::Lent(lent), &inputs, options)?;
        first_pass(&frame, || region(&inputs))
    }

    /// Adds the gradients of the leaves under `outputs` to theirs, on this thread alone.
    ///
    /// # Errors
    /// Those of [`overdrive_autograd::backward`].
    pub fn backward(self, outputs: &[&Tensor]) -> Result<()> {
        self.backward_with(outputs, &BackwardOptions::default())
    }

    /// [`backward`](Self::backward) with options.
    ///
    /// # Errors
    /// Those of [`overdrive_autograd::backward`].
    pub fn backward_with(self, outputs: &[&Tensor], options: &BackwardOptions<'_>) -> Result<()> {
        let _here = BackwardOnThisThread::new();
        Ok(backward(outputs, options)?)
    }
}
