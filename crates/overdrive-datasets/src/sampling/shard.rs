//! The part of one process among those that train together.

use crate::{Error, Result};

/// What becomes of the records, or batches, behind the last full round of all processes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LastShare {
    /// The round is filled up with the first ones of the epoch, so that every process has as many
    /// and all are read: `DistributedSampler`'s default.
    #[default]
    Repeat,
    /// They are left out.
    Drop,
    /// The first processes take them, and have one more than the others: for evaluations, where every
    /// record counts once and nobody waits for the others at each of them.
    Uneven,
}

/// The part of one process: of each `world_size` things in a row it takes number `rank`. All
/// processes get equally many, unless [`LastShare::Uneven`] says otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    rank: usize,
    world_size: usize,
    last: LastShare,
}

impl Default for Shard {
    /// Everything.
    fn default() -> Self {
        Self {
            rank: 0,
            world_size: 1,
            last: LastShare::Repeat,
        }
    }
}

impl Shard {
    /// The part of process `rank` of `world_size`.
    ///
    /// # Errors
    /// When `world_size` is 0, or `rank` not below it.
    pub fn new(rank: usize, world_size: usize, last: LastShare) -> Result<Self> {
        if rank >= world_size {
            return Err(Error::InvalidOption {
                option: "rank",
                value: format!("{rank} of world_size {world_size}"),
                expected: "ranks count from 0 and are below world_size",
            });
        }
        Ok(Self {
            rank,
            world_size,
            last,
        })
    }

    /// How many of `len` things it takes.
    pub fn len(&self, len: usize) -> usize {
        match self.last {
            LastShare::Repeat => len.div_ceil(self.world_size),
            LastShare::Drop => len / self.world_size,
            LastShare::Uneven => (len + self.world_size - 1 - self.rank) / self.world_size,
        }
    }

    /// Which of `len` things its number `place` is. `len` must not be 0.
    pub fn global(&self, place: usize, len: usize) -> usize {
        (place * self.world_size + self.rank) % len.max(1)
    }
}
