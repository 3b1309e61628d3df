//! The map of a function over batches of records.

use std::collections::BTreeSet;
use std::ops::Range;

use rayon::prelude::*;

use overdrive_core::check_at_least;

use crate::sampling::RecentValues;
use crate::{Dataset, Error, ErrorLog, ErrorPolicy, Result};

/// A function over batches of the records of a dataset.
#[derive(Debug, Clone)]
pub(super) struct Batches<D, F> {
    dataset: D,
    batch_size: usize,
    function: F,
}

impl<D, F, T> Batches<D, F>
where
    D: Dataset,
    F: Fn(Vec<D::Item>) -> Result<Vec<T>>,
{
    pub(super) fn new(dataset: D, batch_size: usize, function: F) -> Result<Self> {
        check_at_least("batch_size", batch_size, 1)?;
        Ok(Self {
            dataset,
            batch_size,
            function,
        })
    }

    pub(super) fn dataset(&self) -> &D {
        &self.dataset
    }

    /// Returns the number of batches.
    pub(super) fn len(&self) -> usize {
        self.dataset.len().div_ceil(self.batch_size)
    }

    /// Returns the records of a batch.
    fn range(&self, batch: usize) -> Range<usize> {
        let start = batch * self.batch_size;
        start
            ..self
                .dataset
                .len()
                .min(start.saturating_add(self.batch_size))
    }

    /// Applies the function to a batch. An error of the function names the records of the batch; if a record
    /// cannot be read, the error names that record.
    pub(super) fn results(&self, batch: usize) -> Result<Vec<T>> {
        self.announce(batch);
        let records = self.range(batch).map(|index| self.dataset.get(index));
        self.apply(batch, records.collect::<Result<_>>()?)
    }

    /// Announces the records of a batch, so that those of files on a server are requested together.
    fn announce(&self, batch: usize) {
        self.dataset
            .prefetch(&self.range(batch).collect::<Vec<_>>());
    }

    fn apply(&self, batch: usize, records: Vec<D::Item>) -> Result<Vec<T>> {
        (self.function)(records).map_err(|source| {
            let Range { start, end } = self.range(batch);
            Error::Batch {
                start,
                end,
                source: Box::new(source),
            }
        })
    }
}

/// A dataset whose records are made by a function over batches of another dataset's records:
/// `datasets.Dataset.map(batched=True)`. The function may return any number of records for a batch.
///
/// It holds eight bytes per batch and the results of the batches that were read last, so reading in order calls the
/// function once per batch. The function must return the same results for the same records.
#[derive(Debug)]
pub struct BatchedMap<D, F, T> {
    batches: Batches<D, F>,
    /// The number of results up to and including each batch.
    ends: Vec<usize>,
    recent: RecentValues<usize, Vec<T>>,
}

impl<D, F, T> BatchedMap<D, F, T>
where
    D: Dataset,
    F: Fn(Vec<D::Item>) -> Result<Vec<T>> + Send + Sync,
    T: Clone + Send + Sync,
{
    /// Counts the results of each batch, on all cores.
    pub(crate) fn new(dataset: D, batch_size: usize, function: F) -> Result<Self> {
        let batches = Batches::new(dataset, batch_size, function)?;
        let counts = (0..batches.len()).into_par_iter();
        // `collect` into a Result may return the error of any batch; the first one is wanted.
        let counts: Vec<Result<usize>> = counts
            .map(|batch| batches.results(batch).map(|results| results.len()))
            .collect();
        let mut ends = Vec::with_capacity(counts.len());
        let mut end = 0;
        for count in counts {
            end += count?;
            ends.push(end);
        }
        Ok(Self {
            batches,
            ends,
            recent: RecentValues::default(),
        })
    }
}

