use overdrive_datasets::{Batch, OnDevice, Seq2SeqBatch};
use tch::Tensor;

/// A micro-batch of a [`TrainingRun`](crate::TrainingRun): the numbers that the host knows of it, so that nothing is
/// read from a device.
///
/// ```
/// use overdrive_datasets::{OnDevice, Result};
/// use overdrive_trainer::MicroBatch;
/// use tch::{Device, Tensor};
///
/// struct Images {
///     pixels: Tensor, // (B, 3, H, W)
///     classes: Tensor, // (B)
/// }
///
/// impl OnDevice for Images {
///     fn pinned(self) -> Result<Self> {
///         Ok(Self { pixels: self.pixels.pinned()?, classes: self.classes.pinned()? })
///     }
///
///     fn on_device(self, device: Device, non_blocking: bool) -> Result<Self> {
///         let pixels = self.pixels.on_device(device, non_blocking)?;
///         Ok(Self { pixels, classes: self.classes.on_device(device, non_blocking)? })
///     }
/// }
///
/// impl MicroBatch for Images {
///     fn examples(&self) -> usize {
///         self.classes.numel()
///     }
/// }
/// ```
pub trait MicroBatch: OnDevice {
    /// Returns the number of examples.
    fn examples(&self) -> usize;

    /// Returns the number of labels over which the program sums the loss, so that each has the same weight in a step
    /// whatever micro-batch it is in. `None`, the default, if the loss of a micro-batch is a mean.
    fn label_count(&self) -> Option<usize> {
        None
    }

    /// Returns the number of tokens without padding, for tokens per second. Default: the number of examples.
    fn tokens(&self) -> usize {
        self.examples()
    }

    /// Returns the number of tokens with padding. Default: the number without.
    fn padded_tokens(&self) -> usize {
        self.tokens()
    }
}

impl MicroBatch for Batch {
    fn examples(&self) -> usize {
        self.sequences
    }

    fn label_count(&self) -> Option<usize> {
        Some(self.label_count)
    }

    fn tokens(&self) -> usize {
        self.tokens
    }

    fn padded_tokens(&self) -> usize {
        Batch::padded_tokens(self)
    }
}

impl MicroBatch for Seq2SeqBatch {
    fn examples(&self) -> usize {
        self.input_ids
            .size()
            .first()
            .map_or(0, |&rows| rows as usize)
    }

    fn label_count(&self) -> Option<usize> {
        Some(self.label_count)
    }
}

/// A tensor whose first dimension counts the examples.
impl MicroBatch for Tensor {
    fn examples(&self) -> usize {
        self.size().first().map_or(1, |&rows| rows as usize)
    }
}
