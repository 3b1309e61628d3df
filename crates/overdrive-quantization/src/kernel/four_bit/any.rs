//! Exact weights in floats: of some rows, for products of floats, and for maps whose blocks fit rows so
//! badly that integers will not do.

use std::ops::Range;

use super::map::{CodedMap, Coding};
use super::words::{Words, Work, run_on};
use crate::codec::jobs::run_jobs;
use crate::kernel::element::Element;
use crate::kernel::simd::{InstructionSet, LANES};
use crate::kernel::threads::Target;

/// Weights of a chunk that a thread makes at a time.
const CHUNK: usize = 64 << 10;

/// Writes rows `rows` of the weight to `out (rows, inputs)`: the number that a code stands for times its
/// scale, plus the offset, rounded at each step. Places are those of inputs: an order is undone.
pub(crate) fn dequantize_rows<T: Element>(map: &CodedMap<'_>, rows: Range<usize>, out: &mut [T]) {
    dequantize_on(InstructionSet::best(), map, rows, out);
}

/// As [`dequantize_rows`], with one instruction set.
pub(crate) fn dequantize_on<T: Element>(
    set: InstructionSet,
    map: &CodedMap<'_>,
    rows: Range<usize>,
    out: &mut [T],
) {
    let inputs = map.inputs;
    if inputs == 0 {
        return;
    }
    let out = &mut out[..rows.len() * inputs];
    // Rows of their own for each job, so that floats are written once.
    let chunk = (CHUNK / inputs).max(1);
    let jobs = out.chunks_mut(chunk * inputs).zip(rows.step_by(chunk));
    run_jobs(jobs, |(out, first)| {
        let mut row = vec![0.0; inputs];
        let mut ordered = Vec::new();
        for (row_index, out) in (first..).zip(out.chunks_exact_mut(inputs)) {
            let written = match map.order {
                None => T::as_floats_mut(out),
                Some(_) => None,
            };
            if let Some(out) = written {
                let row = row_index;
                run_on(set, Row { map, row, out });
                continue;
            }
            let work = Row {
                map,
                row: row_index,
                out: &mut row,
            };
            run_on(set, work);
            let row = in_order(map, &row, &mut ordered);
            for (out, value) in out.iter_mut().zip(row) {
                *out = T::from_f32(*value);
            }
        }
    });
}

/// The row with each weight at the place of its input.
fn in_order<'a>(map: &CodedMap<'_>, row: &'a [f32], scratch: &'a mut Vec<f32>) -> &'a [f32] {
    let Some(order) = map.order else {
        return row;
    };
    scratch.resize(row.len(), 0.0);
    for (value, &input) in row.iter().zip(order) {
        scratch[input.unsigned_abs() as usize] = *value;
    }
    scratch
}

/// Outputs `outputs` of `x · weightᵀ + bias`, in floats.
pub(super) fn any_part<T: Element>(
    set: InstructionSet,
    x: &[f32],
    map: &CodedMap<'_>,
    bias: Option<&[T]>,
    outputs: Range<usize>,
    column: usize,
    target: &Target<'_, T>,
) {
    let mut row = vec![0.0; map.inputs];
    let mut ordered = Vec::new();
    for output in outputs {
        run_on(
            set,
            Row {
                map,
                row: output,
                out: &mut row,
            },
        );
        let weights = in_order(map, &row, &mut ordered);
        let bias = bias.map_or(0.0, |bias| bias[output].to_f32());
        for (index, x) in x.chunks_exact(map.inputs).enumerate() {
            let sum = run_on(set, Dot { a: x, b: weights });
            target.set(index, column + output, T::from_f32(sum + bias));
        }
    }
}

/// One row of the weight, in floats, in the order of its codes.
struct Row<'a> {
    map: &'a CodedMap<'a>,
    row: usize,
    out: &'a mut [f32],
}

impl Work for Row<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Words>(self, s: S) {
        let map = self.map;
        let first = self.row * map.inputs;
        let fits = map.granule().is_some_and(|granule| granule >= LANES);
        let mut at = 0;
        if fits {
            // Blocks and rows are multiples of 16.
            let block = map.scales.block;
            while at < map.inputs {
                let weight = first + at;
                let count = (block - weight % block).min(map.inputs - at);
                let scale = map.scales.of(weight);
                let offset = map.offsets.map(|offsets| offsets.of(weight));
                self::span(s, map, weight, scale, offset, &mut self.out[at..at + count]);
                at += count;
            }
            return;
        }
        for (at, out) in self.out.iter_mut().enumerate() {
            let weight = first + at;
            let product = value(map, weight) * map.scales.of(weight);
            *out = product + map.offsets.map_or(0.0, |offsets| offsets.of(weight));
        }
    }
}

/// Weights from `first` on, a multiple of 16, that share a scale; as many as `out` takes.
#[inline(always)]
fn span<S: Words>(
    s: S,
    map: &CodedMap<'_>,
    first: usize,
    scale: f32,
    offset: Option<f32>,
    out: &mut [f32],
) {
    let bytes = first / map.coding.per_byte();
    let codes = &map.codes[bytes..bytes + out.len() / map.coding.per_byte()];
    match &map.coding {
        Coding::Nibbles { values, high_first } => {
            let (codes, _) = codes.as_chunks::<8>();
            let (whole, _) = out.as_chunks_mut::<LANES>();
            for (codes, out) in codes.iter().zip(whole) {
                let values = s.values(codes, values, *high_first);
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

/// What one code stands for.
fn value(map: &CodedMap<'_>, weight: usize) -> f32 {
    let code = map.codes[weight / map.coding.per_byte()];
    match &map.coding {
        Coding::Nibbles { values, high_first } => {
            let high = (weight % 2 == 1) != *high_first;
            values[usize::from(if high { code >> 4 } else { code & 15 })]
        }
        Coding::Signed => f32::from(code.cast_signed()),
        Coding::Unsigned => f32::from(code),
    }
}

/// The product of two rows.
struct Dot<'a> {
    a: &'a [f32],
    b: &'a [f32],
}

impl Work for Dot<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Words>(self, s: S) -> f32 {
        let mut sums = [s.splat(0.0); 2];
        let (a, rest_a) = self.a.as_chunks::<LANES>();
        let (b, rest_b) = self.b.as_chunks::<LANES>();
        for (index, (a, b)) in a.iter().zip(b).enumerate() {
            sums[index % 2] = s.mul_add(s.load_f32(a), s.load_f32(b), sums[index % 2]);
        }
        let rest: f32 = rest_a.iter().zip(rest_b).map(|(a, b)| a * b).sum();
        s.reduce_add(s.add(sums[0], sums[1])) + rest
    }
}
