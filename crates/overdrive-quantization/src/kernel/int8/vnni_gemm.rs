//! The GEMM of two rows and more, with AVX-512-VNNI: a few outputs with up to eight rows at a time, each pair in
//! a register of partial sums along the inputs.
//!
//! The weight is read in its layout in memory, a block of inputs at a time, so that the rows stay in the first
//! cache for all outputs of the job; the next group of rows finds the weight in the second. The first group
//! prefetches the outputs that come next, the others the next group of rows. At the end of a block the registers
//! are added up and kept, `(outputs, rows)`, until the job is done.
#![allow(unsafe_code)]

use std::arch::x86_64::*;
use std::ops::Range;

use overdrive_kernels::BYTES;
use overdrive_kernels::arch::Avx512;

use super::transpose::{OUTPUTS, transpose};
use super::{Job, Scratch};
use crate::kernel::int8_rows::{GROUP_ROWS, Line, RowGroups};
use crate::kernel::joint_gemm::Results;

/// The number of vectors of inputs in a block: eight rows of that are half of a first cache of 32 KB.
const BLOCK: usize = 32;

/// The amount by which the codes of the weight are too large: `vpdpbusd` takes them unsigned.
const OFFSET: i32 = 128;

/// Computes a job.
pub(super) fn run(
    simd: Avx512,
    job: &Job<'_, '_>,
    scratch: &mut Scratch,
    results: &mut dyn Results,
) {
    let x = job.gemm.x;
    let groups = x.groups();
    let stride = groups.count() * GROUP_ROWS;
    let count = job.outputs.len();
    let padded = count.next_multiple_of(OUTPUTS);
    if scratch.sums.len() < padded * stride {
        scratch.sums.resize(padded * stride, 0);
    }
    let sums = &mut scratch.sums[..];
    let tiles = Tiles {
        codes: &job.gemm.codes[job.outputs.start * x.width..job.outputs.end * x.width],
        after: job
            .gemm
            .codes
            .as_ptr()
            .wrapping_add(job.outputs.end * x.width),
        outputs: job.outputs.len(),
        width: x.width,
        groups,
        stride,
    };
    for block in (0..groups.vectors()).step_by(BLOCK) {
        let vectors = block..(block + BLOCK).min(groups.vectors());
        for group in 0..groups.count() {
            // SAFETY: `simd` proves that the machine has the instructions.
            unsafe { tiles.group(simd, group, vectors.clone(), sums) };
        }
    }
    // Group by group, so that the transposed sums stay in the first cache.
    scratch.rows.resize(GROUP_ROWS * padded, 0);
    for group in 0..groups.count() {
        for first in (0..count).step_by(OUTPUTS) {
            let from = &sums[first * stride + group * GROUP_ROWS..];
            let to = &mut scratch.rows[first..];
            // SAFETY: `simd` proves that the machine has the instructions.
            unsafe { transpose(simd, from, stride, to, padded) };
        }
        let rows = groups.rows(group).zip(scratch.rows.chunks_exact(padded));
        for (row, sums) in rows {
            job.finish(row, &sums[..count], OFFSET, &mut scratch.results, results);
        }
    }
}

/// The weight of a job, and the activations.
struct Tiles<'a> {
    codes: &'a [i8],
    /// The address at which the weight of the next job probably begins.
    after: *const i8,
    outputs: usize,
    width: usize,
    groups: &'a RowGroups,
    /// The number of sums from one output to the next.
    stride: usize,
}

