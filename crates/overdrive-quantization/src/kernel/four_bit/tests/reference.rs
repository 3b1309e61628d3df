//! Coded weights made from a seed, and their products with activations as sums in f64.

use half::f16;
use overdrive_kernels::{Element, InstructionSet, Table256};

use super::super::coded_weight::{ByteCoding, ByteNumbers, CodedWeight, Coding, WordTable, levels};
use super::super::gemm::{CodedGemm, QuantizedInputs};
use super::super::scales::{Floats, MagnitudeSlices, Scales};
use crate::codec::code_book::Book;
use crate::kernel::joint_gemm::{JointGemm, joint_gemm};

/// A generator of numbers that depend only on the seed.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u32 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    /// Returns a number in `-1..1`.
    pub(super) fn number(&mut self) -> f32 {
        (f64::from(self.next()) / f64::from(1_u32 << 30) - 1.0) as f32
    }
}

/// The type in which weights and activations are multiplied.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Numbers {
    Exact,
    Words,
    Bytes,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Kept {
    F32,
    F16,
    Quantized,
}

/// The data that a coded weight borrows.
#[derive(Debug)]
pub(super) struct Owned {
    pub(super) codes: Vec<u8>,
    pub(super) coding: Coding,
    pub(super) outputs: usize,
    pub(super) inputs: usize,
    pub(super) block: usize,
    pub(super) kept: Kept,
    pub(super) floats: Vec<f32>,
    pub(super) halves: Vec<f16>,
    pub(super) small: Vec<u8>,
    pub(super) book: [f32; 256],
    pub(super) planes: Option<Table256>,
    pub(super) outer: Vec<f32>,
    pub(super) offsets: Option<Vec<f32>>,
    pub(super) order: Option<Vec<i32>>,
    /// If `true`, activations are bytes where the layout allows it.
    pub(super) bytes: bool,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Case {
    pub(super) coding: Coding,
    pub(super) outputs: usize,
    pub(super) inputs: usize,
    pub(super) block: usize,
    pub(super) kept: Kept,
    pub(super) offsets: bool,
    pub(super) order: bool,
    pub(super) seed: u64,
}

impl Owned {
    pub(super) fn new(case: Case) -> Self {
        let mut random = Random(case.seed);
        let weights = case.outputs * case.inputs;
        let blocks = weights.div_ceil(case.block);
        let bytes = weights.div_ceil(case.coding.per_byte());
        let mut order: Vec<i32> = (0..case.inputs as i32).collect();
        for at in (1..order.len()).rev() {
            order.swap(at, random.next() as usize % (at + 1));
        }
        let book = std::array::from_fn(|_| random.number());
        Owned {
            codes: (0..bytes).map(|_| random.next() as u8).collect(),
            coding: case.coding,
            outputs: case.outputs,
            inputs: case.inputs,
            block: case.block,
            kept: case.kept,
            floats: (0..blocks).map(|_| random.number()).collect(),
            halves: (0..blocks)
                .map(|_| f16::from_f32(random.number()))
                .collect(),
            small: (0..blocks).map(|_| random.next() as u8).collect(),
            book,
            planes: case.seed.is_multiple_of(2).then(|| Table256::new(&book)),
            outer: (0..blocks.div_ceil(256)).map(|_| random.number()).collect(),
            offsets: case
                .offsets
                .then(|| (0..blocks).map(|_| random.number()).collect()),
            order: case.order.then_some(order),
            bytes: false,
        }
    }

    pub(super) fn map(&self) -> CodedWeight<'_> {
        let magnitudes = match self.kept {
            Kept::F32 => MagnitudeSlices::Full(Floats::F32(&self.floats)),
            Kept::F16 => MagnitudeSlices::Full(Floats::F16(&self.halves)),
            Kept::Quantized => MagnitudeSlices::Quantized {
                codes: &self.small,
                book: &self.book,
                planes: self.planes.as_ref(),
                scales: &self.outer,
                offset: 0.25,
            },
        };
        let map = CodedWeight {
            codes: &self.codes,
            coding: self.coding,
            outputs: self.outputs,
            inputs: self.inputs,
            scales: Scales {
                magnitudes,
                block: self.block,
            },
            offsets: self.offsets.as_ref().map(|offsets| Scales {
                magnitudes: MagnitudeSlices::Full(Floats::F32(offsets)),
                block: self.block,
            }),
            order: self.order.as_deref(),
            bytes: self.bytes,
        };
        assert!(map.is_consistent(), "the case");
        map
    }

