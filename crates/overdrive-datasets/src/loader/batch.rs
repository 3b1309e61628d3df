//! A batch of token rows on a device.

use overdrive_core::check_option;
use tch::Tensor;

use super::device_loader::on_device_by_map;
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
    /// The smallest and the largest id among the tokens, the labels that enter the loss and the padding token.
    pub(crate) id_range: (i64, i64),
}

impl Batch {
    /// Returns the number of tokens including padding, `B * T`, which the model computes.
    pub fn padded_tokens(&self) -> usize {
        self.input_ids.numel()
    }

    /// Returns the smallest and the largest id among the tokens, the labels that enter the loss and the padding token, which
    /// were recorded when the batch was made.
    pub fn id_range(&self) -> (i64, i64) {
        self.id_range
    }

    /// Checks that all tokens and labels are ids of a vocabulary of `vocab_size` tokens. The range of the ids was
    /// recorded when the batch was made, so nothing is read from a device. On a GPU an id outside the vocabulary
    /// would end in a device error that does not name the cause.
    ///
    /// # Errors
    /// [`crate::Error::Common`] with the id and the remedy.
    pub fn check_ids(&self, vocab_size: i64) -> Result<()> {
        check_id_range(self.id_range, vocab_size)
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

/// Checks the smallest and the largest id of a batch.
pub(super) fn check_id_range((least, largest): (i64, i64), vocab_size: i64) -> Result<()> {
    let unfit = if least < 0 { least } else { largest };
    let expected = format!(
        "at least 0 and below {vocab_size}, the vocabulary of the model; prepare the data with the tokenizer of the \
         model"
    );
    Ok(check_option(
        (0..vocab_size).contains(&unfit),
        "a token or label of a batch",
        unfit,
        expected,
    )?)
}

on_device_by_map!(Batch);
