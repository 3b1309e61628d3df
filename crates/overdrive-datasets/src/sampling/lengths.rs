//! The lengths of records, by which samplers group them.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The length of each record, in tokens or another unit of padding, for the samplers that group by length.
#[derive(Clone)]
pub struct Lengths {
    len: usize,
    of: Arc<dyn Fn(usize) -> usize + Send + Sync>,
}

impl Lengths {
    /// Returns the lengths of `len` records by a function. It must be cheap, since samplers call it often, and
    /// deterministic.
    pub fn new(len: usize, of: impl Fn(usize) -> usize + Send + Sync + 'static) -> Self {
        Self {
            len,
            of: Arc::new(of),
        }
    }

    /// Returns the number of records.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns `true` if there is no record.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the length of record `index`.
    pub fn of(&self, index: usize) -> usize {
        (self.of)(index)
    }
}

impl From<Vec<u32>> for Lengths {
    fn from(lengths: Vec<u32>) -> Self {
        Self::new(lengths.len(), move |index| lengths[index] as usize)
    }
}

impl fmt::Debug for Lengths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lengths")
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

/// A cache of the `N` values that were computed last. The workers of a loader are all at about the same position, so
/// they use each other's results; there are several values, since workers may be at both sides of a border between
/// groups or batches.
pub(crate) struct RecentValues<K, V, const N: usize = 4>(Mutex<VecDeque<(K, Arc<V>)>>);

impl<K: PartialEq + Copy, V, const N: usize> RecentValues<K, V, N> {
    /// Returns the value of `key`; `compute` must always compute the same value for it. Two threads that miss
    /// it at the same time both compute it, so that neither blocks the other.
    pub(crate) fn get_or(&self, key: K, compute: impl FnOnce() -> V) -> Arc<V> {
        let Ok(value) = self.try_get_or(key, || Ok::<V, Infallible>(compute()));
        value
    }

    /// Works as [`get_or`](Self::get_or), for a function that may fail; errors are not cached.
    pub(crate) fn try_get_or<E>(
        &self,
        key: K,
        compute: impl FnOnce() -> Result<V, E>,
    ) -> Result<Arc<V>, E> {
        let find = |values: &VecDeque<(K, Arc<V>)>| {
            let found = values.iter().find(|(other, _)| *other == key);
            found.map(|(_, value)| Arc::clone(value))
        };
        if let Some(value) = find(&self.lock()) {
            return Ok(value);
        }
        let value = Arc::new(compute()?);
        let mut values = self.lock();
        if let Some(value) = find(&values) {
            return Ok(value);
        }
        if values.len() == N {
            values.pop_front();
        }
        values.push_back((key, Arc::clone(&value)));
        Ok(value)
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<(K, Arc<V>)>> {
        // The list is valid whenever the lock is released, so a poisoned lock is harmless.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K, V, const N: usize> Default for RecentValues<K, V, N> {
    fn default() -> Self {
        Self(Mutex::new(VecDeque::new()))
    }
}

impl<K, V, const N: usize> fmt::Debug for RecentValues<K, V, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RecentValues")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_that_two_threads_compute_at_once_is_cached_once() {
        let recent = RecentValues::<u8, u8, 2>::default();
        recent.get_or(0, || 10);
        // The other thread computes and inserts the value while this one computes it.
        let value = recent.get_or(1, || {
            recent.get_or(1, || 11);
            12
        });
        assert_eq!(*value, 11);
        assert_eq!(*recent.get_or(0, || 13), 10);
        recent.get_or(2, || 12);
        assert_eq!(*recent.get_or(0, || 13), 13);
    }
}