    /// Returns the number of the code of an element.
    pub(super) fn value(&self, weight: usize, numbers: Numbers) -> f64 {
        match &self.coding {
            Coding::Signed => f64::from(self.codes[weight] as i8),
            Coding::Unsigned => f64::from(self.codes[weight]),
            Coding::Nibbles { values, high_first } => {
                let byte = self.codes[weight / 2];
                let first = weight.is_multiple_of(2);
                let code = usize::from(if first == *high_first {
                    byte >> 4
                } else {
                    byte & 15
                });
                match numbers {
                    Numbers::Exact => f64::from(values[code]),
                    Numbers::Words => {
                        let table = WordTable::new(values);
                        f64::from(table.words[code]) * f64::from(table.unit)
                    }
                    Numbers::Bytes => {
                        let coding = ByteCoding::new(&self.coding);
                        match coding.numbers {
                            ByteNumbers::Book(book) => {
                                f64::from(book[code]) * f64::from(coding.unit)
                            }
                            _ => f64::from(values[code]),
                        }
                    }
                }
            }
        }
    }

    pub(super) fn scale(&self, weight: usize) -> f64 {
        let block = weight / self.block;
        match self.kept {
            Kept::F32 => f64::from(self.floats[block]),
            Kept::F16 => f64::from(self.halves[block].to_f32()),
            Kept::Quantized => {
                let number = self.book[usize::from(self.small[block])];
                f64::from(number * self.outer[block / 256] + 0.25)
            }
        }
    }

    pub(super) fn weight(&self, weight: usize, numbers: Numbers) -> f64 {
        let offset = self
            .offsets
            .as_ref()
            .map_or(0.0, |all| f64::from(all[weight / self.block]));
        self.value(weight, numbers) * self.scale(weight) + offset
    }

    pub(super) fn input(&self, place: usize) -> usize {
        self.order
            .as_ref()
            .map_or(place, |order| order[place] as usize)
    }

    /// Returns the type in which activations are multiplied.
    pub(super) fn numbers(&self) -> Numbers {
        let map = self.map();
        if map.byte_coding().is_some() {
            Numbers::Bytes
        } else if map.granule().is_some() {
            Numbers::Words
        } else {
            Numbers::Exact
        }
    }

    /// Returns the largest integer of activations.
    pub(super) fn levels(&self, numbers: Numbers) -> f64 {
        if numbers == Numbers::Bytes {
            return 127.0;
        }
        f64::from(match &self.coding {
            Coding::Nibbles { values, .. } => WordTable::new(values).levels(),
            Coding::Signed => levels(128),
            Coding::Unsigned => levels(255),
        })
    }

    /// Returns the outputs, and the sums of the magnitudes of their terms, with activations rounded as the kernels
    /// round them.
    pub(super) fn product(&self, x: &[f32], numbers: Numbers) -> Vec<(f64, f64)> {
        let levels = self.levels(numbers);
        let group = match numbers {
            Numbers::Bytes if self.coding.per_byte() == 1 => self.block.min(32),
            Numbers::Bytes => self.block.clamp(32, 128),
            _ => 64,
        };
        let weights: Vec<f64> = (0..self.outputs * self.inputs)
            .map(|place| self.weight(place, numbers))
            .collect();
        let mut all = Vec::new();
        for row in x.chunks(self.inputs) {
            let mut places: Vec<f64> = (0..self.inputs)
                .map(|place| f64::from(row[self.input(place)]))
                .collect();
            if numbers != Numbers::Exact {
                for group in places.chunks_mut(group) {
                    let most = group.iter().fold(0.0_f64, |most, x| most.max(x.abs())) as f32;
                    let inverse = levels as f32 / most;
                    let inverse = if inverse.is_finite() { inverse } else { 0.0 };
                    let scale = f64::from(most / levels as f32);
                    for x in group {
                        *x = f64::from((*x as f32 * inverse).round_ties_even()) * scale;
                    }
                }
            }
            for weights in weights.chunks(self.inputs) {
                let mut sums = (0.0, 0.0);
                for (weight, x) in weights.iter().zip(&places) {
                    let term = weight * x;
                    sums.0 += term;
                    sums.1 += term.abs();
                }
                all.push(sums);
            }
        }
        all
    }
}

