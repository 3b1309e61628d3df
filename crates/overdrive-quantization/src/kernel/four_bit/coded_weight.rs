//! A weight of codes of 4 or 8 bits, as slices.

use overdrive_kernels::Simd;

use super::scales::Scales;

/// The numbers that codes represent, before their scale.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Coding {
    /// Codes of 4 bits, each of which selects one of 16 numbers. The first of two is in the high half of a byte
    /// if `high_first`.
    Nibbles { values: [f32; 16], high_first: bool },
    /// Signed integers of 8 bits.
    Signed,
    /// Unsigned integers of 8 bits.
    Unsigned,
}

impl Coding {
    /// Returns the coding of `0..16` minus `zero`.
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

    /// Returns the coding of blocks with the numbers of a book, packed as bitsandbytes packs them.
    pub(crate) fn book(values: [f32; 16]) -> Coding {
        Coding::Nibbles {
            values,
            high_first: true,
        }
    }

    fn is_table(&self, table: &[f32; 16]) -> bool {
        matches!(self, Coding::Nibbles { values, .. } if values == table)
    }

    /// Returns the number of codes in a byte.
    pub(crate) fn per_byte(&self) -> usize {
        match self {
            Coding::Nibbles { .. } => 2,
            Coding::Signed | Coding::Unsigned => 1,
        }
    }

    /// Returns the number of codes in a lane of four bytes.
    pub(crate) fn per_lane(&self) -> usize {
        4 * self.per_byte()
    }
}

/// The largest word of a code book: with activations of 13 bits, 64 products of such words fit a sum of 32 bits.
/// Its rounding is 1/16000 of the largest element of a block.
const BOOK_STEPS: f32 = 8191.0;

/// The numbers of a coding as words.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct WordTable {
    pub(crate) words: [i16; 16],
    /// The value of a step: `value ≈ word · unit`, exactly if all values are multiples of one number (integers,
    /// FP4).
    pub(crate) unit: f32,
}

impl WordTable {
    pub(crate) fn new(values: &[f32; 16]) -> WordTable {
        let most = values
            .iter()
            .fold(0.0_f32, |most, value| most.max(value.abs()));
        // The steps of integers and of FP4, whose smallest number is 1/192 of its largest.
        let exact = [1.0, most / 192.0].into_iter().find(|step| {
            values.iter().all(|value| {
                let steps = value / step;
                (steps - steps.round()).abs() < 1e-3 && steps.abs() < 256.0
            })
        });
        // Exact steps keep integers and FP4 without rounding; NF4 has none.
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

    /// Returns the largest word of activations with which 64 products fit 31 bits.
    pub(crate) fn levels(&self) -> i16 {
        let most = self.words.iter().map(|word| word.unsigned_abs()).max();
        levels(most.unwrap_or(1))
    }
}

/// The numbers that codes become as bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum ByteNumbers {
    /// Codes of 4 bits, of which this one is zero: the integers `0..16` minus it.
    Integers(u8),
    /// Codes of 4 bits, each of which selects one of these.
    Book([i8; 16]),
    /// Signed integers of 8 bits.
    Signed,
    /// Unsigned integers of 8 bits.
    Unsigned,
}

/// The kinds of [`ByteNumbers`] with specialized code.
pub(super) const BOOK: u8 = 0;
pub(super) const NIBBLES: u8 = 1;
pub(super) const SIGNED: u8 = 2;
pub(super) const UNSIGNED: u8 = 3;

/// The least number of inputs that share a scale with codes of 4 bits as bytes: to scale the sum of 32 products takes
/// more than a third of the time of the products.
pub(super) const MIN_GROUP_OF_NIBBLES: usize = 32;

/// The same with codes of 8 bits: GGUF's `Q6_K` has groups of 16.
pub(super) const MIN_GROUP_OF_BYTES: usize = 16;

/// A coding in bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ByteCoding {
    pub(crate) numbers: ByteNumbers,
    /// The value of a step: `value ≈ byte · unit`, exactly for integers and e2m1. The numbers of NF4 and FP4 are off by at
    /// most 1/254 of the largest, while their distances are 1/13 of it and more (except for the smallest of FP4,
    /// which is 1/192 and becomes 1/127).
    pub(crate) unit: f32,
    /// If `true`, the first of two codes is in the high half of a byte.
    pub(crate) high_first: bool,
}

