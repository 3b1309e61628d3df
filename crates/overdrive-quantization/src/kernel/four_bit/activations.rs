//! Rows of activations as words of up to 16 bits, in the order in which packed codes come out.

use super::lines::Lines;
use super::map::{CodedMap, Coding, MAX_GRANULE, WordTable, levels};
use super::words::{WORDS, Words, Work, run_on};
use crate::kernel::simd::{InstructionSet, LANES};
use crate::kernel::threads::{Target, chunks};

/// Inputs that share a scale.
pub(crate) const GROUP: usize = MAX_GRANULE;

/// Words of a unit of codes of 4 bits.
const MAX_UNIT: usize = 8 * LANES;

/// Activations that are quantized by one thread.
const PARALLEL: usize = 32 << 10;

/// What the words of activations depend on. Maps that agree in it share them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Layout<'a> {
    /// Inputs of a lane: 8 or 4.
    per_lane: usize,
    /// Codes of 4 bits whose first is in the high half of a byte.
    high_first: bool,
    /// Steps on each side of zero.
    levels: i16,
    /// What the integers of the weight are multiples of.
    unit: f32,
    granule: usize,
    /// Whether the sums of granules are wanted.
    sums: bool,
    order: Option<&'a [i32]>,
    inputs: usize,
}

impl<'a> Layout<'a> {
    /// `None` for maps without a granule.
    pub(crate) fn of(map: &CodedMap<'a>) -> Option<Self> {
        let (high_first, levels, unit) = match &map.coding {
            Coding::Nibbles { values, high_first } => {
                let table = WordTable::new(values);
                (*high_first, table.levels(), table.unit)
            }
            Coding::Signed => (false, levels(128), 1.0),
            Coding::Unsigned => (false, levels(255), 1.0),
        };
        Some(Layout {
            per_lane: map.coding.per_lane(),
            high_first,
            levels,
            unit,
            granule: map.granule()?,
            sums: map.offsets.is_some(),
            order: map.order,
            inputs: map.inputs,
        })
    }

    /// Vectors of words in a unit: what 64 bytes of codes are multiplied with.
    fn parts(&self) -> usize {
        self.per_lane / 2
    }

    /// Inputs of a unit.
    fn unit_inputs(&self) -> usize {
        self.per_lane * LANES
    }

    /// The place within a lane of the first of the two words of part `part`; the second is half a
    /// lane further.
    fn place(&self, part: usize) -> usize {
        part ^ usize::from(self.high_first)
    }
}

/// Rows of activations, quantized symmetrically with a scale for each 64 inputs.
///
/// Words are `(units, held, parts, 32)`: word `2 l + h` of part `p` is input `place(p) + h · per_lane / 2`
/// of lane `l`. Inputs are padded to whole units with zeros.
#[derive(Debug)]
pub(crate) struct WordRows {
    pub(crate) words: Lines<i16>,
    /// Scale times the unit of the weight's integers, `(held, stride)`; zeros beyond the granules.
    pub(crate) scales: Lines<f32>,
    /// Sum of the activations as they are quantized, likewise; empty unless wanted.
    pub(crate) sums: Lines<f32>,
    pub(crate) rows: usize,
    /// Rows that words and scales have: more than three are made even, with zeros.
    pub(crate) held: usize,
    pub(crate) granules: usize,
    pub(crate) granule: usize,
    /// Numbers of a row of scales: the granules, rounded up to whole vectors.
    pub(crate) stride: usize,
    pub(crate) units: usize,
}