pub(super) fn run<T: Element>(
    set: InstructionSet,
    x: &[f32],
    maps: &[CodedWeight<'_>],
    biases: &[Option<Vec<T>>],
) -> Vec<T> {
    let rows = x.len() / maps[0].inputs;
    let inputs = QuantizedInputs::new(set, x, maps);
    let mut first = 0;
    let mut joint = Vec::new();
    for (map, bias) in maps.iter().zip(biases) {
        let gemm = CodedGemm::new(set, x, &inputs, map);
        joint.push(JointGemm::new(first, Box::new(gemm), bias.as_deref()));
        first += map.outputs;
    }
    let mut y = vec![T::from_f32(f32::NAN); rows * first];
    joint_gemm(&joint, rows, first, &mut y);
    y
}

pub(super) fn codings() -> [Coding; 6] {
    [
        Coding::integers(8),
        Coding::integers(0),
        Coding::book(*Book::Nf4.numbers()),
        Coding::book(*Book::Fp4.numbers()),
        Coding::Signed,
        Coding::Unsigned,
    ]
}

/// Returns `rows` of activations of which some are much larger than others.
pub(super) fn activations(rows: usize, inputs: usize, seed: u64) -> Vec<f32> {
    let mut random = Random(seed ^ 0x5eed);
    (0..rows * inputs)
        .map(|at| random.number() * if at % 37 == 0 { 20.0 } else { 1.0 })
        .collect()
}

pub(super) fn check(case: Case, rows: usize) {
    check_with(case, rows, false);
}

pub(super) fn check_with(case: Case, rows: usize, bytes: bool) {
    let mut owned = Owned::new(case);
    owned.bytes = bytes;
    let map = owned.map();
    let x = activations(rows, case.inputs, case.seed);
    let numbers = owned.numbers();
    let exact = owned.product(&x, Numbers::Exact);
    let expected = owned.product(&x, numbers);
    for set in InstructionSet::available() {
        // Half a step of a group's largest activation, which is at most 80 times the typical one here; and
        // of bytes for the numbers of a table.
        let rounding = match numbers {
            Numbers::Bytes => 0.5,
            Numbers::Exact | Numbers::Words => 6e-3,
        };
        let y = run::<f32>(set, &x, &[map], &[None]);
        assert_eq!(y.len(), expected.len());
        for (at, y) in y.iter().enumerate() {
            let (sum, terms) = expected[at];
            // Sums in f32 of a few hundred numbers, each rounded: integers are exact. Offsets add what
            // the sum of activations is rounded to.
            let bound = 4e-6 * terms + 1e-6;
            assert!(
                (f64::from(*y) - sum).abs() <= bound,
                "{set:?} {case:?} {rows} rows: {y} at {at}, expected {sum} within {bound}"
            );
            // Against activations and code books as they are.
            let (sum, terms) = exact[at];
            assert!(
                (f64::from(*y) - sum).abs() <= rounding * terms + 1e-3,
                "{set:?} {case:?}: {y}, {sum}"
            );
        }
    }
}

/// Returns a case with a layout that bytes have a kernel for: rows of `32 · groups` inputs or a multiple of the block.
pub(super) fn of_bytes(
    coding: usize,
    outputs: usize,
    groups: usize,
    block: usize,
    kept: Kept,
    offsets: bool,
    seed: u64,
) -> Case {
    // Books have no offsets.
    let offsets = offsets && !(2..4).contains(&coding);
    let coding = codings()[coding];
    let block = block.max(ByteCoding::new(&coding).min_group());
    Case {
        coding,
        outputs,
        inputs: (groups * 32).next_multiple_of(block),
        block,
        kept,
        offsets,
        order: false,
        seed,
    }
}
