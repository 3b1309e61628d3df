//! Rows of activations as words of up to 16 bits, in the order in which codes are unpacked.

use overdrive_kernels::threads::run_jobs;
use overdrive_kernels::{ColumnsMut, InstructionSet, Kernel, LANES, Simd, WORDS};

use super::aligned::AlignedVec;
use super::coded_weight::{CodedWeight, Coding, MAX_GRANULE, WordTable, levels};
use crate::codec::floats::{max_magnitude_of, round_bits};

/// The number of inputs that share a scale.
pub(crate) const GROUP: usize = MAX_GRANULE;

/// The number of words of a unit of codes of 4 bits.
const MAX_UNIT: usize = 8 * LANES;

/// The number of activations below which one thread quantizes all.
const PARALLEL: usize = 32 << 10;

/// The layout of the words of activations. Weights of the same layout share them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Layout<'a> {
    /// The number of inputs of a lane: 8 or 4.
    per_lane: usize,
    /// If `true`, the first of two codes is in the high half of a byte.
    high_first: bool,
    /// The largest word.
    levels: i16,
    /// The value of a step of the weight.
    unit: f32,
    granule: usize,
    /// If `true`, the sums of granules are needed, for offsets.
    sums: bool,
    order: Option<&'a [i32]>,
    inputs: usize,
}

impl<'a> Layout<'a> {
    /// Returns the layout for a weight; `None` if it has no granule.
    pub(crate) fn of(weight: &CodedWeight<'a>) -> Option<Self> {
        let (high_first, levels, unit) = match &weight.coding {
            Coding::Nibbles { values, high_first } => {
                let table = WordTable::new(values);
                (*high_first, table.levels(), table.unit)
            }
            Coding::Signed => (false, levels(128), 1.0),
            Coding::Unsigned => (false, levels(255), 1.0),
        };
        Some(Layout {
            per_lane: weight.coding.per_lane(),
            high_first,
            levels,
            unit,
            granule: weight.granule()?,
            sums: weight.offsets.is_some(),
            order: weight.order,
            inputs: weight.inputs,
        })
    }

    /// Returns the number of vectors of words in a unit, the inputs of 64 bytes of codes.
    fn parts(&self) -> usize {
        self.per_lane / 2
    }

    /// Returns the number of inputs of a unit.
    fn unit_inputs(&self) -> usize {
        self.per_lane * LANES
    }

    /// Returns the position in a lane of the first of the two words of part `part`; the second is half a lane
    /// further.
    fn position(&self, part: usize) -> usize {
        part ^ usize::from(self.high_first)
    }
}

/// Rows of activations, quantized symmetrically with a scale for each 64 inputs.
///
/// Words are `(units, held, parts, 32)`: word `2 l + h` of part `p` is input `position(p) + h · per_lane / 2` of
/// lane `l`. Inputs are padded to whole units with zeros.
#[derive(Debug)]
pub(crate) struct WordRows {
    pub(crate) words: AlignedVec<i16>,
    /// The scales times the unit of the weight, `(held, stride)`; zeros beyond the granules.
    pub(crate) scales: AlignedVec<f32>,
    /// The sums of the quantized activations of each granule, likewise; empty unless needed.
    pub(crate) sums: AlignedVec<f32>,
    pub(crate) rows: usize,
    /// The number of rows of words and scales, padded to an even number, since the GEMM takes two at a time.
    pub(crate) held: usize,
    pub(crate) granules: usize,
    pub(crate) granule: usize,
    /// The number of scales of a row: the granules, rounded up to whole vectors.
    pub(crate) stride: usize,
    pub(crate) units: usize,
}

