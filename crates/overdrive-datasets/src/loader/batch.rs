//! A batch of token rows on a device.

use tch::{Device, Tensor};

use super::OnDevice;
use crate::Result;

/// Rows of tokens as tensors, made by [`crate::collate`]. B is the number of rows, T the width.
///
/// Labels are not shifted, as in Hugging Face: the label at a position is the token at that position,
/// and the loss compares it with what the model predicts at the position before.
#[derive(Debug)]
#[non_exhaustive]
pub struct Batch {
    /// The tokens, (B, T), Int64; padding is on the right.
    pub input_ids: Tensor,
    /// The labels, (B, T), Int64: the tokens to predict, each at its own position, and [`crate::IGNORE_INDEX`] for
    /// prompts, padding and the first token of each sequence.
    pub labels: Tensor,
    /// The attention mask, (B, T), Int64: 1 for a token, 0 for padding. `None` if no row is padded. A causal
    /// model does not need it, since padding is on the right and has no labels.
    pub attention_mask: Option<Tensor>,
    /// The position of each token in its sequence, counted from 0, (B, T), Int64. `None` if each row is one
    /// sequence.
    pub position_ids: Option<Tensor>,
    /// The lengths of the sequences that are concatenated in the single row, in host memory; empty if each row
    /// is one sequence.
    pub sequence_lengths: Vec<i64>,
    /// The number of tokens without padding.
    pub tokens: usize,
    /// The number of sequences.
    pub sequences: usize,
    /// The number of labels that enter the loss: those that are not [`crate::IGNORE_INDEX`]. It is counted on
    /// the host, so that no device synchronization is needed.
    pub label_count: usize,
}

impl Batch {
    /// Returns the number of tokens including padding, `B * T`, which the model computes.
    pub fn padded_tokens(&self) -> usize {
        self.input_ids.numel()
    }

    fn map_tensors(self, change: impl Fn(Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(Self {
            input_ids: change(self.input_ids)?,
            labels: change(self.labels)?,
            attention_mask: self.attention_mask.map(&change).transpose()?,
            position_ids: self.position_ids.map(&change).transpose()?,
            ..self
        })
    }
}

impl OnDevice for Batch {
    fn pinned(self) -> Result<Self> {
        self.map_tensors(Tensor::pinned)
    }

    fn on_device(self, device: Device, non_blocking: bool) -> Result<Self> {
        self.map_tensors(|tensor| tensor.on_device(device, non_blocking))
    }
}
