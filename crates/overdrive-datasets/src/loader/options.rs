//! The options of a data loader.

use crate::sampling::{
    LastShare, RandomSampler, SampledBatches, Sampler, SequentialSampler, Shard,
};
use crate::{ErrorPolicy, Result};

/// The options of the threads that prepare the batches of a [`crate::DataLoader`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkerOptions {
    /// The number of threads; see [`DataLoaderOptions::num_workers`]. Default: 0.
    pub num_workers: usize,
    /// The number of batches per worker that are prepared ahead, which bounds the memory. Default: 2.
    pub prefetch_factor: usize,
    /// The handling of records that cannot be read. Default: [`ErrorPolicy::Stop`].
    pub on_error: ErrorPolicy,
}

impl Default for WorkerOptions {
    fn default() -> Self {
        DataLoaderOptions::default().workers()
    }
}

/// The options of a [`crate::DataLoader`], with the names and defaults of PyTorch's `DataLoader` and
/// `DistributedSampler`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DataLoaderOptions {
    /// The number of records of a batch, on this process. Default: 1.
    pub batch_size: usize,
    /// If `true`, each epoch has a random order of its own. Default: `false`.
    pub shuffle: bool,
    /// The seed of the random orders. Default: 0.
    pub seed: u64,
    /// The number of threads that prepare batches; with 0, a batch is made when it is requested. The batches
    /// and their order do not depend on it. Default: 0.
    pub num_workers: usize,
    /// The number of batches per worker that are prepared ahead, which bounds the memory. Default: 2.
    pub prefetch_factor: usize,
    /// If `true`, a last batch with fewer records is dropped. Default: `false`.
    pub drop_last: bool,
    /// The rank of this process among those that train together. Default: 0.
    pub rank: usize,
    /// The number of processes that train together. Default: 1.
    pub world_size: usize,
    /// The handling of records that cannot be read. Default: [`ErrorPolicy::Stop`].
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
    /// Returns the batch sampler of these options for a dataset of `len` records.
    ///
    /// With `drop_last`, the last records that do not give every process one are dropped too; without it, the
    /// first records of the epoch are repeated to fill up.
    ///
    /// # Errors
    /// Returns an error if `batch_size` or `world_size` is 0, or if `rank` is not below `world_size`.
    pub fn batches(&self, len: usize) -> Result<SampledBatches<Box<dyn Sampler>>> {
        let sampler: Box<dyn Sampler> = match self.shuffle {
            true => Box::new(RandomSampler::new(len, self.seed)),
            false => Box::new(SequentialSampler::new(len)),
        };
        SampledBatches::new(sampler, self.batch_size, self.drop_last, self.shard()?)
    }

    /// Returns the options of the threads, for a loader of other batches ([`crate::DataLoader::with`]).
    pub fn workers(&self) -> WorkerOptions {
        WorkerOptions {
            num_workers: self.num_workers,
            prefetch_factor: self.prefetch_factor,
            on_error: self.on_error,
        }
    }

    /// Returns the shard of this process, for custom samplers.
    ///
    /// # Errors
    /// Returns an error if `world_size` is 0, or if `rank` is not below it.
    pub fn shard(&self) -> Result<Shard> {
        let last = match self.drop_last {
            true => LastShare::Drop,
            false => LastShare::Repeat,
        };
        Shard::new(self.rank, self.world_size, last)
    }
}
