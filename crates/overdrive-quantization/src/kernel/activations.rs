//! Rows of activations in 8 bits.

use std::cell::Cell;
use std::ops::Range;
use std::sync::{Mutex, OnceLock, PoisonError};

use super::element::Element;
use super::simd::{Kernel, Simd, dispatch};
use crate::codec::jobs::run_jobs;

/// Rows are padded with zeros to a multiple of this.
pub(crate) const PAD: usize = 64;

/// Most bytes of each buffer that a thread keeps for its next product.
const KEPT: usize = 8 << 20;

thread_local! {
    /// Buffers of products that are done. The system clears memory that is new, page by page: that took a
    /// tenth of a product of 64 rows.
    static BUFFERS: Cell<(Vec<i8>, Vec<Line>)> = const { Cell::new((Vec::new(), Vec::new())) };
}

/// Rows of activations, each quantized symmetrically to `-127..=127` with a scale of its own:
/// `x ≈ codes · scale`.
#[derive(Debug)]
pub(crate) struct Int8Rows {
    /// i8 `(rows, padded)`; zero beyond `width`.
    pub(crate) codes: Vec<i8>,
    /// One a row; NaN where the row holds a NaN.
    pub(crate) scales: Vec<f32>,
    /// `Σ codes` by row.
    pub(crate) sums: Vec<i32>,
    pub(crate) rows: usize,
    pub(crate) width: usize,
    /// `width` rounded up to an odd multiple of [`PAD`].
    pub(crate) padded: usize,
    /// The same codes in groups of rows, for kernels that want them.
    pub(crate) groups: OnceLock<RowGroups>,
    /// Room for them.
    pub(crate) spare: Mutex<Vec<Line>>,
}

impl Drop for Int8Rows {
    fn drop(&mut self) {
        let groups = self.groups.take().map(|groups| groups.lines);
        let spare = self.spare.get_mut().unwrap_or_else(PoisonError::into_inner);
        let lines = groups.unwrap_or_else(|| std::mem::take(spare));
        let codes = std::mem::take(&mut self.codes);
        if codes.capacity() <= KEPT && lines.capacity() * size_of::<Line>() <= KEPT {
            // A thread that ends keeps nothing.
            let _ = BUFFERS.try_with(|buffers| buffers.set((codes, lines)));
        }
    }
}

impl Int8Rows {
    /// Quantizes `x (rows, width)`.
    pub(crate) fn quantize<T: Element>(x: &[T], width: usize) -> Self {
        let rows = x.len().checked_div(width).unwrap_or(0);
        // An odd multiple: at a distance of 4 KiB all rows would want the same places of the first cache,
        // which the rows of the weight want too.
        let padded = (width.div_ceil(PAD) | 1) * PAD;
        let (mut codes, spare) = BUFFERS.take();
        codes.clear();
        codes.resize(rows * padded, 0);
        let mut all = Int8Rows {
            codes,
            scales: vec![0.0; rows],
            sums: vec![0; rows],
            rows,
            width,
            padded,
            groups: OnceLock::new(),
            spare: Mutex::new(spare),
        };
        if rows == 0 {
            return all;
        }
        // Each thread its share of rows, or one all.
        let threads = match rows * width < PARALLEL {
            true => 1,
            false => overdrive_sys::threads::intra_op().clamp(1, rows),
        };
        let share = rows.div_ceil(threads);
        let codes = all.codes.chunks_mut(share * padded);
        let factors = all.scales.chunks_mut(share).zip(all.sums.chunks_mut(share));
        let jobs = x.chunks(share * width).zip(codes).zip(factors);
        run_jobs(jobs, |((x, codes), (scales, sums))| {
            let mut scratch = Vec::new();
            let rows = x.chunks_exact(width).zip(codes.chunks_exact_mut(padded));
            for ((x, codes), (scale, sum)) in rows.zip(scales.iter_mut().zip(sums)) {
                (*scale, *sum) = dispatch(QuantizeRow {
                    x: T::floats(x, &mut scratch),
                    codes: &mut codes[..width],
                });
            }
        });
        all
    }

