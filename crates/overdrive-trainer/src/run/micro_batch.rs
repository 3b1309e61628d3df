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

    /// Returns what the program's loss reads of the micro-batch, if that is tensors alone: their pass can then be captured in
    /// a CUDA graph and replayed on other micro-batches of the same shapes and the same [`label_count`](Self::label_count).
    /// Default: `None`, and the pass is not captured.
    fn static_inputs(&self) -> Option<StaticInputs> {
        None
    }
}

/// The inputs of a captured pass.
#[derive(Debug)]
pub struct StaticInputs {
    /// The tensors that the loss reads, in the same order for each micro-batch.
    pub tensors: Vec<Tensor>,
    /// The smallest and the largest id, if the loss checks them on the host: a pass is not replayed on ids outside the range
    /// that it has checked.
    pub id_range: Option<(i64, i64)>,
}

impl StaticInputs {
    /// Returns inputs that the loss does not check on the host.
    pub fn of<'t>(tensors: impl IntoIterator<Item = &'t Tensor>) -> Self {
        Self {
            tensors: tensors.into_iter().map(Tensor::shallow_clone).collect(),
            id_range: None,
        }
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

    fn static_inputs(&self) -> Option<StaticInputs> {
        // The lengths of packed sequences are numbers on the host, which differ from row to row.
        let is_packed = self.position_ids.is_some() || !self.sequence_lengths.is_empty();
        (!is_packed).then(|| StaticInputs {
            id_range: Some(self.id_range()),
            ..StaticInputs::of(
                [&self.input_ids, &self.labels]
                    .into_iter()
                    .chain(&self.attention_mask),
            )
        })
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

    fn static_inputs(&self) -> Option<StaticInputs> {
        Some(StaticInputs::of([self]))
    }
}
