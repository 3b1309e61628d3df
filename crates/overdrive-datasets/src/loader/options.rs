//! How a loader works.

use crate::sampling::{
    LastShare, RandomSampler, SampledBatches, Sampler, SequentialSampler, Shard,
};
use crate::{ErrorPolicy, Result};

/// How a loader works: names and defaults of PyTorch's `DataLoader`, and of its `DistributedSampler`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DataLoaderOptions {
    /// Records a batch, on this process. Default: 1.
    pub batch_size: usize,
    /// Whether each epoch has a random order of its own. Default: false.
    pub shuffle: bool,
    /// The seed of that order. Default: 0.
    pub seed: u64,
    /// How many threads prepare batches; with 0, a batch is made when it is asked for. The batches and
    /// their order are the same for any number. Default: 0.
    pub num_workers: usize,
    /// How many batches a worker may be ahead. The workers wait when as many as all of theirs are
    /// ready, so memory is bounded. Default: 2.
    pub prefetch_factor: usize,
    /// Leaves out a last batch of fewer records. Default: false.
    pub drop_last: bool,
    /// This process among those that train together. Default: 0.
    pub rank: usize,
    /// How many processes train together. Default: 1.
    pub world_size: usize,
    /// What becomes of records that cannot be read. Default: stop.
    pub on_error: ErrorPolicy,
}

impl Default for DataLoaderOptions {
    fn default() -> Self {
        Self {
            batch_size: 1,
            shuffle: false,
            seed: 0,
            num_workers: 0,
            prefetch_factor: 2,
            drop_last: false,
            rank: 0,
            world_size: 1,
            on_error: ErrorPolicy::Stop,
        }
    }
}

impl DataLoaderOptions {
    /// The batches that these options say, of a dataset of `len` records.
    ///
    /// With `drop_last`, records that do not fill a round of all processes are left out too; without
    /// it, the round is filled up with the first records of the epoch.
    ///
    /// # Errors
    /// When `batch_size` or `world_size` is 0, or `rank` not below `world_size`.
    pub fn batches(&self, len: usize) -> Result<SampledBatches<Box<dyn Sampler>>> {
        let sampler: Box<dyn Sampler> = match self.shuffle {
            true => Box::new(RandomSampler::new(len, self.seed)),
            false => Box::new(SequentialSampler::new(len)),
        };
        SampledBatches::new(sampler, self.batch_size, self.drop_last, self.shard()?)
    }

    /// The part of this process, for samplers of one's own.
    ///
    /// # Errors
    /// When `world_size` is 0, or `rank` not below it.
    pub fn shard(&self) -> Result<Shard> {
        let last = match self.drop_last {
            true => LastShare::Drop,
            false => LastShare::Repeat,
        };
        Shard::new(self.rank, self.world_size, last)
    }
}
