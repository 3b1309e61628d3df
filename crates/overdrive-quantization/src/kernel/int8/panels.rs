//! Many rows, with AVX-512-VNNI: 32 outputs of the weight are packed, four inputs of each together, so
//! that a sum is a lane and nothing is added across lanes.
//!
//! The panel stays in the second cache while all rows pass by, twelve at a time. With the first of them
//! the weight of the next panel is asked for.
#![allow(unsafe_code)]

use std::arch::x86_64::*;
use std::cell::RefCell;
use std::ops::Range;

use super::{Int8Part, Job};
use crate::kernel::activations::Int8Rows;
use crate::kernel::element::Element;
use crate::kernel::simd::avx512::Avx512;

/// Outputs of a panel: two registers of 16 sums.
const OUTPUTS: usize = 32;

/// Inputs that one lane of an instruction multiplies and adds.
const QUAD: usize = 4;

thread_local! {
    /// The packed panel; a thread makes one after another.
    static PANEL: RefCell<Vec<i8>> = const { RefCell::new(Vec::new()) };
}

/// A job by panels.
pub(super) fn panels<T: Element>(simd: Avx512, job: &Job<'_, '_, T>) {
    PANEL.with_borrow_mut(|panel| {
        panel.resize(job.part.x.padded * OUTPUTS, 0);
        for from in job.outputs.clone().step_by(OUTPUTS) {
            let outputs = from..(from + OUTPUTS).min(job.outputs.end);
            // SAFETY: `simd` proves that the machine has the instructions.
            unsafe {
                pack(simd, job.part, outputs.clone(), panel);
                multiply(simd, job, outputs, panel);
            }
        }
    });
}

/// Codes of `outputs`, with 128 added, as `(inputs / 4, 32, 4)`; anything for outputs beyond the range and
/// for inputs beyond the width.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn pack<T: Element>(_: Avx512, part: &Int8Part<'_, T>, outputs: Range<usize>, panel: &mut [i8]) {
    let width = part.x.width;
    for half in 0..OUTPUTS / 16 {
        let from = outputs.start + half * 16;
        for at in (0..width).step_by(64) {
            let count = (width - at).min(64);
            let mut square = [_mm512_setzero_si512(); 16];
            if count == 64 && from + 16 <= outputs.end {
                let first = part.weight(from)[at..].as_ptr();
                assert!(
                    part.codes.len() >= (from + 15) * width + at + 64,
                    "16 rows of 64"
                );
                for (index, row) in square.iter_mut().enumerate() {
                    // SAFETY: asserted.
                    *row = unsafe { _mm512_loadu_si512(first.add(index * width).cast()) };
                }
            } else {
                let mask = u64::MAX >> (64 - count);
                for (row, output) in square.iter_mut().zip(from..outputs.end) {
                    let codes = &part.weight(output)[at..at + count];
                    // SAFETY: the mask lets `count` bytes be read, the slice's length.
                    *row = unsafe { _mm512_maskz_loadu_epi8(mask, codes.as_ptr()) };
                }
            }
            let quad = at / QUAD;
            let to = &mut panel[quad * OUTPUTS * QUAD..(quad + 16) * OUTPUTS * QUAD];
            for (column, to) in transposed(square)
                .into_iter()
                .zip(to.as_chunks_mut::<128>().0)
            {
                let shifted = _mm512_xor_si512(column, _mm512_set1_epi8(i8::MIN));
                // SAFETY: a store of 64 bytes at 0 or 64 of 128.
                unsafe { _mm512_storeu_si512(to.as_mut_ptr().add(half * 64).cast(), shifted) };
            }
        }
    }
}

