//! A shared handle to a layer for the closures of checkpoints.

use std::sync::Arc;

use parking_lot::ReentrantMutex;

/// A handle to a layer for closures that own their captures. It is `Send` and cheap to clone.
///
/// tch's tensors are `Send` but not `Sync`, so the layer is behind a reentrant lock (about 20 ns).
///
/// ```
/// use overdrive_checkpointing::{CheckpointOptions, Shared, checkpoint};
/// use tch::{Device, Kind, Tensor, nn, nn::Module};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let store = nn::VarStore::new(Device::Cpu);
/// let layer = Shared::new(nn::linear(store.root(), 4, 4, Default::default()));
/// let x = Tensor::ones([2, 4], (Kind::Float, Device::Cpu));
/// let captured = layer.clone();
/// let y = checkpoint(&[&x], &CheckpointOptions::default(), move |inputs| {
///     Ok(captured.with(|layer| layer.forward(&inputs[0]).f_gelu("none"))?)
/// })?;
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

    /// Returns the layer for changing it; `None` while another handle exists, such as that of a graph
    /// whose backward has not run yet.
    pub fn get_mut(&mut self) -> Option<&mut T> {
        Arc::get_mut(&mut self.0).map(ReentrantMutex::get_mut)
    }
}
