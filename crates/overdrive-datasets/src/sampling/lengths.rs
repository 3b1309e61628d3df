//! How long the records are.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How long each record is, in tokens or whatever else makes padding: what the samplers that group
/// by length go by.
#[derive(Clone)]
pub struct Lengths {
    len: usize,
    of: Arc<dyn Fn(usize) -> usize + Send + Sync>,
}

impl Lengths {
    /// Of `len` records, by a function that must be cheap, since samplers ask again and again, and
    /// must always give the same.
    pub fn new(len: usize, of: impl Fn(usize) -> usize + Send + Sync + 'static) -> Self {
        Self {
            len,
            of: Arc::new(of),
        }
    }

    /// The number of records.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no record.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The length of record `index`.
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

/// Remembers the last few values that were computed: the workers of a loader are all about at one
/// place, and what one of them sorted serves the others.
pub(crate) struct LastFew<K, V>(Mutex<VecDeque<(K, Arc<V>)>>);

impl<K: PartialEq + Copy, V> LastFew<K, V> {
    const KEPT: usize = 4;

    /// The value of `key`, which `compute` always computes alike. Two threads that miss it at once
    /// both compute it: neither holds the other up.
    pub(crate) fn get_or(&self, key: K, compute: impl FnOnce() -> V) -> Arc<V> {
        let find = |values: &VecDeque<(K, Arc<V>)>| {
            let found = values.iter().find(|(other, _)| *other == key);
            found.map(|(_, value)| Arc::clone(value))
        };
        if let Some(value) = find(&self.lock()) {
            return value;
        }
        let value = Arc::new(compute());
        let mut values = self.lock();
        if let Some(value) = find(&values) {
            return value;
        }
        if values.len() == Self::KEPT {
            values.pop_front();
        }
        values.push_back((key, Arc::clone(&value)));
        value
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<(K, Arc<V>)>> {
        // The list is whole whenever the lock is given back.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K, V> Default for LastFew<K, V> {
    fn default() -> Self {
        Self(Mutex::new(VecDeque::new()))
    }
}

impl<K, V> fmt::Debug for LastFew<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LastFew")
    }
}