impl<D, F, T> Dataset for BatchedMap<D, F, T>
where
    D: Dataset,
    F: Fn(Vec<D::Item>) -> Result<Vec<T>> + Send + Sync,
    T: Clone + Send + Sync,
{
    type Item = T;

    fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    fn get(&self, index: usize) -> Result<T> {
        let no_such = || Error::NoSuchRecord {
            index,
            len: self.len(),
        };
        if index >= self.len() {
            return Err(no_such());
        }
        let batch = self.ends.partition_point(|&end| end <= index);
        let start = batch.checked_sub(1).map_or(0, |before| self.ends[before]);
        let results = self
            .recent
            .try_get_or(batch, || self.batches.results(batch))?;
        let expected = self.ends[batch] - start;
        if results.len() != expected {
            let Range { start, end } = self.batches.range(batch);
            return Err(Error::BatchChanged {
                start,
                end,
                expected,
                got: results.len(),
            });
        }
        results.get(index - start).cloned().ok_or_else(no_such)
    }

    fn prefetch(&self, indices: &[usize]) {
        let results = indices.iter().filter(|&&index| index < self.len());
        let batches: BTreeSet<usize> = results
            .map(|&index| self.ends.partition_point(|&end| end <= index))
            .collect();
        let records = batches
            .into_iter()
            .flat_map(|batch| self.batches.range(batch));
        self.batches
            .dataset()
            .prefetch(&records.collect::<Vec<_>>());
    }

    fn check_unchanged(&self) -> Result<()> {
        self.batches.dataset().check_unchanged()
    }
}

/// An iterator over the results of a function over batches of records: one pass, with one batch in memory.
#[derive(Debug)]
pub struct BatchedIter<'a, D, F, T> {
    batches: Batches<&'a D, F>,
    /// The next batch.
    next: usize,
    results: std::vec::IntoIter<T>,
    on_error: ErrorPolicy,
    log: ErrorLog,
    ended: bool,
}

impl<'a, D, F, T> BatchedIter<'a, D, F, T>
where
    D: Dataset,
    F: Fn(Vec<D::Item>) -> Result<Vec<T>>,
{
    pub(crate) fn new(
        dataset: &'a D,
        batch_size: usize,
        function: F,
        on_error: ErrorPolicy,
    ) -> Result<Self> {
        Ok(Self {
            batches: Batches::new(dataset, batch_size, function)?,
            next: 0,
            results: Vec::new().into_iter(),
            on_error,
            log: ErrorLog::default(),
            ended: false,
        })
    }

    /// Returns the log of the records and batches that were skipped or replaced.
    pub fn errors(&self) -> &ErrorLog {
        &self.log
    }

    fn results(&self, batch: usize) -> Result<Vec<T>> {
        self.batches.announce(batch);
        let mut records = Vec::with_capacity(self.batches.range(batch).len());
        for index in self.batches.range(batch) {
            let read = self.on_error.get(self.batches.dataset, index, &self.log)?;
            records.extend(read);
        }
        match self.batches.apply(batch, records) {
            // No other batch can replace this one, so `Replace` leaves it out as `Skip` does.
            Err(error) if self.on_error != ErrorPolicy::Stop && error.is_about_record() => {
                self.log.add(&error);
                Ok(Vec::new())
            }
            results => results,
        }
    }
}

impl<D, F, T> Iterator for BatchedIter<'_, D, F, T>
where
    D: Dataset,
    F: Fn(Vec<D::Item>) -> Result<Vec<T>>,
{
    type Item = Result<T>;

    /// Returns the next result. The iterator ends after an error that the policy returns.
    fn next(&mut self) -> Option<Result<T>> {
        loop {
            if let Some(result) = self.results.next() {
                return Some(Ok(result));
            }
            if self.ended || self.next >= self.batches.len() {
                return None;
            }
            let batch = self.next;
            self.next += 1;
            match self.results(batch) {
                Ok(results) => self.results = results.into_iter(),
                Err(error) => {
                    self.ended = true;
                    return Some(Err(error));
                }
            }
        }
    }
}
