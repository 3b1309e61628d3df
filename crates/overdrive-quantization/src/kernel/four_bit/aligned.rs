//! Memory that is aligned to cache lines: a vector that spans two lines takes twice as long to load.
#![allow(unsafe_code)]

use std::ops::{Deref, DerefMut};

use overdrive_kernels::capacity_bytes;

/// The number of bytes in a cache line and in a vector.
const LINE: usize = 64;

#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; LINE]);

/// An integer or float of which every bit pattern is valid.
pub(super) trait Number: Copy + Default {}
impl Number for f32 {}
impl Number for i16 {}
impl Number for i8 {}

/// A vector of numbers that begins at a cache line.
#[derive(Debug)]
pub(crate) struct AlignedVec<T> {
    lines: Vec<Line>,
    len: usize,
    of: std::marker::PhantomData<T>,
}

impl<T> Default for AlignedVec<T> {
    fn default() -> Self {
        AlignedVec {
            lines: Vec::new(),
            len: 0,
            of: std::marker::PhantomData,
        }
    }
}

#[allow(private_bounds, reason = "only the types of this module")]
impl<T: Number> AlignedVec<T> {
    /// Returns `len` zeros.
    pub(super) fn new(len: usize) -> Self {
        let mut all = AlignedVec::default();
        all.grow(len);
        all
    }

    /// Makes the vector `len` zeros, in the memory that it has if that is enough.
    pub(super) fn reset(&mut self, len: usize) {
        self.lines.clear();
        self.len = 0;
        self.grow(len);
    }

    /// Returns the bytes of the vector's memory.
    pub(super) fn bytes(&self) -> usize {
        capacity_bytes(&self.lines)
    }

    /// Grows the vector to `len` numbers, if it has fewer; new ones are zero.
    pub(super) fn grow(&mut self, len: usize) {
        // Never shrunk: the buffers of a thread serve layers of several sizes.
        if self.len < len {
            let lines = (len * size_of::<T>()).div_ceil(LINE);
            self.lines.resize(lines, Line([0; LINE]));
            self.len = len;
        }
    }
}

#[allow(private_bounds, reason = "only the types of this module")]
impl<T: Number> Deref for AlignedVec<T> {
    type Target = [T];

    #[inline(always)]
    fn deref(&self) -> &[T] {
        // SAFETY: `grow` made lines for `len` numbers, of types for which every bit pattern is valid and
        // whose alignment is less than that of lines.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.len) }
    }
}

#[allow(private_bounds, reason = "only the types of this module")]
impl<T: Number> DerefMut for AlignedVec<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.len) }
    }
}
