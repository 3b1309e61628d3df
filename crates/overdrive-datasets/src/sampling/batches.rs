//! Batch samplers: the records of each batch.

use super::{Sampler, Shard};
use crate::Result;
use overdrive_core::check_positive;

/// A sampler of batches: PyTorch's `BatchSampler` as a pure function.
pub trait BatchSampler: Send + Sync {
    /// Returns the number of batches of an epoch, on this process.
    fn len(&self, epoch: u64) -> usize;

    /// Returns `true` if an epoch has no batches.
    fn is_empty(&self, epoch: u64) -> bool {
        self.len(epoch) == 0
    }

    /// Returns the records of batch `number` (below [`BatchSampler::len`]) of an epoch.
    fn batch(&self, epoch: u64, number: usize) -> Vec<usize>;

    /// Returns the number of records of a batch, over all processes; 0 if it is unknown or differs between batches.
    /// Loaders keep it in their state, so that a run resumes at the same record with another one.
    fn joint_batch_size(&self) -> usize {
        0
    }

    /// Returns the number of batches that all processes together take in one step. Default: 1, for a sampler that does
    /// not divide its batches among processes. Where [`joint_batch_size`](Self::joint_batch_size) is 0, loaders keep
    /// this number in their state, so that a run resumes at the same batch with another number of processes.
    fn joint_batches(&self) -> usize {
        1
    }

    /// Returns the number of records in a group, if the order of the records depends on it; else 0. Loaders keep it
    /// in their state.
    fn group_len(&self) -> usize {
        0
    }

    /// Returns batch `number` of an epoch, in the order of groups of `group_len` records, which may come from a
    /// sampler with another batch size. With 0, the order is the sampler's own.
    fn batch_in_groups_of(&self, _group_len: usize, epoch: u64, number: usize) -> Vec<usize> {
        self.batch(epoch, number)
    }
}

impl<B: BatchSampler + ?Sized> BatchSampler for Box<B> {
    fn len(&self, epoch: u64) -> usize {
        (**self).len(epoch)
    }

    fn batch(&self, epoch: u64, number: usize) -> Vec<usize> {
        (**self).batch(epoch, number)
    }

    fn joint_batch_size(&self) -> usize {
        (**self).joint_batch_size()
    }

    fn joint_batches(&self) -> usize {
        (**self).joint_batches()
    }

    fn group_len(&self) -> usize {
        (**self).group_len()
    }

    fn batch_in_groups_of(&self, group_len: usize, epoch: u64, number: usize) -> Vec<usize> {
        (**self).batch_in_groups_of(group_len, epoch, number)
    }
}

/// Batches of equal size in the order of a sampler, sharded over processes.
///
/// Process `rank` takes the records at the positions `rank`, `rank + world_size`, … of the order, as
/// `DistributedSampler` does, and makes batches of them; all processes have the same number of records.
#[derive(Debug, Clone)]
pub struct SampledBatches<S> {
    sampler: S,
    batch_size: usize,
    drop_last: bool,
    shard: Shard,
}

impl<S: Sampler> SampledBatches<S> {
    /// Returns batches of `batch_size` records; with `drop_last`, a last batch with fewer records is dropped.
    ///
    /// # Errors
    /// Returns an error if `batch_size` is 0.
    pub fn new(sampler: S, batch_size: usize, drop_last: bool, shard: Shard) -> Result<Self> {
        check_batch_size(batch_size)?;
        Ok(Self {
            sampler,
            batch_size,
            drop_last,
            shard,
        })
    }
}

impl<S: Sampler> BatchSampler for SampledBatches<S> {
    fn len(&self, _epoch: u64) -> usize {
        let records = self.shard.len(self.sampler.len());
        match self.drop_last {
            true => records / self.batch_size,
            false => records.div_ceil(self.batch_size),
        }
    }

    fn batch(&self, epoch: u64, number: usize) -> Vec<usize> {
        let len = self.sampler.len();
        let records = self.shard.len(len);
        let start = number.saturating_mul(self.batch_size).min(records);
        let end = start.saturating_add(self.batch_size).min(records);
        (start..end)
            .map(|position| self.sampler.index(epoch, self.shard.global(position, len)))
            .collect()
    }