    /// The codes in groups of rows, made at the first call.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        allow(dead_code, reason = "for tiles, which only AVX-512 has")
    )]
    pub(crate) fn groups(&self) -> &RowGroups {
        self.groups.get_or_init(|| {
            let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
            RowGroups::new(self, std::mem::take(&mut spare))
        })
    }

    /// The codes of a row, padded.
    #[inline(always)]
    pub(crate) fn row(&self, row: usize) -> &[i8] {
        &self.codes[row * self.padded..(row + 1) * self.padded]
    }
}

/// Most rows of a group.
#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "for tiles, which only AVX-512 has")
)]
pub(crate) const GROUP_ROWS: usize = 8;

/// Codes that fill a line of the cache and a vector.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "for tiles, which only AVX-512 has")
)]
pub(crate) struct Line(pub(crate) [i8; PAD]);

/// Rows of codes in groups of up to [`GROUP_ROWS`], of which no two differ by more than one row: in a group
/// the vectors of its rows that have the same inputs are neighbours. A kernel that walks along the inputs
/// of a group reads one stream, and no two lines of that want the same place of the cache.
#[derive(Debug)]
#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "for tiles, which only AVX-512 has")
)]
pub(crate) struct RowGroups {
    /// Of one group after another, `(vectors, rows of the group)`.
    lines: Vec<Line>,
    rows: usize,
    vectors: usize,
}

#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "for tiles, which only AVX-512 has")
)]
impl RowGroups {
    /// In the memory of `lines`.
    fn new(x: &Int8Rows, mut lines: Vec<Line>) -> Self {
        let mut groups = RowGroups {
            lines: Vec::new(),
            rows: x.rows,
            vectors: x.width.div_ceil(PAD),
        };
        lines.clear();
        lines.reserve_exact(x.rows * groups.vectors);
        for group in 0..groups.count() {
            let rows = groups.rows(group);
            for vector in 0..groups.vectors {
                lines.extend(rows.clone().map(|row| {
                    let (codes, _) = x.row(row).as_chunks::<PAD>();
                    Line(codes[vector])
                }));
            }
        }
        groups.lines = lines;
        groups
    }

    pub(crate) fn count(&self) -> usize {
        self.rows.div_ceil(GROUP_ROWS)
    }

    /// Vectors of a row.
    pub(crate) fn vectors(&self) -> usize {
        self.vectors
    }

    /// The rows of a group.
    #[inline(always)]
    pub(crate) fn rows(&self, group: usize) -> Range<usize> {
        let begin = |group: usize| group * self.rows / self.count();
        begin(group)..begin(group + 1)
    }

    /// Some vectors of all rows of a group.
    #[inline(always)]
    pub(crate) fn vectors_of(&self, group: usize, vectors: Range<usize>) -> &[Line] {
        let rows = self.rows(group);
        let first = rows.start * self.vectors;
        &self.lines[first + vectors.start * rows.len()..first + vectors.end * rows.len()]
    }
}

/// Activations that are quantized by one thread.
const PARALLEL: usize = 64 << 10;

/// One row: its scale, and the sum of the codes.
struct QuantizeRow<'a> {
    x: &'a [f32],
    codes: &'a mut [i8],
}

impl Kernel for QuantizeRow<'_> {
    type Output = (f32, i32);

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> (f32, i32) {
        quantize_row(self.x, self.codes)
    }
}

/// Plain loops, which become vectors of whatever set they are compiled for.
#[inline(always)]
fn quantize_row(x: &[f32], codes: &mut [i8]) -> (f32, i32) {
    // Magnitudes of floats compare as their bits do, and NaN is larger than all.
    let bits = x
        .iter()
        .fold(0, |most, x| (x.to_bits() & !(1 << 31)).max(most));
    let most = f32::from_bits(bits);
    let inverse = 127.0 / most;
    // 127 over a subnormal number may be too much for a float: such rows are zero.
    let inverse = if inverse.is_finite() { inverse } else { 0.0 };
    // Adding 1.5 · 2²³ leaves the nearest integer (ties to even) in the low bits of the sum.
    const TO_INTEGER: f32 = 12_582_912.0;
    let mut sum = 0;
    for (code, x) in codes.iter_mut().zip(x) {
        #[allow(
            clippy::cast_possible_truncation,
            reason = "the low 8 bits are the integer"
        )]
        let quantized = (x * inverse + TO_INTEGER).to_bits() as i8;
        *code = quantized;
        sum += i32::from(quantized);
    }
    (most / 127.0, sum)
}