impl Tiles<'_> {
    /// Computes all outputs with one group of rows, along `vectors` of inputs.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn group(&self, simd: Avx512, group: usize, vectors: Range<usize>, sums: &mut [i32]) {
        // As many outputs as leave registers for a row and for a vector of each output, of 32.
        match self.groups.rows(group).len() {
            1 => self.outputs::<4, 1>(simd, group, vectors, sums),
            2 => self.outputs::<4, 2>(simd, group, vectors, sums),
            3 => self.outputs::<4, 3>(simd, group, vectors, sums),
            4 => self.outputs::<4, 4>(simd, group, vectors, sums),
            5 => self.outputs::<4, 5>(simd, group, vectors, sums),
            6 => self.outputs::<4, 6>(simd, group, vectors, sums),
            7 => self.outputs::<3, 7>(simd, group, vectors, sums),
            _ => self.outputs::<3, 8>(simd, group, vectors, sums),
        }
    }

    /// Does the same for `N` rows, `R` outputs at a time.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn outputs<const R: usize, const N: usize>(
        &self,
        simd: Avx512,
        group: usize,
        vectors: Range<usize>,
        sums: &mut [i32],
    ) {
        let mut output = 0;
        while output + R <= self.outputs {
            self.tile::<R, N>(simd, group, vectors.clone(), output, sums);
            output += R;
        }
        while output + 2 <= self.outputs {
            self.tile::<2, N>(simd, group, vectors.clone(), output, sums);
            output += 2;
        }
        if output < self.outputs {
            self.tile::<1, N>(simd, group, vectors, output, sums);
        }
    }

    /// Computes `R` outputs from `output` on with the `N` rows of a group; stores their sums, or adds them unless
    /// these are the first inputs.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn tile<const R: usize, const N: usize>(
        &self,
        _: Avx512,
        group: usize,
        vectors: Range<usize>,
        output: usize,
        sums: &mut [i32],
    ) {
        let x = self.groups.vectors_of(group, vectors.clone());
        let first = output * self.width + vectors.start * BYTES;
        // The number of vectors that are whole in each row of the weight.
        let whole = vectors.len().min(self.width / BYTES - vectors.start);
        assert!(
            x.len() >= vectors.len() * N
                && self.codes.len() >= first + (R - 1) * self.width + whole * BYTES,
            "the inputs of a group, and of outputs"
        );
        let weights = self.codes[first..].as_ptr();
        let next = (group == 0).then(|| self.next::<R>(output, &vectors));
        let rows = self.next_rows(group, &vectors);
        let rows = rows.wrapping_add(output / R * vectors.len());
        let flip = _mm512_set1_epi8(i8::MIN);
        let mut parts = [[_mm512_setzero_si512(); N]; R];
        for vector in 0..whole {
            let mut w = [flip; R];
            if next.is_none() {
                _mm_prefetch::<_MM_HINT_T1>(rows.wrapping_add(vector).cast());
            }
            for (r, w) in w.iter_mut().enumerate() {
                let at = r * self.width + vector * BYTES;
                if let Some(next) = next {
                    _mm_prefetch::<_MM_HINT_T1>(next.wrapping_add(at));
                }
                // SAFETY: asserted: `whole` vectors of each of `R` rows.
                *w = unsafe { _mm512_loadu_si512(weights.add(at).cast()) };
                *w = _mm512_xor_si512(*w, flip);
            }
            // SAFETY: asserted: `N` vectors for each of `vectors`.
            unsafe { add(&mut parts, w, x.as_ptr().add(vector * N).cast()) };
        }
        if whole < vectors.len() {
            let at = (vectors.start + whole) * BYTES;
            let mask = u64::MAX >> (BYTES - (self.width - at));
            let mut w = [flip; R];
            for (r, w) in w.iter_mut().enumerate() {
                let row = (output + r) * self.width;
                let rest = &self.codes[row + at..row + self.width];
                // SAFETY: the mask lets as many bytes be read as `rest` has.
                *w = unsafe { _mm512_maskz_loadu_epi8(mask, rest.as_ptr()) };
                *w = _mm512_xor_si512(*w, flip);
            }
            // SAFETY: as above.
            unsafe { add(&mut parts, w, x.as_ptr().add(whole * N).cast()) };
        }
        for (r, parts) in parts.iter().enumerate() {
            let mut eight = [_mm512_setzero_si512(); GROUP_ROWS];
            eight[..N].copy_from_slice(parts);
            let mut totals = totals(eight);
            let at = (output + r) * self.stride + group * GROUP_ROWS;
            let out = &mut sums[at..at + GROUP_ROWS];
            // SAFETY: `out` has eight integers of 32 bits.
            unsafe {
                if vectors.start > 0 {
                    totals = _mm256_add_epi32(totals, _mm256_loadu_si256(out.as_ptr().cast()));
                }
                _mm256_storeu_si256(out.as_mut_ptr().cast(), totals);
            }
        }
    }

    /// Returns the address of the weight that the tile after this one reads: the next outputs, or the first with
    /// the next inputs, or after the last inputs that of another job.
    #[inline(always)]
    fn next<const R: usize>(&self, output: usize, vectors: &Range<usize>) -> *const i8 {
        if output + R < self.outputs {
            let first = (output + R) * self.width + vectors.start * BYTES;
            self.codes.as_ptr().wrapping_add(first)
        } else if vectors.end * BYTES < self.width {
            self.codes.as_ptr().wrapping_add(vectors.end * BYTES)
        } else {
            self.after
        }
    }

    /// Returns the address of the same inputs of the next group of rows. Each tile prefetches a vector of them for
    /// each of its own, at the end beyond the last.
    #[inline(always)]
    fn next_rows(&self, group: usize, vectors: &Range<usize>) -> *const Line {
        let next = if group + 1 < self.groups.count() {
            group + 1
        } else {
            group
        };
        self.groups.vectors_of(next, vectors.clone()).as_ptr()
    }
}

/// Adds one vector of inputs.
///
/// # Safety
/// `x` has `N` whole, aligned vectors.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn add<const R: usize, const N: usize>(
    parts: &mut [[__m512i; N]; R],
    w: [__m512i; R],
    x: *const __m512i,
) {
    for n in 0..N {
        // SAFETY: the caller ensures the vectors.
        let x = unsafe { _mm512_load_si512(x.add(n)) };
        for (parts, w) in parts.iter_mut().zip(w) {
            parts[n] = _mm512_dpbusd_epi32(parts[n], w, x);
        }
    }
}

/// Returns the totals of eight registers, in their order.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn totals(parts: [__m512i; GROUP_ROWS]) -> __m256i {
    // Adds halves of two registers beside each other, then pairs and fours of their lanes.
    let mut halves = [_mm512_setzero_si512(); 4];
    for (i, half) in halves.iter_mut().enumerate() {
        let (a, b) = (parts[i], parts[i + 4]);
        *half = _mm512_add_epi32(
            _mm512_shuffle_i64x2::<0x44>(a, b),
            _mm512_shuffle_i64x2::<0xee>(a, b),
        );
    }
    let pairs = |a, b| _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    let (ab, cd) = (pairs(halves[0], halves[1]), pairs(halves[2], halves[3]));
    let fours = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    let low = _mm512_castsi512_si256(fours);
    let high = _mm512_extracti64x4_epi64::<1>(fours);
    _mm256_add_epi32(
        _mm256_permute2x128_si256::<0x20>(low, high),
        _mm256_permute2x128_si256::<0x31>(low, high),
    )
}
