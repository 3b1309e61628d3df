//! Windows put together into micro-batches.

use crate::{Error, Result, Windows};

/// Which windows make a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BatchOptions {
    /// Windows a batch, on this process. Default: 8.
    pub micro_batch_size: usize,
    /// This process among those that train together. Default: 0.
    pub rank: usize,
    /// How many processes train together. Default: 1.
    pub world_size: usize,
    /// Leaves out a last batch of fewer windows. Default: false.
    pub drop_last: bool,
    /// How many batches are prepared ahead by a background thread, where batches are tensors; 0
    /// prepares each one when it is asked for. The batches are the same. Default: 2.
    pub prefetch: usize,
}

impl Default for BatchOptions {
    fn default() -> Self {
        Self {
            micro_batch_size: 8,
            rank: 0,
            world_size: 1,
            drop_last: false,
            prefetch: 2,
        }
    }
}

impl BatchOptions {
    /// # Errors
    /// When `micro_batch_size` or `world_size` is 0, or `rank` is not below `world_size`.
    pub fn validate(&self) -> Result<()> {
        let invalid = |option, value: usize, expected| {
            Err(Error::InvalidOption {
                option,
                value: value.to_string(),
                expected,
            })
        };
        if self.micro_batch_size == 0 {
            return invalid("micro_batch_size", 0, "a batch has at least one window");
        }
        if self.world_size == 0 {
            return invalid("world_size", 0, "at least one process trains");
        }
        if self.rank >= self.world_size {
            return invalid(
                "rank",
                self.rank,
                "ranks count from 0 and are below world_size",
            );
        }
        Ok(())
    }
}

/// How far a run of batches has come: all that there is to save.
///
/// It counts windows over all processes, not batches, so a run can be continued with another micro
/// batch size or another number of processes and sees the same windows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchState {
    /// The number of the first window that no process has taken.
    pub next_window: u64,
}

/// A micro-batch as plain numbers, row by row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WindowBatch {
    /// (rows, context).
    pub input_ids: Vec<i64>,
    /// (rows, context): the next token of each, [`crate::IGNORE_INDEX`] where there is none.
    pub labels: Vec<i64>,
    /// The number of windows.
    pub rows: usize,
    /// The length of a window.
    pub context: usize,
    /// How many labels are to be predicted: the divisor of a mean loss.
    pub label_count: usize,
    /// The state after this batch: save it when the batch has been used.
    pub state: BatchState,
}

/// An iterator of micro-batches.
///
/// All processes together take the windows in their order: of each `world_size * micro_batch_size`
/// windows, process 0 takes the first `micro_batch_size`, process 1 the next. So k accumulated
/// batches on w processes see the windows of one batch k·w times as large. Of windows that end, a
/// process may get one batch fewer than another.
#[derive(Debug, Clone)]
pub struct Batches<W> {
    windows: W,
    options: BatchOptions,
    state: BatchState,
}

impl<W: Windows> Batches<W> {
    /// Batches from the first window on.
    ///
    /// # Errors
    /// When an option is outside its range.
    pub fn new(windows: W, options: BatchOptions) -> Result<Self> {
        Self::resume(windows, options, BatchState::default())
    }

    /// Batches from where a run stopped.
    ///
    /// # Errors
    /// When an option is outside its range.
    pub fn resume(windows: W, options: BatchOptions, state: BatchState) -> Result<Self> {
        options.validate()?;
        Ok(Self {
            windows,
            options,
            state,
        })
    }

    /// How far it has come.
    pub fn state(&self) -> BatchState {
        self.state
    }

    /// What the batches are made of.
    pub fn windows(&self) -> &W {
        &self.windows
    }

    /// How many of its windows the next batch has.
    fn next_rows(&self, first: u64) -> usize {
        let size = self.options.micro_batch_size;
        let Some(count) = self.windows.count() else {
            return size;
        };
        match usize::try_from(count.saturating_sub(first)) {
            Ok(rest) if rest < size && self.options.drop_last => 0,
            Ok(rest) => rest.min(size),
            Err(_) => size,
        }
    }

    fn batch(&self, first: u64, rows: usize, state: BatchState) -> Result<WindowBatch> {
        let context = self.windows.context();
        let mut input_ids = vec![0; rows * context];
        let mut labels = vec![0; rows * context];
        let mut label_count = 0;
        let slots = input_ids
            .chunks_exact_mut(context)
            .zip(labels.chunks_exact_mut(context));
        for ((input_ids, labels), number) in slots.zip(first..) {
            label_count += self.windows.copy_window(number, input_ids, labels)?;
        }
        Ok(WindowBatch {
            input_ids,
            labels,
            rows,
            context,
            label_count,
            state,
        })
    }
}

impl<W: Windows> Iterator for Batches<W> {
    type Item = Result<WindowBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        let size = self.options.micro_batch_size as u64;
        let first = self.state.next_window + self.options.rank as u64 * size;
        let rows = self.next_rows(first);
        if rows == 0 {
            return None;
        }
        let next_window = self.state.next_window + self.options.world_size as u64 * size;
        self.state = BatchState { next_window };
        Some(self.batch(first, rows, self.state))
    }
}
