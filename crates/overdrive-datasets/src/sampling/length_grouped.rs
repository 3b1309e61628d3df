//! Batches of records of about one length.

use std::cmp::Reverse;

use super::batches::check_batch_size;
use super::lengths::LastFew;
use super::{BatchSampler, Lengths, Permutation, Shard};
use crate::Result;

/// Batches in a group: `mega_batch_mult` of transformers.
const GROUP: usize = 50;

/// Batches whose records are about equally long, so that little is padded: Hugging Face's
/// `group_by_length`.
///
/// As there, the records of an epoch are put in a random order and cut into groups of 50 batches,
/// each group is sorted, longest first, and cut into batches; and the longest record of all is in the
/// first batch, so that memory that does not suffice shows at once. Only groups are sorted: no list
/// of all records is kept.
///
/// Processes take turns at batches, not at records as in transformers. So in one step all of them
/// have batches of about one length, and none waits for another.
///
/// ```
/// use overdrive_datasets::{BatchSampler, LengthGroupedBatches, Shard};
/// let lengths: Vec<u32> = (0..1000).map(|i| i * 7919 % 500).collect();
/// let batches = LengthGroupedBatches::new(lengths.clone(), 4, false, 42, Shard::default())?;
/// let spread = |batch: Vec<usize>| {
///     let lengths = batch.iter().map(|&record| lengths[record]);
///     lengths.clone().max().unwrap() - lengths.min().unwrap()
/// };
/// let mean = (0..250).map(|n| spread(batches.batch(0, n))).sum::<u32>() / 250;
/// assert!(mean < 20);
/// # Ok::<(), overdrive_datasets::Error>(())
/// ```
#[derive(Debug)]
pub struct LengthGroupedBatches {
    lengths: Lengths,
    longest: usize,
    batch_size: usize,
    drop_last: bool,
    seed: u64,
    shard: Shard,
    groups: LastFew<(u64, usize), Vec<usize>>,
}

impl LengthGroupedBatches {
    /// Batches of `batch_size` records; with `drop_last`, without the one that has fewer.
    ///
    /// # Errors
    /// When `batch_size` is 0.
    pub fn new(
        lengths: impl Into<Lengths>,
        batch_size: usize,
        drop_last: bool,
        seed: u64,
        shard: Shard,
    ) -> Result<Self> {
        check_batch_size(batch_size)?;
        let lengths = lengths.into();
        let longest =
            (0..lengths.len()).max_by_key(|&record| (lengths.of(record), Reverse(record)));
        Ok(Self {
            longest: longest.unwrap_or(0),
            lengths,
            batch_size,
            drop_last,
            seed,
            shard,
            groups: LastFew::default(),
        })
    }

    /// Batches of all processes.
    fn total(&self) -> usize {
        match self.drop_last {
            true => self.lengths.len() / self.batch_size,
            false => self.lengths.len().div_ceil(self.batch_size),
        }
    }

    /// Records in a group. Few records make four groups all the same, or all epochs were alike.
    fn group_len(&self) -> usize {
        GROUP.min((self.total() / 4).max(1)) * self.batch_size
    }

    fn group(&self, epoch: u64, number: usize) -> Vec<usize> {
        let order = Permutation::new(self.lengths.len(), self.seed, epoch);
        // The longest record and the one at the first place change places.
        let (first, place_of_longest) = (order.apply(0), order.invert(self.longest));
        let start = number * self.group_len();
        let end = self
            .lengths
            .len()
            .min(start.saturating_add(self.group_len()));
        let record_at = |place| match place {
            0 => self.longest,
            _ if place == place_of_longest => first,
            _ => order.apply(place),
        };
        let mut group: Vec<usize> = (start..end).map(record_at).collect();
        // The sort is stable: records of one length stay in their random order.
        group.sort_by_cached_key(|&record| Reverse(self.lengths.of(record)));
        group
    }
}

impl BatchSampler for LengthGroupedBatches {
    fn len(&self, _epoch: u64) -> usize {
        self.shard.len(self.total())
    }

    fn batch(&self, epoch: u64, number: usize) -> Vec<usize> {
        let start = self.shard.global(number, self.total()) * self.batch_size;
        let number = start / self.group_len();
        let group = self
            .groups
            .get_or((epoch, number), || self.group(epoch, number));
        let start = (start - number * self.group_len()).min(group.len());
        let end = (start + self.batch_size).min(group.len());
        group[start..end].to_vec()
    }
}
