use overdrive_datasets::{Batch, OnDevice, Seq2SeqBatch};
use overdrive_distributed::ProcessGroup;
use overdrive_profiling::StepWork;
use tch::Tensor;

use crate::Result;

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

/// The totals of an optimizer step, from numbers that the host knows: nothing is read from the device.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct StepTotals {
    /// The number of tokens without padding.
    pub(super) tokens: u64,
    /// The number of tokens with padding.
    pub(super) padded_tokens: u64,
    examples: u64,
    /// If `true`, a process was asked to stop.
    pub(super) stop: bool,
}

impl StepTotals {
    /// Returns the totals of the micro-batches of one process.
    pub(super) fn of<B: MicroBatch>(batches: &[B]) -> Self {
        let sum = |count: fn(&B) -> usize| batches.iter().map(count).sum::<usize>() as u64;
        Self {
            tokens: sum(B::tokens),
            padded_tokens: sum(B::padded_tokens),
            examples: sum(B::examples),
            ..Self::default()
        }
    }

    /// Sums the totals of all processes in one collective; a single process needs none.
    pub(super) fn over(self, group: &ProcessGroup) -> Result<Self> {
        // Counts are exact in f64: they are far below 2^53.
        let [tokens, padded, examples, stop] = group.sums([
            self.tokens as f64,
            self.padded_tokens as f64,
            self.examples as f64,
            f64::from(u8::from(self.stop)),
        ])?;
        Ok(Self {
            tokens: tokens as u64,
            padded_tokens: padded as u64,
            examples: examples as u64,
            stop: stop > 0.0,
        })
    }

    /// Returns the totals that a recorder of steps needs.
    pub(super) fn work(&self) -> StepWork {
        StepWork {
            tokens: self.tokens,
            samples: self.examples,
        }
    }

    /// Returns the fraction of padding, if there is any.
    pub(super) fn padding(&self) -> Option<f64> {
        (self.padded_tokens > self.tokens)
            .then(|| 1.0 - self.tokens as f64 / self.padded_tokens as f64)
    }
}
