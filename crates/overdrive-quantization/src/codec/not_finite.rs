//! The first number that cannot be quantized.

use std::sync::atomic::{AtomicUsize, Ordering};

/// The index of the first number that is infinite or NaN.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NotFinite {
    pub(crate) index: usize,
}

/// The first of the bad numbers that several threads find.
#[derive(Debug)]
pub(crate) struct FirstNotFinite(AtomicUsize);

impl FirstNotFinite {
    pub(crate) fn none() -> Self {
        FirstNotFinite(AtomicUsize::new(usize::MAX))
    }

    /// Records a bad number.
    pub(crate) fn record(&self, index: usize) {
        self.0.fetch_min(index, Ordering::Relaxed);
    }

    /// Returns the first bad number as an error.
    pub(crate) fn into_result(self) -> Result<(), NotFinite> {
        match self.0.into_inner() {
            usize::MAX => Ok(()),
            index => Err(NotFinite { index }),
        }
    }
}
