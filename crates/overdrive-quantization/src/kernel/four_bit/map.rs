//! A weight of small codes, as slices.

use super::scales::Scales;

/// What codes stand for, before their scale.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Coding {
    /// 4 bits, that choose one of 16 numbers. The first of two is in the high half of a byte where
    /// `high_first`.
    Nibbles { values: [f32; 16], high_first: bool },
    /// 8 bits with a sign.
    Signed,
    /// 8 bits without.
    Unsigned,
}

impl Coding {
    /// Codes `0..16` less `zero`.
    pub(crate) fn integers(zero: u8) -> Coding {
        let mut values = [0.0; 16];
        for (code, value) in (0_u8..).zip(&mut values) {
            *value = f32::from(code) - f32::from(zero);
        }
        Coding::Nibbles {
            values,
            high_first: false,
        }
    }

    /// NF4 and FP4: what codes stand for, packed as bitsandbytes packs them.
    pub(crate) fn book(values: [f32; 16]) -> Coding {
        Coding::Nibbles {
            values,
            high_first: true,
        }
    }

    fn is_table(&self, table: &[f32; 16]) -> bool {
        matches!(self, Coding::Nibbles { values, .. } if values == table)
    }

    /// Weights in a byte.
    pub(crate) fn per_byte(&self) -> usize {
        match self {
            Coding::Nibbles { .. } => 2,
            Coding::Signed | Coding::Unsigned => 1,
        }
    }

    /// Weights in a lane of four bytes.
    pub(crate) fn per_lane(&self) -> usize {
        4 * self.per_byte()
    }
}

/// Largest word that a code of a code book becomes: with activations of 13 bits, 64 products of such
/// words fit a sum of 32 bits. 1/16000 of the largest weight of a block is the rounding of that.
const BOOK_STEPS: f32 = 8191.0;

/// The numbers of a code book as words.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct WordTable {
    pub(crate) words: [i16; 16],
    /// `value ≈ word · unit`; without the sign of approximation where all values are multiples of one
    /// number (integers, FP4).
    pub(crate) unit: f32,
}

impl WordTable {
    pub(crate) fn new(values: &[f32; 16]) -> WordTable {
        let most = values
            .iter()
            .fold(0.0_f32, |most, value| most.max(value.abs()));
        // The step of integers, and of FP4, whose smallest number is 1/192 of its largest.
        let exact = [1.0, most / 192.0].into_iter().find(|step| {
            values.iter().all(|value| {
                let steps = value / step;
                (steps - steps.round()).abs() < 1e-3 && steps.abs() < 256.0
            })
        });
        let step = match exact {
            Some(step) if step > 0.0 => step,
            _ if most > 0.0 => most / BOOK_STEPS,
            _ => 1.0,
        };
        #[allow(clippy::cast_possible_truncation, reason = "at most 8191")]
        WordTable {
            words: values.map(|value| (value / step).round() as i16),
            unit: step,
        }
    }

    /// Steps that activations may have on each side of zero, so that 64 products fit 31 bits.
    pub(crate) fn levels(&self) -> i16 {
        let most = self.words.iter().map(|word| word.unsigned_abs()).max();
        levels(most.unwrap_or(1))
    }
}

/// The numbers of a code book as bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ByteTable {
    /// Meaningless where codes are numbers themselves.
    pub(crate) values: [i8; 16],
    /// `value ≈ byte · unit`: exact for integers. The numbers of NF4 and FP4 are off by at most 1/254 of
    /// the largest, where the steps between them are 1/13 of it and more (but for the smallest of FP4,
    /// which is 1/192 and becomes 1/127).
    pub(crate) unit: f32,
    /// The code that stands for zero, where codes are numbers themselves.
    pub(crate) zero: Option<u8>,
}

