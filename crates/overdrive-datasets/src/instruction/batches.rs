use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::dataset::InstructionDataset;
use super::epoch::{grouped_by_length, shuffled};
use crate::{
    BatchState, Dataset, Error, PackPlan, PackingStrategy, Result, RowLayout, SequenceRows,
    collate_rows,
};

/// How rows become a batch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Layout {
    /// One example a row, filled up on the right to the longest of the batch. The default.
    #[default]
    Padded,
    /// One example a row, and the rows one behind the other as a single one without padding: TRL's
    /// `padding_free`.
    PaddingFree,
    /// As many examples a row as fit into `max_seq_length`, by this strategy, and the rows one behind
    /// the other.
    Packed(PackingStrategy),
}

/// How batches are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CollateOptions {
    /// Rows a batch; default 8.
    pub micro_batch_size: usize,
    /// How they are laid out.
    pub layout: Layout,
    /// Puts examples of about one length into one batch, for less padding; default false.
    pub group_by_length: bool,
    /// The token that fills rows up; it is never learned and never seen. Default 0.
    pub pad_token: u32,
    /// Fills rows up to a multiple of it; default 1.
    pub pad_to_multiple_of: usize,
    /// Batches without end, each pass in another order; without it one pass in the order of the data.
    /// Default true.
    pub shuffle: bool,
    /// What the orders are drawn from.
    pub seed: u64,
}

impl Default for CollateOptions {
    fn default() -> Self {
        CollateOptions {
            micro_batch_size: 8,
            layout: Layout::Padded,
            group_by_length: false,
            pad_token: 0,
            pad_to_multiple_of: 1,
            shuffle: true,
            seed: 0,
        }
    }
}

/// A batch as plain numbers, row by row.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct InstructionBatch {
    /// (rows, width).
    pub input_ids: Vec<i64>,
    /// (rows, width): the token at each place that is learned, predicted from the place before it
    /// (transformers' convention); [`crate::IGNORE_INDEX`] for what is not: questions, padding, and the first
    /// token of each sequence.
    pub labels: Vec<i64>,
    /// (rows, width): 1 for a token, 0 for padding. Empty where there is no padding.
    pub attention_mask: Vec<i64>,
    /// (rows, width): the place of each token in its sequence, from 0.
    pub position_ids: Vec<i64>,
    /// The lengths of the sequences that lie one behind the other in the one row; empty where each row
    /// is one sequence.
    pub sequence_lengths: Vec<i64>,
    /// Rows of the tensors: 1 where sequences lie one behind the other.
    pub rows: usize,
    /// Tokens a row, padding included.
    pub width: usize,
    /// Tokens without padding.
    pub tokens: usize,
    /// Sequences: examples, or pieces of them.
    pub sequences: usize,
    /// How many labels count: the divisor of a mean loss.
    pub label_count: usize,
    /// The state after this batch; it counts rows.
    pub state: BatchState,
}

/// An iterator of batches of instruction data.
///
/// Examples are read and tokenized when their batch is made; the order is a pure function of the seed
/// and the number of the pass.
#[derive(Debug, Clone)]
pub struct InstructionBatches {
    dataset: Arc<InstructionDataset>,
    plan: Arc<PackPlan>,
    options: CollateOptions,
    state: BatchState,
    /// The order of the pass that is under way.
    order: Option<(u64, Vec<u32>)>,
}

impl InstructionBatches {
    /// Batches from the first row on; rows are at most the encoder's `max_seq_length` long.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] for batches of no row.
    pub fn new(dataset: Arc<InstructionDataset>, options: CollateOptions) -> Result<Self> {
        Self::resume(dataset, options, BatchState::default())
    }

