//! Datasets with random access to their records.

use std::sync::Arc;

use crate::Result;

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
}

impl<D: Dataset + ?Sized> Dataset for &D {
    type Item = D::Item;

    fn len(&self) -> usize {
        (**self).len()
    }

    fn get(&self, index: usize) -> Result<Self::Item> {
        (**self).get(index)
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
}

impl<D: Dataset + ?Sized> Dataset for Box<D> {
    type Item = D::Item;

    fn len(&self) -> usize {
        (**self).len()
    }

    fn get(&self, index: usize) -> Result<Self::Item> {
        (**self).get(index)
    }
}
