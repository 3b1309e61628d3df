//! Samplers: the order of records.

use super::Permutation;
use overdrive_core::random::uniform_below;

/// The order in which the records of a dataset are read.
///
/// It is PyTorch's `Sampler` as a pure function: the record at a position does not depend on what was read before.
pub trait Sampler: Send + Sync {
    /// Returns the number of records of an epoch.
    fn len(&self) -> usize;

    /// Returns `true` if an epoch has no records.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the record at `position` (below [`Sampler::len`]) of an epoch.
    fn index(&self, epoch: u64, position: usize) -> usize;
}

impl<S: Sampler + ?Sized> Sampler for Box<S> {
    fn len(&self) -> usize {
        (**self).len()
    }

    fn index(&self, epoch: u64, position: usize) -> usize {
        (**self).index(epoch, position)
    }
}

impl<S: Sampler + ?Sized> Sampler for &S {
    fn len(&self) -> usize {
        (**self).len()
    }

    fn index(&self, epoch: u64, position: usize) -> usize {
        (**self).index(epoch, position)
    }
}

/// The records in their original order, in every epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequentialSampler {
    len: usize,
}

impl SequentialSampler {
    /// Returns a sampler for a dataset of `len` records.
    pub fn new(len: usize) -> Self {
        Self { len }
    }
}

impl Sampler for SequentialSampler {
    fn len(&self) -> usize {
        self.len
    }

    fn index(&self, _epoch: u64, position: usize) -> usize {
        position
    }
}

/// The records in a random order, which differs between epochs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RandomSampler {
    len: usize,
    seed: u64,
    /// The number of records that an epoch draws with replacement; `None` if it takes each record once.
    draws: Option<usize>,
}

impl RandomSampler {
    /// Returns a sampler that takes each record of a dataset of `len` once per epoch.
    pub fn new(len: usize, seed: u64) -> Self {
        Self {
            len,
            seed,
            draws: None,
        }
    }

    /// Returns a sampler that draws `draws` records per epoch out of all `len`, with replacement.
    pub fn with_replacement(len: usize, seed: u64, draws: usize) -> Self {
        Self {
            len,
            seed,
            draws: Some(draws),
        }
    }

    /// Returns the permutation of an epoch.
    pub fn permutation(&self, epoch: u64) -> Permutation {
        Permutation::new(self.len, self.seed, epoch)
    }
}

impl Sampler for RandomSampler {
    fn len(&self) -> usize {
        match self.draws {
            Some(_) if self.len == 0 => 0,
            Some(draws) => draws,
            None => self.len,
        }
    }

    fn index(&self, epoch: u64, position: usize) -> usize {
        // Draws use another stream than permutations, so that one seed serves both.
        const STREAM: u32 = 0x4452_4157;
        match self.draws {
            None => self.permutation(epoch).apply(position),
            Some(draws) => {
                let number = epoch
                    .wrapping_mul(draws as u64)
                    .wrapping_add(position as u64);
                uniform_below(self.len as u64, self.seed, STREAM, number) as usize
            }
        }
    }
}
