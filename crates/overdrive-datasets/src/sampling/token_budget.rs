//! Batches of about equally many tokens.

use std::cmp::Reverse;
use std::ops::Range;

use rayon::prelude::*;

use super::lengths::LastFew;
use super::{BatchSampler, Lengths, Permutation, Shard};
use crate::{Error, Result};

/// How batches of equally many tokens are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenBudgetOptions {
    /// The longest record of a batch times its number of records is at most this: the tokens that
    /// the model computes with, padding included. Default: 16,384.
    pub max_tokens: usize,
    /// At most so many records in a batch. Default: no bound.
    pub max_records: Option<usize>,
    /// Whether each epoch has a random order. Default: true.
    pub shuffle: bool,
    /// So many records in a row of the order are sorted together. More make less padding and a less
    /// random order. Default: 8192.
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

/// Batches of as many records as fit a number of tokens: many short ones or a few long ones
/// (`max_tokens` of fairseq).
///
/// The records of an epoch are put in a random order; windows of it are sorted by length and cut into
/// batches, and the batches of a window are put in a random order. The number of batches differs a
/// little from epoch to epoch. What is kept is one number a window.
///
/// The first batch of an epoch computes all lengths and sorts all windows, on all cores.
#[derive(Debug)]
pub struct TokenBudgetBatches {
    lengths: Lengths,
    options: TokenBudgetOptions,
    shard: Shard,
    /// How many batches there are up to and with each window, for the last epochs.
    plans: LastFew<u64, Vec<usize>>,
    windows: LastFew<(u64, usize), Window>,
}

/// Records in the order of their lengths, and which of them are batches.
#[derive(Debug)]
struct Window {
    records: Vec<usize>,
    batches: Vec<Range<usize>>,
}

impl TokenBudgetBatches {
    /// Batches of records of these lengths.
    ///
    /// # Errors
    /// When an option is 0, and when a record is longer than `max_tokens`.
    pub fn new(
        lengths: impl Into<Lengths>,
        options: TokenBudgetOptions,
        shard: Shard,
    ) -> Result<Self> {
        let lengths = lengths.into();
        let invalid = |option, value: usize, expected| {
            Err(Error::InvalidOption {
                option,
                value: value.to_string(),
                expected,
            })
        };
        if options.window == 0 {
            return invalid(
                "window",
                0,
                "at least one record is sorted; the default is 8192",
            );
        }
        if options.max_records == Some(0) {
            return invalid("max_records", 0, "a batch has at least one record");
        }
        let longest = (0..lengths.len()).map(|record| lengths.of(record)).max();
        if longest.is_some_and(|longest| longest > options.max_tokens) || options.max_tokens == 0 {
            return invalid(
                "max_tokens",
                options.max_tokens,
                "at least as many as the longest record has, and one; cut long records, or leave them out",
            );
        }
        Ok(Self {
            lengths,
            options,
            shard,
            plans: LastFew::default(),
            windows: LastFew::default(),
        })
    }

    fn window(&self, epoch: u64, number: usize) -> Window {
        let TokenBudgetOptions { window, seed, .. } = self.options;
        let len = self.lengths.len();
        let start = number * window;
        let places = start..len.min(start.saturating_add(window));
        let mut records: Vec<usize> = if self.options.shuffle {
            let order = Permutation::new(len, seed, epoch);
            places.map(|place| order.apply(place)).collect()
        } else {
            places.collect()
        };
        records.sort_by_cached_key(|&record| Reverse(self.lengths.of(record)));
        let mut batches = Vec::new();
        let mut start = 0;
        while start < records.len() {
            // Sorted: the first record is the longest. One without a token counts as one, so that a
            // batch ends at all.
            let longest = self.lengths.of(records[start]).max(1);
            let fit = self.options.max_tokens / longest;
            let fit = fit.min(self.options.max_records.unwrap_or(usize::MAX));
            let end = start.saturating_add(fit.max(1)).min(records.len());
            batches.push(start..end);
            start = end;
        }
        Window { records, batches }
    }

    /// How many batches of all processes there are up to and with each window.
    fn plan(&self, epoch: u64) -> std::sync::Arc<Vec<usize>> {
        self.plans.get_or(epoch, || {
            let windows = self.lengths.len().div_ceil(self.options.window);
            let mut ends: Vec<usize> = (0..windows)
                .into_par_iter()
                .map(|number| self.window(epoch, number).batches.len())
                .collect();
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
        self.shard
            .len(self.plan(epoch).last().copied().unwrap_or(0))
    }

    fn batch(&self, epoch: u64, number: usize) -> Vec<usize> {
        let plan = self.plan(epoch);
        let number = self.shard.global(number, plan.last().copied().unwrap_or(0));
        let at = plan.partition_point(|&end| end <= number);
        let window = self.windows.get_or((epoch, at), || self.window(epoch, at));
        let before = match at {
            0 => 0,
            _ => plan[at - 1],
        };
        let mut place = number - before;
        if self.options.shuffle {
            // Another sequence of permutations than that of the records: the seed's bits turned round.
            let order = epoch
                .wrapping_mul(plan.len() as u64)
                .wrapping_add(at as u64);
            place = Permutation::new(window.batches.len(), !self.options.seed, order).apply(place);
        }
        match window.batches.get(place) {
            Some(range) => window.records[range.clone()].to_vec(),
            None => Vec::new(),
        }
    }
}
