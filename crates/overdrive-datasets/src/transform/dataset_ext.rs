//! The transforms as methods.

use super::{Concat, DatasetIter, Exhausted, Interleave, Map, Selection, Split};
use crate::{Dataset, ErrorPolicy, Result};

/// What can be made of any dataset. Nothing here reads a record before it is asked for, but
/// [`DatasetExt::filter`], which must know which ones there are.
///
/// ```
/// use overdrive_datasets::{Dataset, DatasetExt, TextLines, TextOptions};
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("lines.txt");
/// # std::fs::write(&path, (0..10).map(|i| format!("{i}\n")).collect::<String>()).unwrap();
/// let lines = TextLines::open([&path], &TextOptions::default())?;
/// let numbers = lines.map(|line| Ok(line.parse::<u32>().unwrap_or(0)));
/// let even = numbers.filter(|number| number % 2 == 0)?;
/// assert_eq!(even.len(), 5);
/// assert_eq!(even.skip(3).get(0)?, 6);
/// # Ok::<(), overdrive_datasets::Error>(())
/// ```
pub trait DatasetExt: Dataset + Sized {
    /// Records changed by `function` whenever they are read. [`crate::MapCache`] keeps what is
    /// expensive to compute.
    fn map<T, F: Fn(Self::Item) -> Result<T> + Send + Sync>(self, function: F) -> Map<Self, F> {
        Map::new(self, function)
    }

    /// The records for which `keep` says `true`. All records are read once, now, on all cores; which
    /// ones stay is kept in at most two bytes each.
    ///
    /// # Errors
    /// When a record cannot be read.
    fn filter<F: Fn(&Self::Item) -> bool + Send + Sync>(self, keep: F) -> Result<Selection<Self>>
    where
        Self::Item: Send,
    {
        Selection::filter(self, keep)
    }

    /// This dataset, and another one behind it.
    fn concat<D: Dataset<Item = Self::Item>>(self, other: D) -> Concat<Self, D> {
        Concat::new(self, other)
    }

    /// The first `count` records, or all of them if there are fewer.
    fn take(self, count: usize) -> Selection<Self> {
        let end = count.min(self.len());
        Selection::range(self, 0..end)
    }

    /// All but the first `count` records.
    fn skip(self, count: usize) -> Selection<Self> {
        let end = self.len();
        Selection::range(self, count.min(end)..end)
    }

    /// Part `index` of `count`: every `count`-th record from `index` on, as `datasets` does it. The
    /// parts hold each record once, and differ by at most one in length.
    ///
    /// # Errors
    /// When `index` is not below `count`.
    fn shard(self, index: usize, count: usize) -> Result<Selection<Self>> {
        Selection::shard(self, index, count)
    }

    /// Two parts, drawn at random under `seed`: the second has `test_share` of the records, rounded.
    /// Which record is in which part depends on nothing but the seed and the number of records.
    ///
    /// # Errors
    /// When `test_share` is not between 0 and 1.
    fn split(self, test_share: f64, seed: u64) -> Result<Split<Self>>
    where
        Self: Clone,
    {
        Selection::split(self, test_share, seed)
    }

    /// The records in a random order under `seed`; no list of them is kept.
    fn shuffle(self, seed: u64) -> Selection<Self> {
        Selection::shuffle(self, seed)
    }

    /// Records of this dataset and of `others`, drawn with these weights: see [`Interleave`].
    ///
    /// # Errors
    /// As [`Interleave::new`].
    fn interleave(
        self,
        others: impl IntoIterator<Item = Self>,
        weights: &[f64],
        seed: u64,
        until: Exhausted,
    ) -> Result<Interleave<Self>> {
        let datasets = std::iter::once(self).chain(others).collect();
        Interleave::new(datasets, weights, seed, until)
    }

    /// All records in their order, with an error policy.
    fn iter(&self, on_error: ErrorPolicy) -> DatasetIter<'_, Self> {
        DatasetIter::new(self, on_error)
    }
}

impl<D: Dataset> DatasetExt for D {}
