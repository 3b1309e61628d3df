//! Random access to records.

use std::sync::Arc;

use crate::Result;

/// Records that are read when they are asked for.
///
/// `get` is pure: the same index gives the same record, from any thread, in any order. That is what
/// lets samplers, workers and processes share a dataset without talking to one another. It is
/// PyTorch's map-style `Dataset`, with errors as values.
pub trait Dataset: Send + Sync {
    /// What a record is.
    type Item;

    /// The number of records.
    fn len(&self) -> usize;

    /// Whether there is no record.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Record `index`.
    ///
    /// # Errors
    /// When `index` is not below [`Dataset::len`], and when the record cannot be read.
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
