//! The work of a product on libtorch's threads.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes of weight that a thread takes at a time: enough to be read as a stream, few enough that a
/// thread held up by something else does not hold up the others.
pub(crate) const CHUNK_BYTES: usize = 128 << 10;

/// Work (bytes of weight, for each few rows of activations) that is not worth waking another thread for.
pub(crate) const MIN_PARALLEL_BYTES: usize = 64 << 10;

/// Calls `body` with parts of `0..len` of `chunk` (the last may be shorter), which threads take one
/// after another as they become free. On this thread alone unless `parallel`.
pub(crate) fn chunks(len: usize, chunk: usize, parallel: bool, body: impl Fn(Range<usize>) + Sync) {
    let chunk = chunk.max(1);
    let count = len.div_ceil(chunk);
    let part = |index: usize| body(index * chunk..((index + 1) * chunk).min(len));
    if !parallel || count <= 1 {
        return (0..count).for_each(part);
    }
    let next = AtomicUsize::new(0);
    let threads = overdrive_sys::threads::intra_op().min(count);
    overdrive_sys::threads::parallel_for(threads, 1, |_| {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= count {
                break;
            }
            part(index);
        }
    });
}

/// A matrix `(rows, columns)` that several threads write, each other elements of it.
#[derive(Debug)]
pub(crate) struct Target<'a, T> {
    first: *mut T,
    len: usize,
    columns: usize,
    borrowed: PhantomData<&'a mut [T]>,
}

// SAFETY: it only writes, and whoever gives parts of the work to threads gives each other elements
// (the contract of `set`); nobody reads before all are done, since the slice stays borrowed.
unsafe impl<T: Send> Sync for Target<'_, T> {}

impl<'a, T: Copy> Target<'a, T> {
    pub(crate) fn new(elements: &'a mut [T], columns: usize) -> Self {
        Target {
            first: elements.as_mut_ptr(),
            len: elements.len(),
            columns,
            borrowed: PhantomData,
        }
    }

    /// Writes one element. Threads must not write the same one at once: a product gives each its own
    /// columns.
    #[inline(always)]
    pub(crate) fn set(&self, row: usize, column: usize, value: T) {
        let at = row * self.columns + column;
        assert!(
            column < self.columns && at < self.len,
            "a row and column of the result"
        );
        // SAFETY: inside the slice that `new` borrowed for writing; see `Sync` for other threads.
        unsafe { self.first.add(at).write(value) };
    }

    /// Writes neighbours in one row, as [`set`](Self::set).
    #[inline(always)]
    pub(crate) fn set_all(&self, row: usize, column: usize, values: &[T]) {
        let at = row * self.columns + column;
        assert!(
            column + values.len() <= self.columns && at + values.len() <= self.len,
            "a row and columns of the result"
        );
        // SAFETY: as in `set`.
        unsafe {
            self.first
                .add(at)
                .copy_from_nonoverlapping(values.as_ptr(), values.len());
        }
    }
}