    fn joint_batch_size(&self) -> usize {
        self.shard.joint(self.batch_size)
    }
}

/// The batches of another sampler, sharded over processes: of `world_size` consecutive batches, each process takes
/// one (Accelerate's `BatchSamplerShard`). The joint batch of all processes is that of one process with
/// `world_size` times the records.
///
/// ```
/// use overdrive_datasets::{
///     BatchSampler, LastShare, SampledBatches, SequentialSampler, Shard, ShardedBatches,
/// };
///
/// let all = SampledBatches::new(SequentialSampler::new(8), 2, false, Shard::default())?;
/// let second = ShardedBatches::new(all, Shard::new(1, 2, LastShare::Repeat)?);
/// assert_eq!(second.len(0), 2);
/// assert_eq!((second.batch(0, 0), second.batch(0, 1)), (vec![2, 3], vec![6, 7]));
/// # Ok::<(), overdrive_datasets::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct ShardedBatches<S> {
    batches: S,
    shard: Shard,
}

impl<S: BatchSampler> ShardedBatches<S> {
    /// Returns the batches of the process that `shard` names.
    pub fn new(batches: S, shard: Shard) -> Self {
        Self { batches, shard }
    }
}

impl<S: BatchSampler> BatchSampler for ShardedBatches<S> {
    fn len(&self, epoch: u64) -> usize {
        self.shard.len(self.batches.len(epoch))
    }

    fn batch(&self, epoch: u64, number: usize) -> Vec<usize> {
        self.batch_in_groups_of(0, epoch, number)
    }

    fn joint_batch_size(&self) -> usize {
        self.shard.joint(self.batches.joint_batch_size())
    }

    fn joint_batches(&self) -> usize {
        self.shard.joint(self.batches.joint_batches())
    }

    fn group_len(&self) -> usize {
        self.batches.group_len()
    }

    fn batch_in_groups_of(&self, group_len: usize, epoch: u64, number: usize) -> Vec<usize> {
        let number = self.shard.global(number, self.batches.len(epoch));
        self.batches.batch_in_groups_of(group_len, epoch, number)
    }
}

/// Batches of consecutive records for endless datasets, such as [`crate::RandomWindows`]. An epoch has
/// `batches_per_epoch` batches and begins after the last record of the previous one.
///
/// ```
/// use overdrive_datasets::{BatchSampler, ConsecutiveBatches};
///
/// let batches = ConsecutiveBatches::new(2, 3)?;
/// assert_eq!((batches.len(0), batches.batch(0, 2)), (3, vec![4, 5]));
/// assert_eq!(batches.batch(1, 0), [6, 7]);
/// # Ok::<(), overdrive_datasets::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConsecutiveBatches {
    batch_size: usize,
    batches_per_epoch: usize,
}

impl ConsecutiveBatches {
    /// Returns batches of `batch_size` records.
    ///
    /// # Errors
    /// Returns an error if `batch_size` is 0.
    pub fn new(batch_size: usize, batches_per_epoch: usize) -> Result<Self> {
        check_batch_size(batch_size)?;
        Ok(Self {
            batch_size,
            batches_per_epoch,
        })
    }
}

impl BatchSampler for ConsecutiveBatches {
    fn len(&self, _epoch: u64) -> usize {
        self.batches_per_epoch
    }

    fn batch(&self, epoch: u64, number: usize) -> Vec<usize> {
        let epoch = usize::try_from(epoch).unwrap_or(usize::MAX);
        let batch = epoch
            .saturating_mul(self.batches_per_epoch)
            .saturating_add(number);
        let start = batch.saturating_mul(self.batch_size);
        (start..start.saturating_add(self.batch_size)).collect()
    }

    fn joint_batch_size(&self) -> usize {
        self.batch_size
    }
}

pub(crate) fn check_batch_size(batch_size: usize) -> Result<()> {
    Ok(check_positive("batch_size", batch_size)?)
}
