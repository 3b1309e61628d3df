//! The transforms as methods of datasets.

use super::{
    BatchedIter, BatchedMap, Concat, DatasetIter, Exhausted, Interleave, Map, Selection, Split,
};
use crate::{Dataset, ErrorPolicy, Result};

/// The transforms of any dataset. They are lazy: only [`DatasetExt::filter`] and [`DatasetExt::map_batched`] read
/// records in advance, to find those that are kept and to count the results.
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
    ///
    /// [`crate::Error::other`] converts any error of the function; reading the record then returns it with the
    /// record's index, and [`ErrorPolicy::Skip`] skips the record.
    fn map<T, F: Fn(Self::Item) -> Result<T> + Send + Sync>(self, function: F) -> Map<Self, F> {
        Map::new(self, function)
    }

    /// Applies `function` to batches of `batch_size` records (1,000 is the default of `datasets`); it may return
    /// another number of records. The last batch may be smaller.
    ///
    /// It calls the function once per batch, on all cores, to count the results, and keeps none of them: reading a
    /// result computes its batch again, or takes it from the batches that were read last.
    /// [`crate::MapCache::map_batched`] computes each batch once and keeps the results on disk, and
    /// [`DatasetExt::iter_batched`] reads one pass without counting.
    ///
    /// ```
    /// use overdrive_datasets::{Dataset, DatasetExt, TextLines, TextOptions};
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("lines.txt");
    /// # std::fs::write(&path, "one two\nthree\n\nfour five six\n").unwrap();
    /// let lines = TextLines::open([&path], &TextOptions::default())?;
    /// let split = |lines: Vec<String>| {
    ///     Ok(lines.iter().flat_map(|line| line.split_whitespace().map(str::to_owned)).collect())
    /// };
    /// let words = lines.map_batched(1000, split)?;
    /// assert_eq!((words.len(), words.get(3)?.as_str()), (6, "four"));
    /// # Ok::<(), overdrive_datasets::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::Error::Batch`] with the range of the records if the function fails, and the error of a record that
    /// cannot be read; an error for a `batch_size` of 0.
    fn map_batched<T, F>(self, batch_size: usize, function: F) -> Result<BatchedMap<Self, F, T>>
    where
        T: Clone + Send + Sync,
        F: Fn(Vec<Self::Item>) -> Result<Vec<T>> + Send + Sync,
    {
        BatchedMap::new(self, batch_size, function)
    }

    /// Returns an iterator over the results of `function` for batches of `batch_size` records, in their order. It
    /// reads a batch when its first result is asked for, as `map(batched=True)` of `datasets.IterableDataset`.
    ///
    /// Under [`ErrorPolicy::Skip`] a record that cannot be read is missing in its batch, and a batch for which the
    /// function fails is left out if the error is about a record.
    ///
    /// # Errors
    /// Returns an error for a `batch_size` of 0.
    fn iter_batched<T, F>(
        &self,
        batch_size: usize,
        function: F,
        on_error: ErrorPolicy,
    ) -> Result<BatchedIter<'_, Self, F, T>>
    where
        F: Fn(Vec<Self::Item>) -> Result<Vec<T>>,
    {
        BatchedIter::new(self, batch_size, function, on_error)
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
    /// Returns an error if `count` is 0, or if `index` is not below it.
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