    /// Batches from where a run stopped.
    ///
    /// # Errors
    /// As [`InstructionBatches::new`].
    pub fn resume(
        dataset: Arc<InstructionDataset>,
        options: CollateOptions,
        state: BatchState,
    ) -> Result<Self> {
        for (option, value) in [
            ("micro_batch_size", options.micro_batch_size),
            ("pad_to_multiple_of", options.pad_to_multiple_of),
        ] {
            if value == 0 {
                return Err(Error::InvalidOption {
                    option,
                    value: "0".to_owned(),
                    expected: "it is at least 1",
                });
            }
        }
        let capacity = dataset.encoder().options().max_seq_length;
        let plan = match options.layout {
            Layout::Packed(strategy) => PackPlan::new(dataset.lengths(), capacity, strategy)?,
            _ => PackPlan::one_each(dataset.lengths(), capacity)?,
        };
        Ok(InstructionBatches {
            dataset,
            plan: Arc::new(plan),
            options,
            state,
            order: None,
        })
    }

    /// Which examples lie in which row.
    pub fn plan(&self) -> &PackPlan {
        &self.plan
    }

    /// Batches of one pass; the last may have fewer rows.
    pub fn batches_per_epoch(&self) -> usize {
        self.plan.len().div_ceil(self.options.micro_batch_size)
    }

    /// How far it has come, in rows.
    pub fn state(&self) -> BatchState {
        self.state
    }

    /// The part of a pass's places that holds tokens, 0 to 1: what packing, and grouping by length, are
    /// for.
    pub fn fill(&self) -> f64 {
        if !matches!(self.options.layout, Layout::Padded) {
            return match self.options.layout {
                Layout::PaddingFree => 1.0,
                _ => self.plan.fill(),
            };
        }
        let order = self.order_of(0);
        let places: usize = order
            .chunks(self.options.micro_batch_size)
            .map(|rows| self.width(rows) * rows.len())
            .sum();
        self.plan.tokens() as f64 / places.max(1) as f64
    }

    fn width(&self, rows: &[u32]) -> usize {
        let lengths = rows.iter().map(|&row| self.plan.row_tokens(row as usize));
        let longest = lengths.max().unwrap_or(0);
        longest.next_multiple_of(self.options.pad_to_multiple_of)
    }

    fn order_of(&self, epoch: u64) -> Vec<u32> {
        let options = &self.options;
        match (options.shuffle, options.group_by_length) {
            (false, _) => (0..u32::try_from(self.plan.len()).unwrap_or(u32::MAX)).collect(),
            (true, false) => shuffled(&self.plan, options.seed, epoch),
            (true, true) => {
                grouped_by_length(&self.plan, options.micro_batch_size, options.seed, epoch)
            }
        }
    }

    /// The rows of the next batch, all of one pass.
    fn next_rows(&mut self) -> Option<Vec<u32>> {
        let rows = self.plan.len() as u64;
        let epoch = self.state.next_window.checked_div(rows)?;
        if epoch > 0 && !self.options.shuffle {
            return None;
        }
        let start = (self.state.next_window % rows) as usize;
        if self.order.as_ref().is_none_or(|(known, _)| *known != epoch) {
            self.order = Some((epoch, self.order_of(epoch)));
        }
        let (_, order) = self.order.as_ref()?;
        let end = (start + self.options.micro_batch_size).min(order.len());
        self.state.next_window += (end - start) as u64;
        Some(order[start..end].to_vec())
    }

    fn batch(&self, rows: &[u32]) -> Result<InstructionBatch> {
        let sequences = SequenceRows::new(Arc::clone(&self.dataset), Arc::clone(&self.plan));
        let rows: Result<Vec<_>> = rows
            .iter()
            .map(|&row| sequences.get(row as usize))
            .collect();
        let layout = match self.options.layout {
            Layout::Padded => RowLayout::Padded {
                pad_token: self.options.pad_token,
                multiple_of: self.options.pad_to_multiple_of,
            },
            Layout::PaddingFree | Layout::Packed(_) => RowLayout::EndToEnd,
        };
        Ok(InstructionBatch {
            state: self.state,
            ..collate_rows(&rows?, layout)?
        })
    }
}

impl Iterator for InstructionBatches {
    type Item = Result<InstructionBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        let rows = self.next_rows()?;
        Some(self.batch(&rows))
    }
}
