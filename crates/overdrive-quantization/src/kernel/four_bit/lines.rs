//! Memory that begins with a line of the cache: a vector that lies in two lines takes twice as long to
//! load.
#![allow(unsafe_code)]

use std::ops::{Deref, DerefMut};

/// Bytes of a line, and of a vector.
const LINE: usize = 64;

#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; LINE]);

/// Numbers: zeros to begin with.
pub(super) trait Number: Copy + Default {}
impl Number for f32 {}
impl Number for i16 {}
impl Number for i8 {}

/// A slice of numbers in whole lines.
#[derive(Debug)]
pub(crate) struct Lines<T> {
    lines: Vec<Line>,
    len: usize,
    of: std::marker::PhantomData<T>,
}

impl<T> Default for Lines<T> {
    fn default() -> Self {
        Lines {
            lines: Vec::new(),
            len: 0,
            of: std::marker::PhantomData,
        }
    }
}

#[allow(private_bounds, reason = "the numbers that kernels hold")]
impl<T: Number> Lines<T> {
    /// Zeros.
    pub(super) fn new(len: usize) -> Self {
        let mut all = Lines::default();
        all.grow(len);
        all
    }

    /// Makes it as long as `len`, if it is not.
    pub(super) fn grow(&mut self, len: usize) {
        if self.len < len {
            let lines = (len * size_of::<T>()).div_ceil(LINE);
            self.lines.resize(lines, Line([0; LINE]));
            self.len = len;
        }
    }
}

#[allow(private_bounds, reason = "the numbers that kernels hold")]
impl<T: Number> Deref for Lines<T> {
    type Target = [T];

    #[inline(always)]
    fn deref(&self) -> &[T] {
        // SAFETY: `grow` made lines for `len` numbers, of types for which all bytes mean something and
        // which are aligned to less than lines are.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.len) }
    }
}

#[allow(private_bounds, reason = "the numbers that kernels hold")]
impl<T: Number> DerefMut for Lines<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.len) }
    }
}
