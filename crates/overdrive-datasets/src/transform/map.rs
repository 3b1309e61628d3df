//! The map of a function over a dataset, and the concatenation of two datasets.

use crate::{Dataset, Error, Result};

/// A dataset whose records are converted by a function when they are read.
#[derive(Debug, Clone)]
pub struct Map<D, F> {
    dataset: D,
    function: F,
}

impl<D, F> Map<D, F> {
    pub(crate) fn new(dataset: D, function: F) -> Self {
        Self { dataset, function }
    }
}

impl<D, F, T> Dataset for Map<D, F>
where
    D: Dataset,
    F: Fn(D::Item) -> Result<T> + Send + Sync,
{
    type Item = T;

    fn len(&self) -> usize {
        self.dataset.len()
    }

    fn get(&self, index: usize) -> Result<T> {
        (self.function)(self.dataset.get(index)?).map_err(|error| error.of_record(index))
    }

    fn prefetch(&self, indices: &[usize]) {
        self.dataset.prefetch(indices);
    }

    fn check_unchanged(&self) -> Result<()> {
        self.dataset.check_unchanged()
    }
}

/// The concatenation of two datasets.
#[derive(Debug, Clone)]
pub struct Concat<A, B> {
    first: A,
    second: B,
}

impl<A, B> Concat<A, B> {
    pub(crate) fn new(first: A, second: B) -> Self {
        Self { first, second }
    }
}

impl<A: Dataset, B: Dataset<Item = A::Item>> Dataset for Concat<A, B> {
    type Item = A::Item;

    fn len(&self) -> usize {
        // One of the datasets may be endless, with the largest possible length.
        self.first.len().saturating_add(self.second.len())
    }

    fn get(&self, index: usize) -> Result<A::Item> {
        match index.checked_sub(self.first.len()) {
            None => self.first.get(index),
            Some(rest) if rest < self.second.len() => self.second.get(rest),
            Some(_) => Err(Error::NoSuchRecord {
                index,
                len: self.len(),
            }),
        }
    }

    fn prefetch(&self, indices: &[usize]) {
        let first = self.first.len();
        let (before, after): (Vec<usize>, Vec<usize>) =
            indices.iter().partition(|&&index| index < first);
        let after: Vec<usize> = after.iter().map(|index| index - first).collect();
        self.first.prefetch(&before);
        self.second.prefetch(&after);
    }

    fn check_unchanged(&self) -> Result<()> {
        self.first.check_unchanged()?;
        self.second.check_unchanged()
    }
}
