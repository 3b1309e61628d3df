//! Rows of activations in 8 bits.

use std::ops::Range;
use std::sync::{Mutex, OnceLock, PoisonError};

use overdrive_kernels::threads::{run_jobs, workers};
use overdrive_kernels::{Buffers, Element, InstructionSet, Kept, capacity_bytes, vectorized};

use crate::codec::floats::{Float, max_magnitude_of, round_bits};

/// Rows are padded with zeros to a multiple of this.
pub(crate) const PAD: usize = 64;

/// The buffers of earlier GEMMs. The system clears new memory page by page, which took a tenth of the time of a
/// GEMM of 64 rows.
#[derive(Default)]
struct RowBuffers {
    codes: Vec<i8>,
    lines: Vec<Line>,
}

impl Buffers for RowBuffers {
    fn bytes(&self) -> usize {
        capacity_bytes(&self.codes) + capacity_bytes(&self.lines)
    }
}

thread_local! {
    static BUFFERS: Kept<RowBuffers> = const { Kept::new() };
}

/// Rows of activations, each quantized symmetrically to `-127..=127` with its own scale:
/// `x ≈ codes · scale`.
#[derive(Debug)]
pub(crate) struct Int8Rows {
    /// i8 `(rows, padded)`; zero beyond `width`.
    pub(crate) codes: Vec<i8>,
    /// The scale of each row; NaN if the row has a NaN.
    pub(crate) scales: Vec<f32>,
    /// `Σ codes` of each row.
    pub(crate) sums: Vec<i32>,
    pub(crate) rows: usize,
    pub(crate) width: usize,
    /// `width` rounded up to an odd multiple of [`PAD`].
    pub(crate) padded: usize,
    /// The same codes in groups of rows, for kernels that need them.
    pub(crate) groups: OnceLock<RowGroups>,
    /// The memory for the groups.
    pub(crate) spare: Mutex<Vec<Line>>,
}

impl Drop for Int8Rows {
    fn drop(&mut self) {
        let groups = self.groups.take().map(|groups| groups.lines);
        let spare = self.spare.get_mut().unwrap_or_else(PoisonError::into_inner);
        let lines = groups.unwrap_or_else(|| std::mem::take(spare));
        let codes = std::mem::take(&mut self.codes);
        Kept::put(&BUFFERS, RowBuffers { codes, lines });
    }
}

impl Int8Rows {
    /// Quantizes `x (rows, width)`.
    pub(crate) fn quantize<T: Element>(x: &[T], width: usize) -> Self {
        let rows = x.len().checked_div(width).unwrap_or(0);
        // An odd multiple: at a distance of 4 KiB all rows, and those of the weight, would fall into the same
        // set of the first cache.
        let padded = (width.div_ceil(PAD) | 1) * PAD;
        let RowBuffers {
            mut codes,
            lines: spare,
        } = Kept::take(&BUFFERS);
        codes.clear();
        // Zeros beyond the width add nothing to the sums.
        codes.resize(rows * padded, 0);
        let mut all = Int8Rows {
            codes,
            scales: vec![0.0; rows],
            sums: vec![0; rows],
            rows,
            width,
            padded,
            // Made on demand: a single row and machines without VNNI do not need them.
            groups: OnceLock::new(),
            spare: Mutex::new(spare),
        };
        if rows == 0 {
            return all;
        }
        // Each thread gets a share of the rows, or this one all of them.
        let threads = match rows * width < PARALLEL {
            true => 1,
            false => workers().min(rows),
        };
        let share = rows.div_ceil(threads);
        let codes = all.codes.chunks_mut(share * padded);
        let factors = all.scales.chunks_mut(share).zip(all.sums.chunks_mut(share));
        let jobs = x.chunks(share * width).zip(codes).zip(factors);
        run_jobs(jobs, |((x, codes), (scales, sums))| {
            let mut scratch = Vec::new();
            let rows = x.chunks_exact(width).zip(codes.chunks_exact_mut(padded));
            for ((x, codes), (scale, sum)) in rows.zip(scales.iter_mut().zip(sums)) {
                let x = T::read(x, &mut scratch);
                let codes = &mut codes[..width];
                (*scale, *sum) = quantize_row(InstructionSet::best(), x, codes);
            }
        });
        all
    }

    /// Returns the codes in groups of rows, which the first call makes.
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

    /// Returns the codes of a row, padded.
    #[inline(always)]
    pub(crate) fn row(&self, row: usize) -> &[i8] {
        &self.codes[row * self.padded..(row + 1) * self.padded]
    }
}

/// The largest number of rows of a group.
#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "for tiles, which only AVX-512 has")
)]
pub(crate) const GROUP_ROWS: usize = 8;

/// The codes of a vector, in a line of the cache.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "for tiles, which only AVX-512 has")
)]
pub(crate) struct Line(pub(crate) [i8; PAD]);

/// Rows of codes in groups of up to [`GROUP_ROWS`], whose sizes differ by at most one row. In a group the
/// vectors of the same inputs are neighbours, so that a kernel that walks along the inputs reads one stream,
/// of which no two lines fall into the same set of the cache.
#[derive(Debug)]
#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "for tiles, which only AVX-512 has")
)]
pub(crate) struct RowGroups {
    /// The groups one after another, each `(vectors, rows of the group)`.
    lines: Vec<Line>,
    rows: usize,
    vectors: usize,
}

#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "for tiles, which only AVX-512 has")
)]
impl RowGroups {
    /// Makes the groups in the memory of `lines`.
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

    /// Returns the number of vectors of a row.
    pub(crate) fn vectors(&self) -> usize {
        self.vectors
    }

    /// Returns the rows of a group.
    #[inline(always)]
    pub(crate) fn rows(&self, group: usize) -> Range<usize> {
        let begin = |group: usize| group * self.rows / self.count();
        begin(group)..begin(group + 1)
    }

    /// Returns some vectors of all rows of a group.
    #[inline(always)]
    pub(crate) fn vectors_of(&self, group: usize, vectors: Range<usize>) -> &[Line] {
        let rows = self.rows(group);
        let first = rows.start * self.vectors;
        &self.lines[first + vectors.start * rows.len()..first + vectors.end * rows.len()]
    }
}

/// The number of activations below which one thread quantizes all.
const PARALLEL: usize = 64 << 10;

vectorized! {
    /// Quantizes a row; returns its scale and the sum of the codes.
    fn quantize_row<S: Simd>(_s: S, x: &[f32], codes: &mut [i8]) -> (f32, i32) {
        let most = max_magnitude_of(x);
        let inverse = 127.0 / most;
        // 127 over a subnormal number may overflow: such rows are zero.
        let inverse = if inverse.is_finite() { inverse } else { 0.0 };
        let mut sum = 0;
        for (code, x) in codes.iter_mut().zip(x) {
            #[allow(
                clippy::cast_possible_truncation,
                reason = "the low 8 bits are the integer"
            )]
            let quantized = round_bits(x * inverse) as i8;
            *code = quantized;
            sum += i32::from(quantized);
        }
        (most / 127.0, sum)
    }
}