/// 16 by 16 numbers of 32 bits.
#[inline]
#[target_feature(enable = "avx512f")]
fn transposed(rows: [__m512i; 16]) -> [__m512i; 16] {
    // Within each quarter of the registers: pairs of rows, then fours.
    let mut pairs = [_mm512_setzero_si512(); 16];
    for i in 0..8 {
        pairs[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        pairs[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    // `fours[4 * g + c]` has in its quarter `q` column `4 q + c` of rows `4 g .. 4 g + 4`.
    let mut fours = [_mm512_setzero_si512(); 16];
    for g in 0..4 {
        let p = &pairs[4 * g..4 * g + 4];
        fours[4 * g] = _mm512_unpacklo_epi64(p[0], p[2]);
        fours[4 * g + 1] = _mm512_unpackhi_epi64(p[0], p[2]);
        fours[4 * g + 2] = _mm512_unpacklo_epi64(p[1], p[3]);
        fours[4 * g + 3] = _mm512_unpackhi_epi64(p[1], p[3]);
    }
    // Then the quarters are a 4 by 4 matrix for each `c`.
    let mut out = [_mm512_setzero_si512(); 16];
    for c in 0..4 {
        let (a, b, d, e) = (fours[c], fours[4 + c], fours[8 + c], fours[12 + c]);
        let ab_even = _mm512_shuffle_i32x4::<0b10_00_10_00>(a, b);
        let ab_odd = _mm512_shuffle_i32x4::<0b11_01_11_01>(a, b);
        let de_even = _mm512_shuffle_i32x4::<0b10_00_10_00>(d, e);
        let de_odd = _mm512_shuffle_i32x4::<0b11_01_11_01>(d, e);
        out[c] = _mm512_shuffle_i32x4::<0b10_00_10_00>(ab_even, de_even);
        out[4 + c] = _mm512_shuffle_i32x4::<0b10_00_10_00>(ab_odd, de_odd);
        out[8 + c] = _mm512_shuffle_i32x4::<0b11_01_11_01>(ab_even, de_even);
        out[12 + c] = _mm512_shuffle_i32x4::<0b11_01_11_01>(ab_odd, de_odd);
    }
    out
}

/// All rows with one panel.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn multiply<T: Element>(_: Avx512, job: &Job<'_, '_, T>, outputs: Range<usize>, panel: &[i8]) {
    let x = job.part.x;
    let next = job.part.codes.as_ptr().wrapping_add(outputs.end * x.width);
    let mut next = Some(next);
    let finish = Finish::new(job, outputs);
    let mut row = 0;
    macro_rules! rows {
        ($count:literal) => {{
            let all = tile::<$count>(x, row, panel, next.take());
            for (index, sums) in all.into_iter().enumerate() {
                finish.row(row + index, sums);
            }
            row += $count;
        }};
    }
    while row + 12 <= x.rows {
        rows!(12);
    }
    if row + 8 <= x.rows {
        rows!(8);
    }
    if row + 4 <= x.rows {
        rows!(4);
    }
    match x.rows - row {
        0 => {}
        1 => rows!(1),
        2 => rows!(2),
        _ => rows!(3),
    }
    debug_assert_eq!(row, x.rows, "all of them");
}

/// Sums of `N` rows with one panel. Asks for 32 rows of the weight at `next` in passing.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn tile<const N: usize>(
    x: &Int8Rows,
    row: usize,
    panel: &[i8],
    next: Option<*const i8>,
) -> [[__m512i; 2]; N] {
    let quads = x.width.div_ceil(QUAD);
    assert!(
        row + N <= x.rows && quads * QUAD <= x.padded && panel.len() >= quads * QUAD * OUTPUTS,
        "rows and a panel of that width"
    );
    let rows: [*const i8; N] = std::array::from_fn(|n| x.row(row + n).as_ptr());
    let mut sums = [[_mm512_setzero_si512(); 2]; N];
    let mut w = panel.as_ptr();
    let (mut wanted, mut column) = (next, 0);
    for quad in 0..quads {
        if let Some(place) = wanted {
            // Two lines for each 128 bytes of the panel.
            _mm_prefetch::<_MM_HINT_T1>(place.wrapping_add(column));
            _mm_prefetch::<_MM_HINT_T1>(place.wrapping_add(column + 64));
            column += 128;
            if column >= x.width {
                (wanted, column) = (Some(place.wrapping_add(x.width)), 0);
            }
        }
        // SAFETY: the panel has two registers for each of `quads`, each row four bytes.
        unsafe {
            let left = _mm512_loadu_si512(w.cast());
            let right = _mm512_loadu_si512(w.add(64).cast());
            w = w.add(128);
            for (sums, x) in sums.iter_mut().zip(rows) {
                let x = x.add(quad * QUAD).cast::<i32>().read_unaligned();
                let x = _mm512_set1_epi32(x);
                sums[0] = _mm512_dpbusd_epi32(sums[0], left, x);
                sums[1] = _mm512_dpbusd_epi32(sums[1], right, x);
            }
        }
    }
    sums
}

/// From sums to results.
struct Finish<'a, 'b, 'c, T> {
    job: &'a Job<'b, 'c, T>,
    outputs: Range<usize>,
    scales: [f32; OUTPUTS],
    bias: [f32; OUTPUTS],
}

impl<'a, 'b, 'c, T: Element> Finish<'a, 'b, 'c, T> {
    fn new(job: &'a Job<'b, 'c, T>, outputs: Range<usize>) -> Self {
        let mut scales = [0.0; OUTPUTS];
        scales[..outputs.len()].copy_from_slice(&job.part.scales[outputs.clone()]);
        let mut bias = [0.0; OUTPUTS];
        if let Some(values) = job.part.bias {
            for (bias, value) in bias.iter_mut().zip(&values[outputs.clone()]) {
                *bias = value.to_f32();
            }
        }
        Finish {
            job,
            outputs,
            scales,
            bias,
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    fn row(&self, row: usize, sums: [__m512i; 2]) {
        let job = self.job;
        let x = job.part.x;
        let excess = _mm512_set1_epi32(x.sums[row].wrapping_mul(128));
        let scale = _mm512_set1_ps(x.scales[row]);
        let count = self.outputs.len();
        let mut results = [0.0_f32; OUTPUTS];
        for (sums, results) in sums.into_iter().zip(results.as_chunks_mut::<16>().0) {
            let sums = _mm512_cvtepi32_ps(_mm512_sub_epi32(sums, excess));
            // SAFETY: 16 floats.
            unsafe { _mm512_storeu_ps(results.as_mut_ptr(), _mm512_mul_ps(sums, scale)) };
        }
        if let Some(extra) = &job.extra {
            let at = row * job.outputs.len() + self.outputs.start - job.outputs.start;
            for (result, extra) in results.iter_mut().zip(&extra[at..at + count]) {
                *result += extra;
            }
        }
        let mut out = [T::from_f32(0.0); OUTPUTS];
        let factors = self.scales.iter().zip(&self.bias);
        for ((out, result), (scale, bias)) in out.iter_mut().zip(results).zip(factors) {
            *out = T::from_f32(result * scale + bias);
        }
        let column = job.first + self.outputs.start;
        match count {
            OUTPUTS => job.y.set_all(row, column, &out),
            _ => job.y.set_all(row, column, &out[..count]),
        }
    }
}
