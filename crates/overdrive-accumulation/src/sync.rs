//! The interface to data-parallel training.

use tch::Tensor;

/// An error of a [`GradientSync`].
pub type SyncError = Box<dyn std::error::Error + Send + Sync>;

/// Synchronizes the gradients of several processes, once per window instead of once per micro-batch.
///
/// All processes must run the same number of windows and of steps.
pub trait GradientSync {
    /// Returns the number of processes.
    fn world_size(&self) -> u64;

    /// Returns the sum of `count` over all processes.
    ///
    /// # Errors
    /// Any error of communication.
    fn sum_count(&mut self, count: u64) -> Result<u64, SyncError>;

    /// Is called before every backward, which starts from `loss`. If `last`, it is the last backward of
    /// the window, after which [`synchronize`](Self::synchronize) follows: communication that overlaps
    /// with backward must be enabled then, and disabled before (DistributedDataParallel's `no_sync`).
    ///
    /// A window that ends early, because the data ended unexpectedly, has no last backward.
    ///
    /// # Errors
    /// Any error of preparing the communication.
    fn before_backward(&mut self, loss: &Tensor, last: bool) -> Result<(), SyncError> {
        let _ = (loss, last);
        Ok(())
    }

    /// Replaces each gradient of `parameters` by its **mean** over the processes, as
    /// DistributedDataParallel does. The accumulator undoes the division.
    ///
    /// # Errors
    /// Any error of communication.
    fn synchronize(&mut self, parameters: &[Tensor]) -> Result<(), SyncError>;

    /// Forgets the window, which failed: its [`synchronize`](Self::synchronize) does not follow, or has failed.
    fn abandon(&mut self) {}
}

/// The synchronization of a single process, which does nothing.
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
