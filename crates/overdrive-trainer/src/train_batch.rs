//! What a training loop is fed with.

use overdrive_datasets::{Batch, InstructionTensors, OnDevice};
use overdrive_transformer::{CausalLm, ForwardInput, LabelShift, LossOutput};
use tch::{Device, Tensor};

use crate::Result;

/// What a micro-batch is to a training loop.
pub trait TrainBatch {
    /// How many labels count, known without asking the device.
    fn label_count(&self) -> u64;

    /// Sequences.
    fn samples(&self) -> u64;

    /// Tokens that the model works through, padding not counted.
    fn tokens(&self) -> u64;

    /// The same with padding.
    fn places(&self) -> u64 {
        self.tokens()
    }

    /// The summed loss.
    ///
    /// # Errors
    /// When the forward pass fails.
    fn loss(&self, model: &CausalLm) -> Result<LossOutput>;
}

impl TrainBatch for Batch {
    fn label_count(&self) -> u64 {
        self.label_count as u64
    }

    fn samples(&self) -> u64 {
        let rows = self.input_ids.size().first().copied();
        rows.unwrap_or(0).unsigned_abs()
    }

    fn tokens(&self) -> u64 {
        self.input_ids.numel() as u64
    }

    fn loss(&self, model: &CausalLm) -> Result<LossOutput> {
        Ok(model.loss(&self.input_ids, &self.labels, LabelShift::Shifted)?)
    }
}

impl TrainBatch for InstructionTensors {
    fn label_count(&self) -> u64 {
        self.label_count as u64
    }

    fn samples(&self) -> u64 {
        self.sequences as u64
    }

    fn tokens(&self) -> u64 {
        self.tokens as u64
    }

    fn places(&self) -> u64 {
        self.input_ids.numel() as u64
    }

    /// Padding is on the right, where a causal model does not look, and its labels do not count: no
    /// mask is needed, and attention keeps its fastest kernel.
    fn loss(&self, model: &CausalLm) -> Result<LossOutput> {
        let input = ForwardInput::new(&self.input_ids);
        if self.sequence_lengths.is_empty() {
            return Ok(model.loss_of(input, &self.labels, LabelShift::HuggingFace)?);
        }
        let device = self.input_ids.device();
        let lengths = &self.sequence_lengths;
        let sequences = overdrive_attention::PackedLengths::from_lengths(lengths, device)?;
        let input = input
            .with_position_ids(&self.position_ids)
            .with_sequences(&sequences);
        Ok(model.loss_of(input, &self.labels, LabelShift::HuggingFace)?)
    }
}

/// A batch of text: windows of documents laid end to end, or documents.
#[derive(Debug)]
#[non_exhaustive]
pub enum TextBatch {
    /// Windows.
    Windows(Batch),
    /// Documents, padded or one behind the other.
    Sequences(InstructionTensors),
}

impl TextBatch {
    /// The token ids, `[rows, columns]`.
    pub fn input_ids(&self) -> &Tensor {
        match self {
            Self::Windows(batch) => &batch.input_ids,
            Self::Sequences(batch) => &batch.input_ids,
        }
    }

    fn as_batch(&self) -> &dyn TrainBatch {
        match self {
            Self::Windows(batch) => batch,
            Self::Sequences(batch) => batch,
        }
    }
}

impl TrainBatch for TextBatch {
    fn label_count(&self) -> u64 {
        self.as_batch().label_count()
    }

    fn samples(&self) -> u64 {
        self.as_batch().samples()
    }

    fn tokens(&self) -> u64 {
        self.as_batch().tokens()
    }

    fn places(&self) -> u64 {
        self.as_batch().places()
    }

    fn loss(&self, model: &CausalLm) -> Result<LossOutput> {
        self.as_batch().loss(model)
    }
}

impl OnDevice for TextBatch {
    fn pinned(self) -> overdrive_datasets::Result<Self> {
        Ok(match self {
            Self::Windows(batch) => Self::Windows(batch.pinned()?),
            Self::Sequences(batch) => Self::Sequences(batch.pinned()?),
        })
    }

    fn on_device(self, device: Device, non_blocking: bool) -> overdrive_datasets::Result<Self> {
        Ok(match self {
            Self::Windows(batch) => Self::Windows(batch.on_device(device, non_blocking)?),
            Self::Sequences(batch) => Self::Sequences(batch.on_device(device, non_blocking)?),
        })
    }
}
