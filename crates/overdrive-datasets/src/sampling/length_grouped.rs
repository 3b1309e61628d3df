//! Batches of records of similar length.

use std::cmp::Reverse;

use super::batches::check_batch_size;
use super::lengths::RecentValues;
use super::{BatchSampler, Lengths, Permutation};
use crate::Result;

/// The number of batches in a group: the default of transformers' `mega_batch_mult`.
const GROUP: usize = 50;

/// Batches of records of similar length, which need little padding: Hugging Face's `group_by_length`.
///
/// The records of an epoch are shuffled and divided into groups of 50 batches, as in transformers, whose Trainer counts
/// a batch as all records of an optimizer step (with `gradient_accumulation_steps`) and here is a micro-batch; each
/// group is sorted, longest first, and divided into batches. The longest record of all is in the first batch, so that
/// a lack of memory shows at once. Only groups are sorted: no list of all records is kept.
///
/// The length of the groups is part of a loader's state ([`crate::LoaderState::group_len`]), so that a run that resumes
/// with another batch size reads the records in the order in which it began.
///
/// Processes that train together alternate by batches ([`ShardedBatches`](super::ShardedBatches)), and not by records as
/// in transformers. So in each step all of them have batches of similar length, and none waits for another.
///
/// ```
/// use overdrive_datasets::{BatchSampler, LengthGroupedBatches};
/// let lengths: Vec<u32> = (0..1000).map(|i| i * 7919 % 500).collect();
/// let batches = LengthGroupedBatches::new(lengths.clone(), 4, false, 42)?;
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
    groups: RecentValues<(usize, u64, usize), Vec<usize>>,
}

impl LengthGroupedBatches {
    /// Returns batches of `batch_size` records; with `drop_last`, the batch with fewer records is dropped.
    ///
    /// # Errors
    /// Returns an error if `batch_size` is 0.
    pub fn new(
        lengths: impl Into<Lengths>,
        batch_size: usize,
        drop_last: bool,
        seed: u64,
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
            groups: RecentValues::default(),
        })
    }

    fn group(&self, group_len: usize, epoch: u64, number: usize) -> Vec<usize> {
        let order = Permutation::new(self.lengths.len(), self.seed, epoch);
        // The longest record and the first one exchange their positions.
        let (first, position_of_longest) = (order.apply(0), order.invert(self.longest));
        let start = number * group_len;
        let end = self.lengths.len().min(start.saturating_add(group_len));
        let record_at = |position| match position {
            0 => self.longest,
            _ if position == position_of_longest => first,
            _ => order.apply(position),
        };
        let mut group: Vec<usize> = (start..end).map(record_at).collect();
        // The sort is stable: records of one length stay in their random order.
        // The length is asked for once per record, since it may be computed.
        group.sort_by_cached_key(|&record| Reverse(self.lengths.of(record)));
        group
    }
}

impl BatchSampler for LengthGroupedBatches {
    fn len(&self, _epoch: u64) -> usize {
        match self.drop_last {
            true => self.lengths.len() / self.batch_size,
            false => self.lengths.len().div_ceil(self.batch_size),
        }
    }

    fn batch(&self, epoch: u64, number: usize) -> Vec<usize> {
        self.batch_in_groups_of(0, epoch, number)
    }

    fn joint_batch_size(&self) -> usize {
        self.batch_size
    }

    /// Even few records are divided into four groups: with a single group all epochs would be equal.
    fn group_len(&self) -> usize {
        let batches = GROUP.min((self.len(0) / 4).max(1));
        batches.saturating_mul(self.batch_size)
    }

    fn batch_in_groups_of(&self, group_len: usize, epoch: u64, number: usize) -> Vec<usize> {
        let group_len = match group_len {
            0 => self.group_len(),
            given => given,
        };
        let start = number.saturating_mul(self.batch_size);
        let end = start
            .saturating_add(self.batch_size)
            .min(self.lengths.len());
        let mut records = Vec::new();
        // Groups of another batch size may end within a batch.
        while start + records.len() < end {
            let position = start + records.len();
            let number = position / group_len;
            let key = (group_len, epoch, number);
            let group = self
                .groups
                .get_or(key, || self.group(group_len, epoch, number));
            let from = position - number * group_len;
            let to = group.len().min(from + (end - position));
            records.extend_from_slice(&group[from..to]);
        }
        records
    }
}
