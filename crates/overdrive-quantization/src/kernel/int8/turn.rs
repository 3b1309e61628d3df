//! From sums, with rows beside each other, to results, with outputs beside each other.
#![allow(unsafe_code)]

use std::arch::x86_64::*;
use std::ops::Range;

use super::Job;
use crate::kernel::activations::GROUP_ROWS;
use crate::kernel::element::Element;
use crate::kernel::simd::avx512::Avx512;

/// The results of a job.
pub(super) struct Turn<'a, 'b, 'c, T> {
    simd: Avx512,
    job: &'a Job<'b, 'c, T>,
}

/// Factors and addends of some outputs.
struct Outputs {
    range: Range<usize>,
    scales: [f32; OUTPUTS],
    bias: [f32; OUTPUTS],
}

/// Outputs at a time: sums must be there for as many, although they may mean nothing.
pub(super) const OUTPUTS: usize = 16;

impl<'a, 'b, 'c, T: Element> Turn<'a, 'b, 'c, T> {
    pub(super) fn new(simd: Avx512, job: &'a Job<'b, 'c, T>) -> Self {
        Turn { simd, job }
    }

    /// Writes the results of up to eight rows; `sums` has those of one output every `stride` numbers, a
    /// row each.
    pub(super) fn group(&self, rows: Range<usize>, sums: &[i32], stride: usize) {
        let job = self.job;
        for first in job.outputs.clone().step_by(OUTPUTS) {
            let range = first..(first + OUTPUTS).min(job.outputs.end);
            let mut outputs = Outputs {
                range: range.clone(),
                scales: [0.0; OUTPUTS],
                bias: [0.0; OUTPUTS],
            };
            outputs.scales[..range.len()].copy_from_slice(&job.part.scales[range.clone()]);
            if let Some(values) = job.part.bias {
                for (bias, value) in outputs.bias.iter_mut().zip(&values[range.clone()]) {
                    *bias = value.to_f32();
                }
            }
            let from = (first - job.outputs.start) * stride;
            // SAFETY: `simd` proves that the machine has the instructions.
            let turned = unsafe { turned(self.simd, &sums[from..], stride) };
            for (row, sums) in rows.clone().zip(turned) {
                // SAFETY: as above.
                unsafe { self.row(row, &outputs, sums) };
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    fn row(&self, row: usize, outputs: &Outputs, sums: __m512i) {
        let job = self.job;
        let x = job.part.x;
        // Codes of the weight were too large by 128.
        let excess = _mm512_set1_epi32(x.sums[row].wrapping_mul(128));
        let scale = _mm512_set1_ps(x.scales[row]);
        let sums = _mm512_cvtepi32_ps(_mm512_sub_epi32(sums, excess));
        let mut results = [0.0_f32; OUTPUTS];
        // SAFETY: 16 floats.
        unsafe { _mm512_storeu_ps(results.as_mut_ptr(), _mm512_mul_ps(sums, scale)) };
        let count = outputs.range.len();
        if let Some(extra) = &job.extra {
            let at = row * job.outputs.len() + outputs.range.start - job.outputs.start;
            for (result, extra) in results.iter_mut().zip(&extra[at..at + count]) {
                *result += extra;
            }
        }
        let mut out = [T::from_f32(0.0); OUTPUTS];
        let factors = outputs.scales.iter().zip(&outputs.bias);
        for ((out, result), (scale, bias)) in out.iter_mut().zip(results).zip(factors) {
            // Not fused, so that all instruction sets have the same results.
            *out = T::from_f32(result * scale + bias);
        }
        let column = job.first + outputs.range.start;
        match count {
            OUTPUTS => job.y.set_all(row, column, &out),
            _ => job.y.set_all(row, column, &out[..count]),
        }
    }
}

/// Eight numbers each of 16 outputs: for each of the eight, those of the outputs.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn turned(_: Avx512, sums: &[i32], stride: usize) -> [__m512i; GROUP_ROWS] {
    assert!(
        sums.len() >= (OUTPUTS - 1) * stride + GROUP_ROWS,
        "the sums of 16 outputs"
    );
    // SAFETY: asserted, for `output` below 16.
    let load =
        |output: usize| unsafe { _mm256_loadu_si256(sums.as_ptr().add(output * stride).cast()) };
    // Outputs 0..4 beside 4..8, then 8..12 beside 12..16.
    let mut a = [_mm512_setzero_si512(); 8];
    for (i, a) in a.iter_mut().enumerate() {
        let output = i / 4 * 8 + i % 4;
        let low = _mm512_castsi256_si512(load(output));
        *a = _mm512_inserti64x4::<1>(low, load(output + 4));
    }
    // Each quarter of four registers is a square: its columns become rows.
    let mut columns = [[_mm512_setzero_si512(); 4]; 2];
    for (columns, a) in columns.iter_mut().zip(a.as_chunks::<4>().0) {
        let low = [
            _mm512_unpacklo_epi32(a[0], a[1]),
            _mm512_unpacklo_epi32(a[2], a[3]),
        ];
        let high = [
            _mm512_unpackhi_epi32(a[0], a[1]),
            _mm512_unpackhi_epi32(a[2], a[3]),
        ];
        *columns = [
            _mm512_unpacklo_epi64(low[0], low[1]),
            _mm512_unpackhi_epi64(low[0], low[1]),
            _mm512_unpacklo_epi64(high[0], high[1]),
            _mm512_unpackhi_epi64(high[0], high[1]),
        ];
    }
    let mut out = [_mm512_setzero_si512(); GROUP_ROWS];
    for c in 0..4 {
        let (first, second) = (columns[0][c], columns[1][c]);
        out[c] = _mm512_shuffle_i64x2::<0x88>(first, second);
        out[4 + c] = _mm512_shuffle_i64x2::<0xdd>(first, second);
    }
    out
}