impl ByteTable {
    pub(crate) fn new(values: &[f32; 16]) -> ByteTable {
        // The lowest code stands for the least number.
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "compared with what it was"
        )]
        let zero = -values[0] as u8;
        let zero = Coding::integers(zero).is_table(values).then_some(zero);
        let most = values
            .iter()
            .fold(0.0_f32, |most, value| most.max(value.abs()));
        let unit = match zero {
            None if most > 0.0 => most / 127.0,
            _ => 1.0,
        };
        // Half a step away from zero, and cut off: `round` is a call on machines of old.
        #[allow(clippy::cast_possible_truncation, reason = "at most 127.5")]
        ByteTable {
            values: values.map(|value| (value / unit + 0.5_f32.copysign(value)) as i8),
            unit,
            zero,
        }
    }
}

/// As [`WordTable::levels`], for codes of up to `most`.
pub(crate) fn levels(most: u16) -> i16 {
    let fit = i32::MAX / (64 * i32::from(most.max(1)));
    i16::try_from(fit).unwrap_or(i16::MAX)
}

/// A linear map whose weight `(outputs, inputs)` is kept in codes of 4 or 8 bits with a scale for each
/// block: `w = value(code) · scale + offset`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CodedMap<'a> {
    pub(crate) codes: &'a [u8],
    pub(crate) coding: Coding,
    pub(crate) outputs: usize,
    pub(crate) inputs: usize,
    pub(crate) scales: Scales<'a>,
    pub(crate) offsets: Option<Scales<'a>>,
    /// Which input stands at each place of the codes.
    pub(crate) order: Option<&'a [i32]>,
    /// Whether activations may be bytes for any number of rows, not only for a few.
    pub(crate) bytes: bool,
}

/// Most weights for which a product is summed in integers.
pub(crate) const MAX_GRANULE: usize = 64;

impl CodedMap<'_> {
    /// Weights of a row that surely share a scale, a power of two up to [`MAX_GRANULE`]; `None` where
    /// blocks and rows fit so badly that a lane of codes could have two.
    pub(crate) fn granule(&self) -> Option<usize> {
        let common = self.scales.block | self.inputs;
        let granule = MAX_GRANULE.min(1 << common.trailing_zeros().min(31));
        (granule >= self.coding.per_lane()).then_some(granule)
    }

    /// The table with which codes of 4 bits are multiplied as bytes, and whether the first of two is in
    /// the high half; `None` where they have to be words: rows that are not whole vectors of codes,
    /// blocks that cross rows or have fewer than 32 weights, and orders.
    pub(crate) fn byte_table(&self) -> Option<(ByteTable, bool)> {
        let Coding::Nibbles { values, high_first } = &self.coding else {
            return None;
        };
        let block = self.scales.block;
        let fits = self.inputs > 0
            && self.inputs.is_multiple_of(128)
            && self.inputs.is_multiple_of(block)
            && block.is_power_of_two()
            && block >= 32
            && self.order.is_none();
        let table = ByteTable::new(values);
        // Code books have no offsets.
        let known = table.zero.is_some() || self.offsets.is_none();
        (fits && known).then_some((table, *high_first))
    }

    /// Bytes of a row's codes. For maps with a [`granule`](Self::granule) rows are whole bytes.
    pub(crate) fn row_bytes(&self) -> usize {
        self.inputs / self.coding.per_byte()
    }

    /// Whether the slices are as long as the sizes say.
    pub(crate) fn is_consistent(&self) -> bool {
        let weights = self.outputs * self.inputs;
        let blocks = |scales: &Scales<'_>| {
            scales.block > 0 && scales.magnitudes.len() >= weights.div_ceil(scales.block)
        };
        self.codes.len() >= weights.div_ceil(self.coding.per_byte())
            && blocks(&self.scales)
            && self
                .offsets
                .as_ref()
                .is_none_or(|offsets| offsets.block == self.scales.block && blocks(offsets))
            && self.order.is_none_or(|order| {
                let there =
                    |input: &i32| usize::try_from(*input).is_ok_and(|input| input < self.inputs);
                order.len() == self.inputs && order.iter().all(there)
            })
    }
}
