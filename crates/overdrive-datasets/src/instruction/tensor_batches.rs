use std::fmt;

use tch::{Device, Tensor};

use super::batches::{InstructionBatch, InstructionBatches};
use crate::{BatchState, Prefetch, Result};

/// A batch on a device. B: rows, T: width.
#[derive(Debug)]
#[non_exhaustive]
pub struct InstructionTensors {
    /// (B, T), Int64.
    pub input_ids: Tensor,
    /// (B, T), Int64: the token at each place that is learned, -100 elsewhere; not shifted.
    pub labels: Tensor,
    /// (B, T), Int64: 1 for a token, 0 for padding. Padding is on the right, where a causal model does
    /// not look. `None` where there is none.
    pub attention_mask: Option<Tensor>,
    /// (B, T), Int64.
    pub position_ids: Tensor,
    /// The lengths of the sequences that lie one behind the other in the one row; empty where each row
    /// is one.
    pub sequence_lengths: Vec<i64>,
    /// Tokens without padding.
    pub tokens: usize,
    /// Sequences.
    pub sequences: usize,
    /// How many labels count, counted on the host.
    pub label_count: usize,
    /// The state after this batch.
    pub state: BatchState,
}

impl InstructionTensors {
    /// The batch as tensors in host memory.
    ///
    /// # Errors
    /// When libtorch has no memory for them.
    pub fn new(batch: &InstructionBatch) -> Result<Self> {
        let shape = [batch.rows as i64, batch.width as i64];
        let tensor = |numbers: &[i64]| Tensor::f_from_slice(numbers)?.f_view(shape);
        let mask = &batch.attention_mask;
        Ok(Self {
            input_ids: tensor(&batch.input_ids)?,
            labels: tensor(&batch.labels)?,
            attention_mask: (!mask.is_empty()).then(|| tensor(mask)).transpose()?,
            position_ids: tensor(&batch.position_ids)?,
            sequence_lengths: batch.sequence_lengths.clone(),
            tokens: batch.tokens,
            sequences: batch.sequences,
            label_count: batch.label_count,
            state: batch.state,
        })
    }

    /// The batch on a device. On the device where it is already, this shares its memory.
    ///
    /// # Errors
    /// When libtorch cannot copy it there.
    pub fn to_device(&self, device: Device) -> Result<Self> {
        let mask = self.attention_mask.as_ref();
        Ok(Self {
            input_ids: self.input_ids.f_to_device(device)?,
            labels: self.labels.f_to_device(device)?,
            attention_mask: mask.map(|mask| mask.f_to_device(device)).transpose()?,
            position_ids: self.position_ids.f_to_device(device)?,
            sequence_lengths: self.sequence_lengths.clone(),
            ..*self
        })
    }
}

/// [`InstructionBatches`] as tensors, made ahead of time by a background thread.
pub struct InstructionTensorBatches {
    batches: Box<dyn Iterator<Item = Result<InstructionTensors>> + Send>,
    device: Device,
    state: BatchState,
}

impl InstructionTensorBatches {
    /// On `device`, at most `prefetch` batches ahead; 0 makes each when it is asked for.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn new(batches: InstructionBatches, prefetch: usize, device: Device) -> Result<Self> {
        let state = batches.state();
        let tensors = batches.map(|batch| InstructionTensors::new(&batch?));
        let batches: Box<dyn Iterator<Item = _> + Send> = match prefetch {
            0 => Box::new(tensors),
            depth => Box::new(Prefetch::new(tensors, depth)?),
        };
        Ok(Self {
            batches,
            device,
            state,
        })
    }

    /// The state after the last batch that was given out.
    pub fn state(&self) -> BatchState {
        self.state
    }
}

impl Iterator for InstructionTensorBatches {
    type Item = Result<InstructionTensors>;

    fn next(&mut self) -> Option<Self::Item> {
        let batch = self.batches.next()?;
        Some(batch.and_then(|batch| {
            self.state = batch.state;
            batch.to_device(self.device)
        }))
    }
}

impl fmt::Debug for InstructionTensorBatches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InstructionTensorBatches")
            .field("device", &self.device)
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}
