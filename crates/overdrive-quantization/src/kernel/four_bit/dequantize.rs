//! Dequantization of rows, and the GEMM in floats of weights whose blocks do not fit the integer kernels.

use std::ops::Range;

use overdrive_kernels::threads::run_jobs;
use overdrive_kernels::{Element, InstructionSet, Kernel, LANES, Simd};

use super::coded_weight::{CodedWeight, Coding};
use crate::kernel::joint_gemm::Results;

/// The number of elements that a thread dequantizes at a time.
const CHUNK: usize = 64 << 10;

/// Dequantizes rows `rows` of the weight to `out (rows, inputs)`: the number of a code times its scale, plus the
/// offset, rounded at each step. Reordered columns are put back in the order of the inputs.
pub(crate) fn dequantize_rows<T: Element>(
    weight: &CodedWeight<'_>,
    rows: Range<usize>,
    out: &mut [T],
) {
    dequantize_on(InstructionSet::best(), weight, rows, out);
}

/// Computes [`dequantize_rows`] with one instruction set.
pub(crate) fn dequantize_on<T: Element>(
    set: InstructionSet,
    weight: &CodedWeight<'_>,
    rows: Range<usize>,
    out: &mut [T],
) {
    let inputs = weight.inputs;
    if inputs == 0 {
        return;
    }
    let out = &mut out[..rows.len() * inputs];
    // Each job has whole rows, so that f32 is written in place.
    let chunk = (CHUNK / inputs).max(1);
    let jobs = out.chunks_mut(chunk * inputs).zip(rows.step_by(chunk));
    run_jobs(jobs, |(out, first)| {
        let mut row = vec![0.0; inputs];
        let mut ordered = Vec::new();
        for (row_index, out) in (first..).zip(out.chunks_exact_mut(inputs)) {
            let written = match weight.order {
                None => T::as_acc_mut(out),
                Some(_) => None,
            };
            if let Some(out) = written {
                let row = row_index;
                set.run(Row { weight, row, out });
                continue;
            }
            set.run(Row {
                weight,
                row: row_index,
                out: &mut row,
            });
            let row = in_order(weight, &row, &mut ordered);
            T::narrow(set, row, out);
        }
    });
}

/// Returns the row in the order of the inputs.
fn in_order<'a>(weight: &CodedWeight<'_>, row: &'a [f32], scratch: &'a mut Vec<f32>) -> &'a [f32] {
    let Some(order) = weight.order else {
        return row;
    };
    scratch.resize(row.len(), 0.0);
    for (value, &input) in row.iter().zip(order) {
        scratch[input.unsigned_abs() as usize] = *value;
    }
    scratch
}

/// Computes the outputs `outputs` of `x · weightᵀ`, in floats.
pub(super) fn float_gemm(
    set: InstructionSet,
    x: &[f32],
    weight: &CodedWeight<'_>,
    outputs: Range<usize>,
    results: &mut dyn Results,
) {
    let mut row = vec![0.0; weight.inputs];
    let mut ordered = Vec::new();
    for output in outputs {
        set.run(Row {
            weight,
            row: output,
            out: &mut row,
        });
        let weights = in_order(weight, &row, &mut ordered);
        for (index, x) in x.chunks_exact(weight.inputs).enumerate() {
            let sum = set.run(Dot { a: x, b: weights });
            results.put(index, output, &[sum]);
        }
    }
}

/// One row of the weight as floats, in the order of its codes.
struct Row<'a> {
    weight: &'a CodedWeight<'a>,
    row: usize,
    out: &'a mut [f32],
}

impl Kernel for Row<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let weight = self.weight;
        let first = self.row * weight.inputs;
        let fits = weight.granule().is_some_and(|granule| granule >= LANES);
        let mut at = 0;
        if fits {
            // Blocks and rows are multiples of 16.
            let block = weight.scales.block;
            while at < weight.inputs {
                let element = first + at;
                let count = (block - element % block).min(weight.inputs - at);
                let scale = weight.scales.of(element);
                let offset = weight.offsets.map(|offsets| offsets.of(element));
                let out = &mut self.out[at..at + count];
                span(s, weight, element, scale, offset, out);
                at += count;
            }
            return;
        }
        for (at, out) in self.out.iter_mut().enumerate() {
            let element = first + at;
            let product = value(weight, element) * weight.scales.of(element);
            *out = product + weight.offsets.map_or(0.0, |offsets| offsets.of(element));
        }
    }
}

/// Dequantizes the elements from `first` on, a multiple of 16, that share a scale: as many as `out` takes.
#[inline(always)]
fn span<S: Simd>(
    s: S,
    weight: &CodedWeight<'_>,
    first: usize,
    scale: f32,
    offset: Option<f32>,
    out: &mut [f32],
) {
    let bytes = first / weight.coding.per_byte();
    let codes = &weight.codes[bytes..bytes + out.len() / weight.coding.per_byte()];
    match &weight.coding {
        Coding::Nibbles { values, high_first } => {
            let (codes, _) = codes.as_chunks::<8>();
            let (whole, _) = out.as_chunks_mut::<LANES>();
            for (codes, out) in codes.iter().zip(whole) {
                let values = s.decode_nibbles(codes, values, *high_first);
                s.store_f32(s.mul(values, s.splat(scale)), out);
            }
        }
        Coding::Signed => {
            for (out, &code) in out.iter_mut().zip(codes) {
                *out = f32::from(code.cast_signed()) * scale;
            }
        }
        Coding::Unsigned => {
            for (out, &code) in out.iter_mut().zip(codes) {
                *out = f32::from(code) * scale;
            }
        }
    }
    if let Some(offset) = offset {
        for out in out {
            *out += offset;
        }
    }
}

/// Returns the number of one code.
fn value(weight: &CodedWeight<'_>, element: usize) -> f32 {
    let code = weight.codes[element / weight.coding.per_byte()];
    match &weight.coding {
        Coding::Nibbles { values, high_first } => {
            let high = (element % 2 == 1) != *high_first;
            values[usize::from(if high { code >> 4 } else { code & 15 })]
        }
        Coding::Signed => f32::from(code.cast_signed()),
        Coding::Unsigned => f32::from(code),
    }
}

/// The dot product of two rows.
struct Dot<'a> {
    a: &'a [f32],
    b: &'a [f32],
}

impl Kernel for Dot<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let mut sums = [s.splat(0.0); 2];
        let (a, rest_a) = self.a.as_chunks::<LANES>();
        let (b, rest_b) = self.b.as_chunks::<LANES>();
        for (index, (a, b)) in a.iter().zip(b).enumerate() {
            // Two sums, since one would wait for its own latency.
            sums[index % 2] = s.mul_add(s.load_f32(a), s.load_f32(b), sums[index % 2]);
        }
        let rest: f32 = rest_a.iter().zip(rest_b).map(|(a, b)| a * b).sum();
        s.reduce_add(s.add(sums[0], sums[1])) + rest
    }
}
