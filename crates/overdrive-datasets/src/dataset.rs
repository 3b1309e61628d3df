//! Datasets with random access to their records.

use std::sync::Arc;

use crate::{Error, Result};

/// A collection of records with random access, each read on demand: PyTorch's map-style `Dataset`, with errors
/// as values.
///
/// `get` is a pure function: the same index gives the same record, from any thread and in any order. So
/// samplers, workers and processes share a dataset without communication.
pub trait Dataset: Send + Sync {
    /// The type of a record.
    type Item;

    /// Returns the number of records.
    fn len(&self) -> usize;

    /// Returns `true` if there is no record.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reads record `index`.
    ///
    /// # Errors
    /// Returns an error if `index` is not below [`Dataset::len`], or if the record cannot be read.
    fn get(&self, index: usize) -> Result<Self::Item>;

    /// Announces that the records at `indices` will be read soon, each by a [`get`](Dataset::get): those of files on a
    /// server are then requested together. A [`DataLoader`](crate::DataLoader) announces each batch. By default it does
    /// nothing; a dataset over another one passes the call on. It returns at once, and an error is left to `get`.
    fn prefetch(&self, indices: &[usize]) {
        let _ = indices;
    }

    /// Checks that the files behind the records have not changed since they were opened. What stores results of the
    /// records, such as [`build_dataset_tokens`](crate::build_dataset_tokens) and [`MapCache`](crate::MapCache), calls
    /// it after the last one. By default it returns `Ok(())`, for records that come from no file; a dataset over
    /// another one passes the call on.
    ///
    /// # Errors
    /// [`Error::FileChanged`], or another error if a file is not there any more.
    fn check_unchanged(&self) -> Result<()> {
        Ok(())
    }
}

impl<D: Dataset + ?Sized> Dataset for &D {
    type Item = D::Item;

    fn len(&self) -> usize {
        (**self).len()
    }

    fn get(&self, index: usize) -> Result<Self::Item> {
        (**self).get(index)
    }

    fn prefetch(&self, indices: &[usize]) {
        (**self).prefetch(indices);
    }

    fn check_unchanged(&self) -> Result<()> {
        (**self).check_unchanged()
    }
}

/// Records in memory.
///
/// ```
/// use overdrive_datasets::{Dataset, InMemory};
///
/// let numbers = InMemory(vec![3, 1, 4]);
/// assert_eq!((numbers.len(), numbers.get(2)?), (3, 4));
/// # Ok::<(), overdrive_datasets::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InMemory<T>(pub Vec<T>);

impl<T: Clone + Send + Sync> Dataset for InMemory<T> {
    type Item = T;

    fn len(&self) -> usize {
        self.0.len()
    }

    fn get(&self, index: usize) -> Result<T> {
        let len = self.0.len();
        let record = self.0.get(index).cloned();
        record.ok_or(Error::NoSuchRecord { index, len })
    }
}

impl<D: Dataset + ?Sized> Dataset for Arc<D> {
    type Item = D::Item;

    fn len(&self) -> usize {
        (**self).len()
    }

    fn get(&self, index: usize) -> Result<Self::Item> {
        (**self).get(index)
    }

    fn prefetch(&self, indices: &[usize]) {
        (**self).prefetch(indices);
    }

    fn check_unchanged(&self) -> Result<()> {
        (**self).check_unchanged()
    }
}

impl<D: Dataset + ?Sized> Dataset for Box<D> {
    type Item = D::Item;

    fn len(&self) -> usize {
        (**self).len()
    }

    fn get(&self, index: usize) -> Result<Self::Item> {
        (**self).get(index)
    }

    fn prefetch(&self, indices: &[usize]) {
        (**self).prefetch(indices);
    }

    fn check_unchanged(&self) -> Result<()> {
        (**self).check_unchanged()
    }
}