impl WordRows {
    /// Quantizes `x (rows, inputs)`.
    pub(crate) fn new(set: InstructionSet, x: &[f32], layout: &Layout<'_>) -> Self {
        let rows = x.len().checked_div(layout.inputs).unwrap_or(0);
        let units = layout.inputs.div_ceil(layout.unit_inputs());
        let parts = layout.parts();
        let held = if rows > 3 {
            rows.next_multiple_of(2)
        } else {
            rows
        };
        let granules = layout.inputs / layout.granule;
        let stride = granules.next_multiple_of(LANES);
        let floats = held * stride;
        let mut all = WordRows {
            words: Lines::new(units * held * parts * WORDS),
            scales: Lines::new(floats),
            sums: Lines::new(if layout.sums { floats } else { 0 }),
            rows,
            held,
            granules,
            granule: layout.granule,
            stride,
            units,
        };
        let out = Out {
            words: Target::new(&mut all.words, parts * WORDS),
            scales: Target::new(&mut all.scales, stride),
            sums: (!all.sums.is_empty()).then(|| Target::new(&mut all.sums, stride)),
            held,
        };
        chunks(rows, 1, x.len() >= PARALLEL, |range| {
            for row in range {
                let x = &x[row * layout.inputs..(row + 1) * layout.inputs];
                run_on(
                    set,
                    Quantize {
                        x,
                        layout,
                        row,
                        out: &out,
                    },
                );
            }
        });
        all
    }
}

/// What threads write, each the places of its own rows.
struct Out<'a> {
    words: Target<'a, i16>,
    scales: Target<'a, f32>,
    sums: Option<Target<'a, f32>>,
    held: usize,
}

/// One row.
struct Quantize<'a> {
    x: &'a [f32],
    layout: &'a Layout<'a>,
    row: usize,
    out: &'a Out<'a>,
}

impl Work for Quantize<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Words>(self, _: S) {
        match self.layout.per_lane {
            8 => self.units::<8>(),
            _ => self.units::<4>(),
        }
    }
}

impl Quantize<'_> {
    /// `L` inputs a lane. Plain loops, which become vectors of whatever set they are compiled for.
    #[inline(always)]
    fn units<const L: usize>(&self) {
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
            plain[count..].fill(0);
            for part in 0..L / 2 {
                let place = self.layout.place(part);
                let words = &mut words[part * WORDS..(part + 1) * WORDS];
                for lane in 0..LANES {
                    words[2 * lane] = plain[lane * L + place];
                    words[2 * lane + 1] = plain[lane * L + place + L / 2];
                }
            }
            let at = unit * self.out.held + self.row;
            self.out.words.set_all(at, 0, &words[..unit_inputs]);
        }
    }

    /// Up to [`GROUP`] inputs from `first` on, which share a scale.
    #[inline(always)]
    fn group(&self, first: usize, words: &mut [i16]) {
        let mut x = [0.0_f32; GROUP];
        let count = words.len();
        match self.layout.order {
            None => x[..count].copy_from_slice(&self.x[first..first + count]),
            Some(order) => {
                for (x, &input) in x.iter_mut().zip(&order[first..first + count]) {
                    // An order that names an input that is not there is refused where maps are made.
                    *x = self.x[input.unsigned_abs() as usize];
                }
            }
        }
        // Magnitudes of floats compare as their bits do, and NaN is larger than all.
        let bits = x
            .iter()
            .fold(0, |most, x| (x.to_bits() & !(1 << 31)).max(most));
        let most = f32::from_bits(bits);
        let levels = f32::from(self.layout.levels);
        let inverse = levels / most;
        // The quotient by a subnormal number may be too much for a float: such groups are zero.
        let inverse = if inverse.is_finite() { inverse } else { 0.0 };
        // Adding 1.5 · 2²³ leaves the nearest integer (ties to even) in the low bits of the sum.
        const TO_INTEGER: f32 = 12_582_912.0;
        let mut rounded = [0_i16; GROUP];
        for (word, x) in rounded.iter_mut().zip(&x) {
            #[allow(
                clippy::cast_possible_truncation,
                reason = "the low 16 bits are the integer"
            )]
            {
                *word = (x * inverse + TO_INTEGER).to_bits() as i16;
            }
        }
        words.copy_from_slice(&rounded[..count]);
        let scale = most / levels;
        let granule = self.layout.granule;
        for at in (0..count).step_by(granule) {
            let index = (first + at) / granule;
            self.out
                .scales
                .set(self.row, index, scale * self.layout.unit);
            if let Some(sums) = &self.out.sums {
                let of_granule = &rounded[at..at + granule];
                let sum: i32 = of_granule.iter().map(|&word| i32::from(word)).sum();
                #[allow(clippy::cast_precision_loss, reason = "at most 2^21")]
                sums.set(self.row, index, sum as f32 * scale);
            }
        }
    }
}