impl ByteCoding {
    pub(crate) fn new(coding: &Coding) -> ByteCoding {
        let (values, high_first) = match coding {
            Coding::Nibbles { values, high_first } => (values, *high_first),
            Coding::Signed => return ByteCoding::of_integers(ByteNumbers::Signed),
            Coding::Unsigned => return ByteCoding::of_integers(ByteNumbers::Unsigned),
        };
        // The code 0 represents the smallest number.
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "compared with what it was"
        )]
        let zero = -values[0] as u8;
        if Coding::integers(zero).is_table(values) {
            return ByteCoding {
                high_first,
                ..ByteCoding::of_integers(ByteNumbers::Integers(zero))
            };
        }
        let most = values
            .iter()
            .fold(0.0_f32, |most, value| most.max(value.abs()));
        // The steps of e2m1, whose numbers are multiples of 1/12 of the largest; the others have none.
        let twelfth = most / 12.0;
        let is_multiple = |value: &f32| (value / twelfth).fract() == 0.0;
        let unit = match most {
            0.0 => 1.0,
            _ if values.iter().all(is_multiple) => twelfth,
            _ => most / 127.0,
        };
        // Adds half a step away from zero and truncates: without SSE4.1 `round` is a function call.
        #[allow(clippy::cast_possible_truncation, reason = "at most 127.5")]
        let book = values.map(|value| (value / unit + 0.5_f32.copysign(value)) as i8);
        ByteCoding {
            numbers: ByteNumbers::Book(book),
            unit,
            high_first,
        }
    }

    fn of_integers(numbers: ByteNumbers) -> ByteCoding {
        ByteCoding {
            numbers,
            unit: 1.0,
            high_first: false,
        }
    }

    /// Returns the number of codes in a byte.
    pub(crate) fn per_byte(&self) -> usize {
        match self.numbers {
            ByteNumbers::Integers(_) | ByteNumbers::Book(_) => 2,
            ByteNumbers::Signed | ByteNumbers::Unsigned => 1,
        }
    }

    /// Returns the number of codes in a lane of four bytes.
    pub(crate) fn per_lane(&self) -> usize {
        4 * self.per_byte()
    }

    /// Returns the least number of inputs that share a scale.
    pub(crate) fn min_group(&self) -> usize {
        match self.per_byte() {
            1 => MIN_GROUP_OF_BYTES,
            _ => MIN_GROUP_OF_NIBBLES,
        }
    }

    /// Returns the amount by which the numbers that kernels multiply are larger than those of the codes.
    #[inline(always)]
    pub(crate) fn excess<S: Simd>(&self) -> i32 {
        match self.numbers {
            ByteNumbers::Integers(zero) => i32::from(zero),
            ByteNumbers::Book(_) | ByteNumbers::Signed => S::BOOK_ZERO,
            ByteNumbers::Unsigned => S::BOOK_ZERO - 128,
        }
    }

    /// Returns the table of a book.
    #[inline(always)]
    pub(crate) fn table<S: Simd>(&self, s: S) -> S::Bytes {
        match &self.numbers {
            ByteNumbers::Book(book) => s.byte_table(book),
            _ => s.byte_table(&[0; 16]),
        }
    }
}

/// Returns the same as [`WordTable::levels`] for codes of up to `most`.
pub(crate) fn levels(most: u16) -> i16 {
    // 64 products of the largest word and the largest code.
    let fit = i32::MAX / (64 * i32::from(most.max(1)));
    i16::try_from(fit).unwrap_or(i16::MAX)
}

/// The weight `(outputs, inputs)` of a linear layer in codes of 4 or 8 bits with a scale for each block:
/// `w = value(code) · scale + offset`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CodedWeight<'a> {
    pub(crate) codes: &'a [u8],
    pub(crate) coding: Coding,
    pub(crate) outputs: usize,
    pub(crate) inputs: usize,
    pub(crate) scales: Scales<'a>,
    pub(crate) offsets: Option<Scales<'a>>,
    /// The input of each column of the codes, if they are reordered.
    pub(crate) order: Option<&'a [i32]>,
    /// If `true`, activations are bytes where the layout allows it, else words.
    pub(crate) bytes: bool,
}

/// The largest number of products that are summed in integers.
pub(crate) const MAX_GRANULE: usize = 64;

impl CodedWeight<'_> {
    /// Returns the number of neighbouring elements that always share a scale, a power of two up to
    /// [`MAX_GRANULE`]; `None` if a lane of codes could have two scales.
    pub(crate) fn granule(&self) -> Option<usize> {
        let common = self.scales.block | self.inputs;
        let granule = MAX_GRANULE.min(1 << common.trailing_zeros().min(31));
        (granule >= self.coding.per_lane()).then_some(granule)
    }

    /// Returns the coding with which codes are multiplied as bytes. `None` if they must be words: for blocks that cross
    /// rows or have fewer than [`min_group`](ByteCoding::min_group) elements, reordered columns, and where words are
    /// [wanted](Self::bytes).
    pub(crate) fn byte_coding(&self) -> Option<ByteCoding> {
        let block = self.scales.block;
        let coding = ByteCoding::new(&self.coding);
        let fits = self.bytes
            && self.inputs > 0
            && self.inputs.is_multiple_of(block)
            && block.is_power_of_two()
            && block >= coding.min_group()
            && self.order.is_none();
        // Books have no offsets.
        let known = !matches!(coding.numbers, ByteNumbers::Book(_)) || self.offsets.is_none();
        (fits && known).then_some(coding)
    }

    /// Returns `true` if activations are integers, bytes or words, and not floats.
    pub(crate) fn has_integers(&self) -> bool {
        self.byte_coding().is_some() || self.granule().is_some()
    }

    /// Returns the number of bytes of a row. Rows are whole bytes if there is a [`granule`](Self::granule).
    pub(crate) fn row_bytes(&self) -> usize {
        self.inputs / self.coding.per_byte()
    }

    /// Returns `true` if the slices have the lengths of the shape, and the order names inputs that exist.
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
