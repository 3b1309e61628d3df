//! Batches of about the same number of tokens.

use std::cmp::Reverse;
use std::ops::Range;

use rayon::prelude::*;

use super::lengths::RecentValues;
use super::{BatchSampler, Lengths, Permutation};
use crate::Result;
use overdrive_core::{check_option, check_positive};

/// The options of [`TokenBudgetBatches`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenBudgetOptions {
    /// The largest number of tokens of a batch including padding: the length of its longest record times the
    /// number of its records. Default: 16,384.
    pub max_tokens: usize,
    /// The largest number of records of a batch. Default: `None`, no bound.
    pub max_records: Option<usize>,
    /// If `true`, each epoch has a random order. Default: `true`.
    pub shuffle: bool,
    /// The number of consecutive records of the order that are sorted together. A larger window gives less
    /// padding and a less random order. Default: 8192.
    pub window: usize,
    /// The seed of the order. Default: 0.
    pub seed: u64,
}

impl Default for TokenBudgetOptions {
    fn default() -> Self {
        Self {
            max_tokens: 16_384,
            max_records: None,
            shuffle: true,
            window: 8192,
            seed: 0,
        }
    }
}

/// Batches of as many records as fit a number of tokens: many short ones or few long ones (`max_tokens` of
/// fairseq).
///
/// The records of an epoch are shuffled; windows of the order are sorted by length and divided into batches, and
/// the batches of a window are shuffled. The number of batches differs slightly between epochs. One number per
/// window is kept.
///
/// The first batch of an epoch computes all lengths and sorts all windows, on all cores.
#[derive(Debug)]
pub struct TokenBudgetBatches {
    lengths: Lengths,
    options: TokenBudgetOptions,
    /// The number of batches up to and including each window, for the last epochs.
    plans: RecentValues<u64, Vec<usize>>,
    windows: RecentValues<(u64, usize), Window>,
}

/// The records of a window, sorted by length, and the ranges that are batches.
#[derive(Debug)]
struct Window {
    records: Vec<usize>,
    batches: Vec<Range<usize>>,
}

impl TokenBudgetBatches {
    /// Returns batches of records of these lengths.
    ///
    /// # Errors
    /// Returns an error if an option is 0, or if a record is longer than `max_tokens`.
    pub fn new(lengths: impl Into<Lengths>, options: TokenBudgetOptions) -> Result<Self> {
        let lengths = lengths.into();
        check_positive("window", options.window)?;
        check_positive("max_records", options.max_records.unwrap_or(1))?;
        let longest = (0..lengths.len()).map(|record| lengths.of(record)).max();
        let needed = longest.unwrap_or(1).max(1);
        check_option(
            options.max_tokens >= needed,
            "max_tokens",
            options.max_tokens,
            format!(
                "at least {needed}, the length of the longest record; truncate or leave out long records"
            ),
        )?;
        Ok(Self {
            lengths,
            options,
            plans: RecentValues::default(),
            windows: RecentValues::default(),
        })
    }

    fn window(&self, epoch: u64, number: usize) -> Window {
        let TokenBudgetOptions { window, seed, .. } = self.options;
        let len = self.lengths.len();
        let start = number * window;
        let positions = start..len.min(start.saturating_add(window));
        let mut records: Vec<usize> = if self.options.shuffle {
            let order = Permutation::new(len, seed, epoch);
            positions.map(|position| order.apply(position)).collect()
        } else {
            positions.collect()
        };
        records.sort_by_cached_key(|&record| Reverse(self.lengths.of(record)));
        let mut batches = Vec::new();
        let mut start = 0;
        while start < records.len() {
            // The first record is the longest, since they are sorted. An empty record counts as one token,
            // so that batches of empty records are bounded too.
            let longest = self.lengths.of(records[start]).max(1);
            let fit = self.options.max_tokens / longest;
            let fit = fit.min(self.options.max_records.unwrap_or(usize::MAX));
            let end = start.saturating_add(fit.max(1)).min(records.len());
            batches.push(start..end);
            start = end;
        }
        Window { records, batches }
    }

    /// Returns the number of batches up to and including each window.
    fn plan(&self, epoch: u64) -> std::sync::Arc<Vec<usize>> {
        self.plans.get_or(epoch, || {
            let windows = self.lengths.len().div_ceil(self.options.window);
            let mut ends: Vec<usize> = (0..windows)
                .into_par_iter()
                .map(|number| self.window(epoch, number).batches.len())
                .collect();
            // A prefix sum, by which a binary search finds the window of a batch.
            let mut sum = 0;
            for end in &mut ends {
                sum += *end;
                *end = sum;
            }
            ends
        })
    }
}

impl BatchSampler for TokenBudgetBatches {
    fn len(&self, epoch: u64) -> usize {
        self.plan(epoch).last().copied().unwrap_or(0)
    }

    fn batch(&self, epoch: u64, number: usize) -> Vec<usize> {
        let plan = self.plan(epoch);
        let at = plan.partition_point(|&end| end <= number);
        let window = self.windows.get_or((epoch, at), || self.window(epoch, at));
        let before = match at {
            0 => 0,
            _ => plan[at - 1],
        };
        let mut position = number - before;
        if self.options.shuffle {
            // The complement of the seed gives other permutations than those of the records.
            let order = epoch
                .wrapping_mul(plan.len() as u64)
                .wrapping_add(at as u64);
            position =
                Permutation::new(window.batches.len(), !self.options.seed, order).apply(position);
        }
        match window.batches.get(position) {
            Some(range) => window.records[range.clone()].to_vec(),
            None => Vec::new(),
        }
    }
}
