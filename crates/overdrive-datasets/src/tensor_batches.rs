//! Batches as tensors.

use tch::{Device, Tensor};

use crate::{BatchOptions, BatchState, Batches, Prefetch, Result, WindowBatch, Windows};

/// A micro-batch on a device. B: windows, T: context.
#[derive(Debug)]
pub struct Batch {
    /// (B, T), Int64.
    pub input_ids: Tensor,
    /// (B, T), Int64: the next token of each position (already shifted), [`crate::IGNORE_INDEX`]
    /// where there is none.
    pub labels: Tensor,
    /// How many labels are to be predicted, counted on the host: no device is asked for it.
    pub label_count: usize,
    /// The state after this batch: save it when the batch has been used.
    pub state: BatchState,
}

/// An iterator of [`Batch`]es: [`Batches`] made into tensors, ahead of time by a background thread
/// (`BatchOptions::prefetch`). The batches and their order do not depend on it.
pub struct TokenBatches {
    batches: Box<dyn Iterator<Item = Result<Batch>> + Send>,
    device: Device,
    state: BatchState,
}

impl TokenBatches {
    /// Batches on `device` from the first window on.
    ///
    /// # Errors
    /// When an option is outside its range, and when the thread cannot be started.
    pub fn new<W: Windows + 'static>(
        windows: W,
        options: BatchOptions,
        device: Device,
    ) -> Result<Self> {
        Self::resume(windows, options, device, BatchState::default())
    }

    /// Batches on `device` from where a run stopped.
    ///
    /// # Errors
    /// As [`TokenBatches::new`].
    pub fn resume<W: Windows + 'static>(
        windows: W,
        options: BatchOptions,
        device: Device,
        state: BatchState,
    ) -> Result<Self> {
        let batches = Batches::resume(windows, options, state)?;
        let tensors = batches.map(|batch| Batch::from_windows(&batch?));
        let batches: Box<dyn Iterator<Item = Result<Batch>> + Send> = match options.prefetch {
            0 => Box::new(tensors),
            depth => Box::new(Prefetch::new(tensors, depth)?),
        };
        Ok(Self {
            batches,
            device,
            state,
        })
    }

    /// The state after the last batch that was given out; what is prepared ahead does not count.
    pub fn state(&self) -> BatchState {
        self.state
    }
}

impl Batch {
    /// The batch as tensors in host memory.
    ///
    /// # Errors
    /// When libtorch has no memory for them.
    pub fn from_windows(batch: &WindowBatch) -> Result<Self> {
        let shape = [batch.rows as i64, batch.context as i64];
        Ok(Self {
            input_ids: Tensor::f_from_slice(&batch.input_ids)?.f_view(shape)?,
            labels: Tensor::f_from_slice(&batch.labels)?.f_view(shape)?,
            label_count: batch.label_count,
            state: batch.state,
        })
    }

    /// The batch on a device. On the device where it is already, this shares its memory.
    ///
    /// # Errors
    /// When libtorch cannot copy it there.
    pub fn to_device(&self, device: Device) -> Result<Self> {
        Ok(Self {
            input_ids: self.input_ids.f_to_device(device)?,
            labels: self.labels.f_to_device(device)?,
            label_count: self.label_count,
            state: self.state,
        })
    }
}

impl Iterator for TokenBatches {
    type Item = Result<Batch>;

    fn next(&mut self) -> Option<Self::Item> {
        let batch = self.batches.next()?;
        Some(batch.and_then(|batch| {
            self.state = batch.state;
            batch.to_device(self.device)
        }))
    }
}

impl std::fmt::Debug for TokenBatches {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TokenBatches")
            .field("device", &self.device)
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}
