//! A layer that closures of checkpoints share.

use std::sync::Arc;

use parking_lot::ReentrantMutex;

/// A handle to a layer, cheap to clone and `Send`, for closures that own what they use.
///
/// tch's tensors may go from thread to thread but not be used on two at once, so the layer is behind a
/// lock (of some 20 ns), which a thread may take again while it has it.
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
    /// Takes the layer.
    pub fn new(layer: T) -> Self {
        Self(Arc::new(ReentrantMutex::new(layer)))
    }

    /// Lends the layer to `body`; waits while another thread has it.
    pub fn with<R>(&self, body: impl FnOnce(&T) -> R) -> R {
        body(&self.0.lock())
    }

    /// The layer, to change it: `None` while a graph that has still to be differentiated, or anyone
    /// else, has a handle to it.
    pub fn get_mut(&mut self) -> Option<&mut T> {
        Arc::get_mut(&mut self.0).map(ReentrantMutex::get_mut)
    }
}
