//! A shared handle to a layer for the closures of checkpoints.

use std::sync::Arc;

use parking_lot::ReentrantMutex;
use tch::Tensor;

use crate::{RegionValue, Result, checkpoint};

/// A handle to a layer that a model shares with the graph of a checkpoint. It is `Send` and cheap to clone.
///
/// tch's tensors are `Send` but not `Sync`, so the layer is behind a reentrant lock (about 20 ns).
///
/// ```
/// use overdrive_checkpointing::Shared;
/// use tch::{Device, Kind, Tensor, nn, nn::Module};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let store = nn::VarStore::new(Device::Cpu);
/// let layer = Shared::new(nn::linear(store.root(), 4, 4, Default::default()));
/// let x = Tensor::ones([2, 4], (Kind::Float, Device::Cpu));
/// let y = layer.checkpoint(&x, |layer, x| layer.forward(x).f_gelu("none"))?;
/// y.f_sum(Kind::Float)?.f_backward()?;
/// assert!(layer.with(|layer| layer.ws.grad().defined()));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Shared<T>(Arc<ReentrantMutex<T>>);

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Shared<T> {
    /// Moves the layer into a shared handle.
    pub fn new(layer: T) -> Self {
        Self(Arc::new(ReentrantMutex::new(layer)))
    }

    /// Calls `body` with the layer. Waits while another thread uses it.
    pub fn with<R>(&self, body: impl FnOnce(&T) -> R) -> R {
        body(&self.0.lock())
    }

    /// Runs `region` on the layer and `input` as a checkpoint: [`checkpoint`](fn@checkpoint), whose closure is lent
    /// the layer. For options or several inputs, clone the handle into the closure of [`checkpoint_with`].
    ///
    /// # Errors
    /// As [`checkpoint_with`].
    ///
    /// [`checkpoint_with`]: crate::checkpoint_with
    pub fn checkpoint<V, F>(&self, input: &Tensor, region: F) -> Result<V::Output>
    where
        T: Send + 'static,
        V: RegionValue,
        F: Fn(&T, &Tensor) -> V + Send + 'static,
    {
        let layer = self.clone();
        checkpoint(input, move |x| layer.with(|layer| region(layer, x)))
    }

    /// Returns the layer for changing it; `None` while another handle exists, such as that of a graph
    /// whose backward has not run yet.
    pub fn get_mut(&mut self) -> Option<&mut T> {
        Arc::get_mut(&mut self.0).map(ReentrantMutex::get_mut)
    }
}
