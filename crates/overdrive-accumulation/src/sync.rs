//! The seam to data parallel training.

use tch::Tensor;

/// An error of a [`GradientSync`].
pub type SyncError = Box<dyn std::error::Error + Send + Sync>;

/// Brings the gradients of several processes together, once a window instead of once a
/// micro-batch.
///
/// All processes must call the accumulator alike: as many windows, as many steps.
pub trait GradientSync {
    /// How many processes take part.
    fn world_size(&self) -> u64;

    /// The sum of `count` over all processes.
    ///
    /// # Errors
    /// When the processes cannot be reached.
    fn sum_count(&mut self, count: u64) -> Result<u64, SyncError>;

    /// Called before every backward, which starts from `loss`. `last` says that it is the window's last
    /// one, after which [`synchronize`](Self::synchronize) follows: where communication can overlap with
    /// backward, arm it then, and leave it out before (`no_sync` of DistributedDataParallel).
    ///
    /// A window that ends early (the data ran out without notice) has no last one.
    ///
    /// # Errors
    /// When communication cannot be prepared.
    fn before_backward(&mut self, loss: &Tensor, last: bool) -> Result<(), SyncError> {
        let _ = (loss, last);
        Ok(())
    }

    /// Leaves on every process the **mean** over the processes of each gradient of `parameters`,
    /// as DistributedDataParallel does. The accumulator undoes the division.
    ///
    /// # Errors
    /// When the processes cannot be reached.
    fn synchronize(&mut self, parameters: &[Tensor]) -> Result<(), SyncError>;
}

/// One process: nothing to bring together.
#[derive(Debug, Clone, Copy, Default)]
pub struct SingleProcess;

impl GradientSync for SingleProcess {
    fn world_size(&self) -> u64 {
        1
    }

    fn sum_count(&mut self, count: u64) -> Result<u64, SyncError> {
        Ok(count)
    }

    fn synchronize(&mut self, _parameters: &[Tensor]) -> Result<(), SyncError> {
        Ok(())
    }
}
