//! Two rows and more, with AVX-512-VNNI: a few outputs with up to eight rows at a time, each pair in a
//! register of partial sums along the inputs.
//!
//! The weight is read as it lies. Some inputs at a time, so that the rows stay in the first cache while
//! the outputs of the job pass by; the next group of rows finds the weight in the second. With the first
//! group the outputs that come next are asked for, with the others the next group of rows. What a register holds at the end of such a block is
//! added up and kept, `(outputs, rows)`, until the job is done.
#![allow(unsafe_code)]

use std::arch::x86_64::*;
use std::cell::Cell;
use std::ops::Range;

use super::Job;
use super::turn::{OUTPUTS, Turn};
use crate::kernel::activations::{GROUP_ROWS, Line, RowGroups};
use crate::kernel::element::Element;
use crate::kernel::simd::BYTES;
use crate::kernel::simd::avx512::Avx512;

/// Vectors of inputs in a block: eight rows of that are half of a first cache of 32 KB.
const BLOCK: usize = 32;

thread_local! {
    /// Sums of a job; kept, since memory that is new costs more than its use.
    static SUMS: Cell<Vec<i32>> = const { Cell::new(Vec::new()) };
}

/// A job by tiles.
pub(super) fn tiles<T: Element>(simd: Avx512, job: &Job<'_, '_, T>) {
    let x = job.part.x;
    let groups = x.groups();
    let stride = groups.count() * GROUP_ROWS;
    let mut sums = SUMS.take();
    let held = job.outputs.len().next_multiple_of(OUTPUTS) * stride;
    if sums.len() < held {
        sums.resize(held, 0);
    }
    let tiles = Tiles {
        codes: &job.part.codes[job.outputs.start * x.width..job.outputs.end * x.width],
        after: job
            .part
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
            unsafe { tiles.group(simd, group, vectors.clone(), &mut sums) };
        }
    }
    let turn = Turn::new(simd, job);
    for group in 0..groups.count() {
        turn.group(groups.rows(group), &sums[group * GROUP_ROWS..], stride);
    }
    SUMS.set(sums);
}

/// The weight of a job, and the activations.
struct Tiles<'a> {
    codes: &'a [i8],
    /// Where the weight of a job that follows may lie.
    after: *const i8,
    outputs: usize,
    width: usize,
    groups: &'a RowGroups,
    /// Sums from one output to the next.
    stride: usize,
}

impl Tiles<'_> {
    /// All outputs with one group of rows, along `vectors` of inputs.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn group(&self, simd: Avx512, group: usize, vectors: Range<usize>, sums: &mut [i32]) {
        // As many outputs as leave registers for a row and for a vector of each output.
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

    /// The same for `N` rows, `R` outputs at a time.
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

    /// `R` outputs from `output` on with the `N` rows of a group; writes their sums, or adds them unless
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
        // Vectors that are whole in each row of the weight.
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
            // SAFETY: eight numbers of 32 bits are there.
            unsafe {
                if vectors.start > 0 {
                    totals = _mm256_add_epi32(totals, _mm256_loadu_si256(out.as_ptr().cast()));
                }
                _mm256_storeu_si256(out.as_mut_ptr().cast(), totals);
            }
        }
    }

    /// The weight that the tile after this one reads: the next outputs, or the first with the inputs that
    /// follow; another job's, with the last inputs.
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

    /// The same inputs of the next group of rows, of which each tile asks for a vector by each of its own:
    /// for all, or for more than there are.
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
/// `x` has `N` whole vectors, aligned as such, and the machine has AVX-512-VNNI.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn add<const R: usize, const N: usize>(
    parts: &mut [[__m512i; N]; R],
    w: [__m512i; R],
    x: *const __m512i,
) {
    for n in 0..N {
        // SAFETY: the caller's promise.
        let x = unsafe { _mm512_load_si512(x.add(n)) };
        for (parts, w) in parts.iter_mut().zip(w) {
            parts[n] = _mm512_dpbusd_epi32(parts[n], w, x);
        }
    }
}

/// The totals of eight registers, in their order.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn totals(parts: [__m512i; GROUP_ROWS]) -> __m256i {
    // Halves of two registers beside each other, then pairs and fours of their lanes.
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