impl WordRows {
    /// Quantizes `x (rows, inputs)`.
    pub(crate) fn new(set: InstructionSet, x: &[f32], layout: &Layout<'_>) -> Self {
        let rows = x.len().checked_div(layout.inputs).unwrap_or(0);
        let units = layout.inputs.div_ceil(layout.unit_inputs());
        let parts = layout.parts();
        let held = rows.next_multiple_of(2);
        let granules = layout.inputs / layout.granule;
        let stride = granules.next_multiple_of(LANES);
        let floats = held * stride;
        let mut all = WordRows {
            words: AlignedVec::new(units * held * parts * WORDS),
            scales: AlignedVec::new(floats),
            sums: AlignedVec::new(if layout.sums { floats } else { 0 }),
            rows,
            held,
            granules,
            granule: layout.granule,
            stride,
            units,
        };
        // The words of a row are columns of the matrix of units.
        let row_words = parts * WORDS;
        let mut rest = ColumnsMut::new(&mut all.words, held * row_words);
        let mut sums = all.sums.chunks_mut(stride.max(1));
        let inputs = x.chunks_exact(layout.inputs.max(1));
        let outs = inputs.zip(all.scales.chunks_mut(stride.max(1)));
        let mut jobs = Vec::with_capacity(rows);
        for (row, (x, scales)) in outs.take(rows).enumerate() {
            let (words, after) = rest.split_at((row + 1) * row_words);
            rest = after;
            jobs.push(Quantize {
                x,
                layout,
                words,
                scales,
                sums: sums.next(),
            });
        }
        if x.len() >= PARALLEL {
            run_jobs(jobs.into_iter(), |job| set.run(job));
        } else {
            jobs.into_iter().for_each(|job| set.run(job));
        }
        all
    }
}

/// The quantization of one row.
struct Quantize<'a> {
    x: &'a [f32],
    layout: &'a Layout<'a>,
    /// The words of the row, `(units, parts · 32)`.
    words: ColumnsMut<'a, i16>,
    scales: &'a mut [f32],
    sums: Option<&'a mut [f32]>,
}

impl Kernel for Quantize<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, _: S) {
        match self.layout.per_lane {
            8 => self.units::<8>(),
            _ => self.units::<4>(),
        }
    }
}

impl Quantize<'_> {
    /// Quantizes units of `L` inputs in a lane, in plain loops, which the compiler vectorizes for each set.
    #[inline(always)]
    fn units<const L: usize>(&mut self) {
        let unit_inputs = L * LANES;
        let mut plain = [0_i16; MAX_UNIT];
        let mut words = [0_i16; MAX_UNIT];
        for unit in 0..self.x.len().div_ceil(unit_inputs) {
            let first = unit * unit_inputs;
            let count = unit_inputs.min(self.x.len() - first);
            for at in (0..count).step_by(GROUP) {
                let of = at..(at + GROUP).min(count);
                self.group(first + at, &mut plain[of]);
            }
            // The last unit is padded: its codes beyond the row are multiplied with zeros.
            plain[count..].fill(0);
            for part in 0..L / 2 {
                let position = self.layout.position(part);
                let words = &mut words[part * WORDS..(part + 1) * WORDS];
                for lane in 0..LANES {
                    words[2 * lane] = plain[lane * L + position];
                    words[2 * lane + 1] = plain[lane * L + position + L / 2];
                }
            }
            self.words
                .row_mut(unit)
                .copy_from_slice(&words[..unit_inputs]);
        }
    }

    /// Quantizes up to [`GROUP`] inputs from `first` on, which share a scale.
    #[inline(always)]
    fn group(&mut self, first: usize, words: &mut [i16]) {
        let mut x = [0.0_f32; GROUP];
        let count = words.len();
        match self.layout.order {
            None => x[..count].copy_from_slice(&self.x[first..first + count]),
            Some(order) => {
                for (x, &input) in x.iter_mut().zip(&order[first..first + count]) {
                    // `coded_weight` refuses an order that names an input that does not exist.
                    *x = self.x[input.unsigned_abs() as usize];
                }
            }
        }
        let most = max_magnitude_of(&x);
        let levels = f32::from(self.layout.levels);
        let inverse = levels / most;
        // The quotient by a subnormal number may overflow: such groups are zero.
        let inverse = if inverse.is_finite() { inverse } else { 0.0 };
        let mut rounded = [0_i16; GROUP];
        for (word, x) in rounded.iter_mut().zip(&x) {
            #[allow(
                clippy::cast_possible_truncation,
                reason = "the low 16 bits are the integer"
            )]
            {
                *word = round_bits(x * inverse) as i16;
            }
        }
        words.copy_from_slice(&rounded[..count]);
        let scale = most / levels;
        let granule = self.layout.granule;
        for at in (0..count).step_by(granule) {
            let index = (first + at) / granule;
            self.scales[index] = scale * self.layout.unit;
            if let Some(sums) = &mut self.sums {
                let of_granule = &rounded[at..at + granule];
                let sum: i32 = of_granule.iter().map(|&word| i32::from(word)).sum();
                #[allow(clippy::cast_precision_loss, reason = "at most 2^21")]
                {
                    sums[index] = sum as f32 * scale;
                }
            }
        }
    }
}
