//! The transforms as methods of datasets.

use super::{Concat, DatasetIter, Exhausted, Interleave, Map, Selection, Split};
use crate::{Dataset, ErrorPolicy, Result};

/// The transforms of any dataset. They are lazy: only [`DatasetExt::filter`] reads records in advance, to find those
/// that it keeps.
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
    /// Applies `function` to each record whenever it is read. [`crate::MapCache`] caches the results of expensive
    /// functions.
    fn map<T, F: Fn(Self::Item) -> Result<T> + Send + Sync>(self, function: F) -> Map<Self, F> {
        Map::new(self, function)
    }

    /// Keeps the records for which `keep` returns `true`. It reads all records once, on all cores; a kept record
    /// takes at most two bytes of memory.
    ///
    /// # Errors
    /// Returns an error if a record cannot be read.
    fn filter<F: Fn(&Self::Item) -> bool + Send + Sync>(self, keep: F) -> Result<Selection<Self>>
    where
        Self::Item: Send,
    {
        Selection::filter(self, keep)
    }

    /// Concatenates this dataset and another one.
    fn concat<D: Dataset<Item = Self::Item>>(self, other: D) -> Concat<Self, D> {
        Concat::new(self, other)
    }

    /// Keeps the first `count` records, or all of them if there are fewer.
    fn take(self, count: usize) -> Selection<Self> {
        let end = count.min(self.len());
        Selection::range(self, 0..end)
    }

    /// Keeps all but the first `count` records.
    fn skip(self, count: usize) -> Selection<Self> {
        let end = self.len();
        Selection::range(self, count.min(end)..end)
    }

    /// Keeps shard `index` of `count`: every `count`-th record from `index` on, as in `datasets`. The shards have
    /// each record once, and their lengths differ by at most one.
    ///
    /// # Errors
    /// Returns an error if `index` is not below `count`.
    fn shard(self, index: usize, count: usize) -> Result<Selection<Self>> {
        Selection::shard(self, index, count)
    }

    /// Splits the records at random into a training and a test selection; the test selection has `test_share` of
    /// the records, rounded. The split depends only on the seed and the number of records.
    ///
    /// # Errors
    /// Returns an error if `test_share` is not between 0 and 1.
    fn split(self, test_share: f64, seed: u64) -> Result<Split<Self>>
    where
        Self: Clone,
    {
        Selection::split(self, test_share, seed)
    }

    /// Shuffles the records under `seed`, without a list of them.
    fn shuffle(self, seed: u64) -> Selection<Self> {
        Selection::shuffle(self, seed)
    }

    /// Mixes the records of this dataset and of `others` by weights; see [`Interleave`].
    ///
    /// # Errors
    /// Those of [`Interleave::new`].
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

    /// Returns an iterator over all records in their order, with an error policy.
    fn iter(&self, on_error: ErrorPolicy) -> DatasetIter<'_, Self> {
        DatasetIter::new(self, on_error)
    }
}

impl<D: Dataset> DatasetExt for D {}
