//! The share of one process among those that train together.

use crate::Result;
use overdrive_core::{check_at_least, check_option};

/// The handling of the last records, or batches, that do not give every process one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LastShare {
    /// The first ones of the epoch are repeated, so that all processes have the same number and all records are
    /// read: the default, as in `DistributedSampler`.
    #[default]
    Repeat,
    /// They are dropped.
    Drop,
    /// The first processes take them, and have one more than the others. It suits evaluations, in which every
    /// record must count once and processes do not synchronize at each batch.
    Uneven,
}

/// The share of one process: of `world_size` consecutive items it takes number `rank`. All processes have the same
/// number, except with [`LastShare::Uneven`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    rank: usize,
    world_size: usize,
    last: LastShare,
}

impl Default for Shard {
    /// Returns the share of a single process, which has all items.
    fn default() -> Self {
        Self {
            rank: 0,
            world_size: 1,
            last: LastShare::Repeat,
        }
    }
}

impl Shard {
    /// Returns the share of process `rank` of `world_size`.
    ///
    /// # Errors
    /// Returns an error if `world_size` is 0, or if `rank` is not below it.
    pub fn new(rank: usize, world_size: usize, last: LastShare) -> Result<Self> {
        check_at_least("world_size", world_size, 1)?;
        let expected = format!("below `world_size`, {world_size}");
        check_option(rank < world_size, "rank", rank, expected)?;
        Ok(Self {
            rank,
            world_size,
            last,
        })
    }

    /// Returns the number of items of the share, out of `len`.
    pub fn len(&self, len: usize) -> usize {
        match self.last {
            LastShare::Repeat => len.div_ceil(self.world_size),
            LastShare::Drop => len / self.world_size,
            LastShare::Uneven => len.saturating_sub(self.rank).div_ceil(self.world_size),
        }
    }

    /// Returns the number of items of all processes when each has `items` of them.
    pub(crate) fn joint(&self, items: usize) -> usize {
        items.saturating_mul(self.world_size)
    }

    /// Returns the index among all `len` items of the share's item `position`. `len` must not be 0.
    pub fn global(&self, position: usize, len: usize) -> usize {
        // With `Repeat` the last round may pass the end, and starts again from the first items.
        (position * self.world_size + self.rank) % len.max(1)
    }
}
