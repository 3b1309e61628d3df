//! Orders of records.

use super::Permutation;
use overdrive_core::random::uniform_below;

/// In which order the records of a dataset are read.
///
/// It is PyTorch's `Sampler` as a function: which record comes at a place does not depend on what was
/// read before.
pub trait Sampler: Send + Sync {
    /// How many records an epoch has.
    fn len(&self) -> usize;

    /// Whether an epoch has none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The record at `place` (below [`Sampler::len`]) of an epoch.
    fn index(&self, epoch: u64, place: usize) -> usize;
}

impl<S: Sampler + ?Sized> Sampler for Box<S> {
    fn len(&self) -> usize {
        (**self).len()
    }

    fn index(&self, epoch: u64, place: usize) -> usize {
        (**self).index(epoch, place)
    }
}

impl<S: Sampler + ?Sized> Sampler for &S {
    fn len(&self) -> usize {
        (**self).len()
    }

    fn index(&self, epoch: u64, place: usize) -> usize {
        (**self).index(epoch, place)
    }
}

/// The records in their order, in every epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequentialSampler {
    len: usize,
}

impl SequentialSampler {
    /// Of a dataset of `len` records.
    pub fn new(len: usize) -> Self {
        Self { len }
    }
}

impl Sampler for SequentialSampler {
    fn len(&self) -> usize {
        self.len
    }

    fn index(&self, _epoch: u64, place: usize) -> usize {
        place
    }
}

/// The records in a random order, another one in each epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RandomSampler {
    len: usize,
    seed: u64,
    /// How many records an epoch draws with replacement; `None`: each record once.
    draws: Option<usize>,
}

impl RandomSampler {
    /// Each record of a dataset of `len` once an epoch.
    pub fn new(len: usize, seed: u64) -> Self {
        Self {
            len,
            seed,
            draws: None,
        }
    }

    /// `draws` records an epoch, each drawn out of all `len`.
    pub fn with_replacement(len: usize, seed: u64, draws: usize) -> Self {
        Self {
            len,
            seed,
            draws: Some(draws),
        }
    }

    /// The order of an epoch.
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

    fn index(&self, epoch: u64, place: usize) -> usize {
        const STREAM: u32 = 0x4452_4157;
        match self.draws {
            None => self.permutation(epoch).apply(place),
            Some(draws) => {
                let number = epoch.wrapping_mul(draws as u64).wrapping_add(place as u64);
                uniform_below(self.len as u64, self.seed, STREAM, number) as usize
            }
        }
    }
}
