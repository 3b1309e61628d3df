//! Slices and matrices that several threads write, each its own elements.
#![allow(unsafe_code, reason = "threads that write disjoint parts")]

use std::marker::PhantomData;
use std::ops::Range;

/// A slice that threads write in disjoint ranges that cannot be obtained by splitting it, such as rows of several
/// strided dimensions. For chunks, use [`parallel_chunks_mut`](crate::threads::parallel_chunks_mut).
#[derive(Debug)]
pub struct SharedSlice<'a, T> {
    pointer: *mut T,
    len: usize,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: it only hands out ranges, and callers guarantee that they are disjoint.
unsafe impl<T: Send> Sync for SharedSlice<'_, T> {}
// SAFETY: as for `&mut [T]`.
unsafe impl<T: Send> Send for SharedSlice<'_, T> {}

impl<'a, T> SharedSlice<'a, T> {
    /// Borrows `slice` for as long as ranges of it are written.
    pub fn new(slice: &'a mut [T]) -> Self {
        SharedSlice {
            pointer: slice.as_mut_ptr(),
            len: slice.len(),
            lifetime: PhantomData,
        }
    }

    /// Returns the elements of `range` for reading.
    ///
    /// # Panics
    /// If the slice is shorter.
    ///
    /// # Safety
    /// No range for writing that overlaps this one is alive.
    pub unsafe fn range(&self, range: Range<usize>) -> &[T]
    where
        T: Sync,
    {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: in bounds; the caller guarantees that nobody writes.
        unsafe { std::slice::from_raw_parts(self.pointer.add(range.start), range.len()) }
    }

    /// Returns the elements of `range` for writing.
    ///
    /// # Panics
    /// If the slice is shorter.
    ///
    /// # Safety
    /// No other range that overlaps this one is alive.
    #[allow(
        clippy::mut_from_ref,
        reason = "the caller guarantees that ranges are disjoint"
    )]
    pub unsafe fn range_mut(&self, range: Range<usize>) -> &mut [T] {
        // Checks each range, which costs little compared to its elements; the caller only ensures disjointness.
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: in bounds; the caller guarantees disjointness.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.add(range.start), range.len()) }
    }
}

/// Some columns of a row-major matrix, which one thread writes while other threads write other columns
/// ([`parallel_columns`](crate::threads::parallel_columns)).
#[derive(Debug)]
pub struct ColumnsMut<'a, T> {
    pointer: *mut T,
    rows: usize,
    width: usize,
    columns: Range<usize>,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: `ColumnsMut` of the same matrix have other columns (`part`), and it writes no others.
unsafe impl<T: Send> Send for ColumnsMut<'_, T> {}
// SAFETY: a shared one only reads its sizes.
unsafe impl<T: Send> Sync for ColumnsMut<'_, T> {}

impl<'a, T: Copy> ColumnsMut<'a, T> {
    /// Returns all columns of `matrix (…, width)`.
    pub fn new(matrix: &'a mut [T], width: usize) -> Self {
        ColumnsMut {
            pointer: matrix.as_mut_ptr(),
            rows: matrix.len() / width.max(1),
            width,
            columns: 0..width,
            lifetime: PhantomData,
        }
    }

    /// Returns the part of these columns that is in `columns`.
    ///
    /// # Safety
    /// Nothing is written through `self` while the result lives, nor through another part that overlaps it.
    pub(crate) unsafe fn part(&self, columns: Range<usize>) -> ColumnsMut<'_, T> {
        let (from, to) = (self.columns.start, self.columns.end);
        ColumnsMut {
            columns: columns.start.clamp(from, to)..columns.end.clamp(from, to),
            ..*self
        }
    }

    /// Splits the columns at `column`, an index in the matrix, into those before it and the others.
    pub fn split_at(self, column: usize) -> (Self, Self) {
        let middle = column.clamp(self.columns.start, self.columns.end);
        let columns = [self.columns.start..middle, middle..self.columns.end];
        // Both have the lifetime of `self`, which is consumed, and no common column.
        let [before, after] = columns.map(|columns| ColumnsMut { columns, ..self });
        (before, after)
    }

    /// Returns this part of a row.
    ///
    /// # Panics
    /// If the row is not in the matrix.
    #[inline(always)]
    pub fn row_mut(&mut self, row: usize) -> &mut [T] {
        assert!(row < self.rows, "a row of the matrix");
        // SAFETY: inside the matrix that `new` borrowed for writing, in columns that no other part has; the
        // result borrows `self`.
        unsafe {
            let first = self.pointer.add(row * self.width + self.columns.start);
            std::slice::from_raw_parts_mut(first, self.columns.len())
        }
    }

    /// Returns the range of columns.
    pub fn range(&self) -> Range<usize> {
        self.columns.clone()
    }

    /// Writes one element; `column` is an index in the matrix.
    ///
    /// # Panics
    /// If the row is not in the matrix or the column not among these.
    #[inline(always)]
    pub fn set(&mut self, row: usize, column: usize, value: T) {
        self.set_all(row, column, &[value]);
    }

    /// Writes neighbours in one row, from `column` on.
    ///
    /// # Panics
    /// If the row is not in the matrix or a column not among these.
    #[inline(always)]
    pub fn set_all(&mut self, row: usize, column: usize, values: &[T]) {
        let first = column.wrapping_sub(self.columns.start);
        self.row_mut(row)[first..][..values.len()].copy_from_slice(values);
    }
}
