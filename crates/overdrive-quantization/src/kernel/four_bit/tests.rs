#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(clippy::cast_possible_truncation, clippy::cast_precision_loss)]

use half::{bf16, f16};
use overdrive_kernels::{Element, InstructionSet, Table256};
use proptest::prelude::*;

use super::byte_rows::MIN_RESCALED;
use super::coded_weight::{ByteCoding, ByteNumbers, CodedWeight, Coding, WordTable, levels};
use super::dequantize::dequantize_on;
use super::gemm::{CodedGemm, QuantizedInputs};
use super::scales::{Floats, Magnitudes, Scales};
use crate::codec::code_book::Book;
use crate::kernel::joint_gemm::{Gemm, joint_gemm};

/// A generator of numbers that depend only on the seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    /// Returns a number in `-1..1`.
    fn number(&mut self) -> f32 {
        (f64::from(self.next()) / f64::from(1_u32 << 30) - 1.0) as f32
    }
}

/// The type in which weights and activations are multiplied.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Numbers {
    Exact,
    Words,
    Bytes,
    /// Bytes of which a unit shares one scale.
    Rescaled,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Kept {
    F32,
    F16,
    Quantized,
}

/// The data that a coded weight borrows.
#[derive(Debug)]
struct Owned {
    codes: Vec<u8>,
    coding: Coding,
    outputs: usize,
    inputs: usize,
    block: usize,
    kept: Kept,
    floats: Vec<f32>,
    halves: Vec<f16>,
    small: Vec<u8>,
    book: [f32; 256],
    planes: Option<Table256>,
    outer: Vec<f32>,
    offsets: Option<Vec<f32>>,
    order: Option<Vec<i32>>,
    /// If `true`, activations are bytes for any number of rows.
    bytes: bool,
}

#[derive(Debug, Clone, Copy)]
struct Case {
    coding: Coding,
    outputs: usize,
    inputs: usize,
    block: usize,
    kept: Kept,
    offsets: bool,
    order: bool,
    seed: u64,
}

impl Owned {
    fn new(case: Case) -> Self {
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

    fn map(&self) -> CodedWeight<'_> {
        let magnitudes = match self.kept {
            Kept::F32 => Magnitudes::Full(Floats::F32(&self.floats)),
            Kept::F16 => Magnitudes::Full(Floats::F16(&self.halves)),
            Kept::Quantized => Magnitudes::Quantized {
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
                magnitudes: Magnitudes::Full(Floats::F32(offsets)),
                block: self.block,
            }),
            order: self.order.as_deref(),
            bytes: self.bytes,
        };
        assert!(map.is_consistent(), "the case");
        map
    }

    /// Returns an element whose unit of 128 inputs has bytes of one scale, as the kernels round it.
    fn rescaled(&self, weight: usize) -> f64 {
        let Coding::Nibbles { values, .. } = self.coding else {
            unreachable!("only codes of 4 bits are scaled to bytes")
        };
        let coding = ByteCoding::new(&self.coding);
        let integers = matches!(coding.numbers, ByteNumbers::Integers(_));
        // The numbers of a block are `number · step + low`.
        let line = |block: usize| -> (f32, f32) {
            let step = self.scale(block * self.block) as f32;
            let offset = self.offsets.as_ref().map_or(0.0, |all| all[block]);
            (step, offset + if integers { values[0] * step } else { 0.0 })
        };
        let first = weight / 128 * 128 / self.block;
        let most =
            (first..first + 128 / self.block)
                .map(line)
                .fold(0.0_f32, |most, (step, low)| match integers {
                    true => most.max(low.abs()).max((low + 15.0 * step).abs()),
                    false => most.max(127.0 * step.abs()),
                });
        let inverse = 127.0 * 256.0 / most;
        let (step, low) = line(weight / self.block);
        let number = match integers {
            true => (self.value(weight, Numbers::Exact) - f64::from(values[0])) as i32,
            false => (self.value(weight, Numbers::Bytes) / f64::from(coding.unit)).round() as i32,
        };
        let word = |x: f32| (x * inverse).round_ties_even() as i32;
        let byte = (number * word(step) + word(low) + 128) >> 8;
        assert!((-127..=127).contains(&byte), "a byte");
        f64::from(byte) * f64::from(most / 127.0) * f64::from(coding.unit)
    }

    /// Returns the number of the code of an element.
    fn value(&self, weight: usize, numbers: Numbers) -> f64 {
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
                    Numbers::Exact | Numbers::Rescaled => f64::from(values[code]),
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

    fn scale(&self, weight: usize) -> f64 {
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

    fn weight(&self, weight: usize, numbers: Numbers) -> f64 {
        if numbers == Numbers::Rescaled {
            return self.rescaled(weight);
        }
        let offset = self
            .offsets
            .as_ref()
            .map_or(0.0, |all| f64::from(all[weight / self.block]));
        self.value(weight, numbers) * self.scale(weight) + offset
    }

    fn input(&self, place: usize) -> usize {
        self.order
            .as_ref()
            .map_or(place, |order| order[place] as usize)
    }

    /// Returns the type in which `rows` of activations are multiplied.
    fn numbers(&self, rows: usize) -> Numbers {
        let map = self.map();
        let coding = match rows {
            ..=3 => map.few_rows_byte_coding(),
            _ => map.byte_coding().filter(|_| self.bytes),
        };
        let many = self.coding.per_byte() == 2 && self.block < 128 && rows >= MIN_RESCALED;
        if coding.is_some() && many {
            Numbers::Rescaled
        } else if coding.is_some() {
            Numbers::Bytes
        } else if map.granule().is_some() {
            Numbers::Words
        } else {
            Numbers::Exact
        }
    }

    /// Returns the largest integer of activations.
    fn levels(&self, numbers: Numbers) -> f64 {
        if matches!(numbers, Numbers::Bytes | Numbers::Rescaled) {
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
    fn product(&self, x: &[f32], numbers: Numbers) -> Vec<(f64, f64)> {
        let levels = self.levels(numbers);
        let group = match numbers {
            Numbers::Bytes if self.coding.per_byte() == 1 => self.block.min(32),
            Numbers::Bytes => self.block.clamp(32, 128),
            Numbers::Rescaled => 128,
            _ => 64,
        };
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
            for output in 0..self.outputs {
                let mut sums = (0.0, 0.0);
                for (place, x) in places.iter().enumerate() {
                    let term = self.weight(output * self.inputs + place, numbers) * x;
                    sums.0 += term;
                    sums.1 += term.abs();
                }
                all.push(sums);
            }
        }
        all
    }
}

fn run<T: Element>(
    set: InstructionSet,
    x: &[f32],
    maps: &[CodedWeight<'_>],
    biases: &[Option<Vec<T>>],
) -> Vec<T> {
    let rows = x.len() / maps[0].inputs;
    let inputs = QuantizedInputs::new(set, x, maps);
    let gemms: Vec<CodedGemm<'_>> = maps
        .iter()
        .map(|map| CodedGemm::new(set, x, &inputs, map))
        .collect();
    let mut first = 0;
    let mut joint: Vec<(usize, &dyn Gemm, Option<&[T]>)> = Vec::new();
    for ((gemm, map), bias) in gemms.iter().zip(maps).zip(biases) {
        joint.push((first, gemm, bias.as_deref()));
        first += map.outputs;
    }
    let mut y = vec![T::from_f32(f32::NAN); rows * first];
    joint_gemm(&joint, rows, first, &mut y);
    y
}

fn codings() -> [Coding; 6] {
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
fn activations(rows: usize, inputs: usize, seed: u64) -> Vec<f32> {
    let mut random = Random(seed ^ 0x5eed);
    (0..rows * inputs)
        .map(|at| random.number() * if at % 37 == 0 { 20.0 } else { 1.0 })
        .collect()
}

fn check(case: Case, rows: usize) {
    check_with(case, rows, false);
}

fn check_with(case: Case, rows: usize, bytes: bool) {
    let mut owned = Owned::new(case);
    owned.bytes = bytes;
    let map = owned.map();
    let x = activations(rows, case.inputs, case.seed);
    let numbers = owned.numbers(rows);
    let expected = owned.product(&x, numbers);
    let exact = owned.product(&x, Numbers::Exact);
    // Half a step of a group's largest activation, which is at most 80 times the typical one here; and
    // of bytes for the numbers of a table.
    let rounding = match numbers {
        Numbers::Bytes | Numbers::Rescaled => 0.5,
        Numbers::Exact | Numbers::Words => 6e-3,
    };
    for set in InstructionSet::available() {
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

/// Returns the least number of elements that share a scale, with which codes are multiplied as bytes.
fn min_block(coding: &Coding) -> usize {
    match coding.per_byte() {
        1 => 16,
        _ => 32,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn products_agree_with_sums_in_f64_of_the_same_integers(
        coding in 0..6_usize,
        outputs in 1..70_usize,
        lanes in 1..40_usize,
        block in prop::sample::select(vec![8_usize, 16, 32, 64, 128]),
        kept in prop::sample::select(vec![Kept::F32, Kept::F16, Kept::Quantized]),
        (offsets, order) in (any::<bool>(), any::<bool>()),
        rows in prop::sample::select(vec![1_usize, 1, 2, 3, 5, 8, 9, 17, 23]),
        seed in any::<u64>(),
    ) {
        let inputs = (lanes * 16).next_multiple_of(block);
        check(Case { coding: codings()[coding], outputs, inputs, block, kept, offsets, order, seed }, rows);
    }

    #[test]
    fn products_of_bytes_agree_with_sums_in_f64_of_the_same_integers(
        coding in 0..6_usize,
        outputs in 1..40_usize,
        groups in 1..36_usize,
        block in prop::sample::select(vec![16_usize, 32, 64, 128, 256, 512]),
        kept in prop::sample::select(vec![Kept::F32, Kept::F16, Kept::Quantized]),
        offsets in any::<bool>(),
        rows in 1..4_usize,
        seed in any::<u64>(),
    ) {
        let block = block.max(min_block(&codings()[coding]));
        let inputs = (groups * 32).next_multiple_of(block);
        let offsets = offsets && !(2..4).contains(&coding);
        let case = Case { coding: codings()[coding], outputs, inputs, block, kept, offsets, order: false, seed };
        prop_assert_eq!(Owned::new(case).numbers(rows), Numbers::Bytes);
        check(case, rows);
    }

    #[test]
    fn bytes_of_more_rows_agree_with_sums_in_f64_of_the_same_integers(
        coding in 0..6_usize,
        outputs in 1..100_usize,
        units in 1..9_usize,
        block in prop::sample::select(vec![16_usize, 32, 64, 128, 256, 512]),
        kept in prop::sample::select(vec![Kept::F32, Kept::F16, Kept::Quantized]),
        offsets in any::<bool>(),
        rows in prop_oneof![4..30_usize, 64..70_usize],
        seed in any::<u64>(),
    ) {
        let block = block.max(min_block(&codings()[coding]));
        let inputs = (units * 128).next_multiple_of(block);
        let offsets = offsets && !(2..4).contains(&coding);
        let case = Case { coding: codings()[coding], outputs, inputs, block, kept, offsets, order: false, seed };
        prop_assert!(Owned::new(case).map().byte_coding().is_some());
        check_with(case, rows, true);
    }

    #[test]
    fn blocks_may_cross_rows(
        nf4 in any::<bool>(),
        outputs in 1..20_usize,
        inputs in 1..150_usize,
        block in prop::sample::select(vec![32_usize, 64, 128, 256, 4096]),
        double in any::<bool>(),
        rows in 1..5_usize,
        seed in any::<u64>(),
    ) {
        let coding = codings()[if nf4 { 2 } else { 3 }];
        let kept = if double { Kept::Quantized } else { Kept::F32 };
        let case = Case { coding, outputs, inputs, block, kept, offsets: false, order: false, seed };
        check(case, rows);
    }

    #[test]
    fn dequantized_rows_are_the_weights(
        coding in 0..6_usize,
        outputs in 1..20_usize,
        inputs in 1..200_usize,
        block in prop::sample::select(vec![16_usize, 32, 64, 256]),
        kept in prop::sample::select(vec![Kept::F32, Kept::F16, Kept::Quantized]),
        (offsets, order) in (any::<bool>(), any::<bool>()),
        seed in any::<u64>(),
    ) {
        let coding = codings()[coding];
        let owned = Owned::new(Case { coding, outputs, inputs, block, kept, offsets, order, seed });
        let map = owned.map();
        let first = outputs / 3;
        for set in InstructionSet::available() {
            let mut out = vec![f32::NAN; (outputs - first) * inputs];
            dequantize_on(set, &map, first..outputs, &mut out);
            let mut low = vec![bf16::NAN; out.len()];
            dequantize_on(set, &map, first..outputs, &mut low);
            for row in 0..outputs - first {
                for place in 0..inputs {
                    let weight = (first + row) * inputs + place;
                    let at = row * inputs + owned.input(place);
                    // In the steps of floats, as the operators of the codecs compute it.
                    let mut expected = owned.value(weight, Numbers::Exact) as f32 * owned.scale(weight) as f32;
                    if let Some(offsets) = &owned.offsets {
                        expected += offsets[weight / block];
                    }
                    prop_assert_eq!(out[at], expected);
                    prop_assert_eq!(low[at], bf16::from_f32(expected));
                }
            }
        }
    }
}

#[test]
fn rows_of_real_widths_agree_with_sums_in_f64() {
    let nf4 = codings()[2];
    for (inputs, outputs, rows) in [(4096, 9, 1), (768, 33, 1), (2048, 18, 4), (11008, 4, 2)] {
        for (coding, block, kept) in [
            (nf4, 64, Kept::Quantized),
            (Coding::integers(8), 32, Kept::F16),
            (Coding::Signed, 16, Kept::F32),
        ] {
            let case = Case {
                coding,
                outputs,
                inputs,
                block,
                kept,
                offsets: false,
                order: false,
                seed: 7,
            };
            check(case, rows);
        }
    }
}

#[test]
fn several_maps_stand_side_by_side_with_their_biases() {
    let cases = [
        (2, 64, false, false),
        (0, 32, false, true),
        (2, 64, false, false),
        (5, 16, true, false),
    ];
    let owned: Vec<Owned> = cases
        .iter()
        .enumerate()
        .map(|(index, &(coding, block, offsets, order))| {
            Owned::new(Case {
                coding: codings()[coding],
                outputs: 20 + 7 * index,
                inputs: 192,
                block,
                kept: Kept::F32,
                offsets,
                order,
                seed: index as u64,
            })
        })
        .collect();
    let maps: Vec<CodedWeight<'_>> = owned.iter().map(Owned::map).collect();
    for rows in [1, 6] {
        let x = activations(rows, 192, 3);
        let bias: Vec<f32> = (0..maps[1].outputs).map(|at| at as f32).collect();
        let biases = [None, Some(bias.clone()), None, None];
        for set in InstructionSet::available() {
            let joint = run::<f32>(set, &x, &maps, &biases);
            let columns: usize = maps.iter().map(|map| map.outputs).sum();
            let mut first = 0;
            for (index, map) in maps.iter().enumerate() {
                let alone = run::<f32>(set, &x, &[*map], &[None]);
                for (row, alone) in alone.chunks(map.outputs).enumerate() {
                    for (output, alone) in alone.iter().enumerate() {
                        let bias = if index == 1 { bias[output] } else { 0.0 };
                        assert_eq!(joint[row * columns + first + output], alone + bias);
                    }
                }
                first += map.outputs;
            }
        }
    }
}

#[test]
fn results_in_low_precision_are_rounded_once() {
    let case = Case {
        coding: codings()[2],
        outputs: 40,
        inputs: 256,
        block: 64,
        kept: Kept::F32,
        offsets: false,
        order: false,
        seed: 11,
    };
    let owned = Owned::new(case);
    let map = owned.map();
    for rows in [1, 5] {
        let x = activations(rows, 256, 5);
        for set in InstructionSet::available() {
            let y = run::<f32>(set, &x, &[map], &[None]);
            let low = run::<bf16>(set, &x, &[map], &[None]);
            for (y, low) in y.iter().zip(&low) {
                assert_eq!(bf16::from_f32(*y), *low);
            }
        }
    }
}

#[test]
fn a_nan_reaches_all_outputs_of_its_row_and_no_other() {
    let case = Case {
        coding: codings()[2],
        outputs: 17,
        inputs: 128,
        block: 64,
        kept: Kept::F32,
        offsets: false,
        order: false,
        seed: 2,
    };
    let owned = Owned::new(case);
    let mut x = activations(3, 128, 9);
    x[128 + 70] = f32::NAN;
    for set in InstructionSet::available() {
        let y = run::<f32>(set, &x, &[owned.map()], &[None]);
        assert!(y[17..34].iter().all(|y| y.is_nan()));
        assert!(y[..17].iter().chain(&y[34..]).all(|y| y.is_finite()));
    }
}

#[test]
fn a_scale_or_an_offset_that_is_nan_reaches_its_output_alone() {
    for (coding, offsets) in [(0, false), (0, true), (2, false), (4, true)] {
        // Rows of 18 groups: neither whole units of codes nor whole vectors of scales.
        let (groups, outputs) = (18, 21);
        let case = Case {
            coding: codings()[coding],
            outputs,
            inputs: 32 * groups,
            block: 32,
            kept: Kept::F32,
            offsets,
            order: false,
            seed: 4,
        };
        let finite = Owned::new(case);
        let mut owned = Owned::new(case);
        owned.floats[7 * groups] = f32::NAN;
        if let Some(all) = &mut owned.offsets {
            all[9 * groups] = f32::NAN;
            all[outputs * groups - 1] = f32::NAN;
        }
        for rows in [1, 3] {
            let x = activations(rows, case.inputs, 9);
            for set in InstructionSet::available() {
                let y = run::<f32>(set, &x, &[owned.map()], &[None]);
                for (at, y) in y.iter().enumerate() {
                    let output = at % outputs;
                    let bad = output == 7 || offsets && [9, outputs - 1].contains(&output);
                    assert_eq!(
                        y.is_nan(),
                        bad,
                        "{set:?} {coding} {rows} rows: output {output}"
                    );
                }
                // Nor does it stay in the buffers of the thread.
                let y = run::<f32>(set, &x, &[finite.map()], &[None]);
                assert!(y.iter().all(|y| y.is_finite()));
            }
        }
    }
}

/// Compares the error of activations in bytes, and of many rows with one scale for a unit of 128 inputs, with that of
/// weights in 4 bits, as root mean squares of outputs for normally distributed activations and scales of any size.
#[test]
fn activations_in_bytes_are_much_finer_than_weights_of_four_bits() {
    let normal = |seed: u64, len: usize| -> Vec<f32> {
        let mut random = Random(seed);
        // Sums of 12 numbers in -1..1, of variance 1/3 each.
        (0..len)
            .map(|_| (0..12).map(|_| random.number()).sum::<f32>() / 2.0)
            .collect()
    };
    for (coding, rows) in [(2, 1), (0, 1), (4, 1), (2, 64), (0, 64), (4, 64)] {
        let case = Case {
            coding: codings()[coding],
            outputs: 64,
            inputs: 1024,
            block: 64,
            kept: Kept::F32,
            offsets: false,
            order: false,
            seed: 3,
        };
        let owned = Owned {
            bytes: true,
            ..Owned::new(case)
        };
        let x = normal(5, rows * 1024);
        let exact = owned.product(&x, Numbers::Exact);
        let y = run::<f32>(InstructionSet::best(), &x, &[owned.map()], &[None]);
        let (mut error, mut size) = (0.0, 0.0);
        for (y, (exact, _)) in y.iter().zip(&exact) {
            error += (f64::from(*y) - exact).powi(2);
            size += exact.powi(2);
        }
        // Weights of 4 bits are off by some 8% of their size, those of 8 bits in groups of 32 by 0.5 %.
        let share = (error / size).sqrt();
        println!("{coding}, {rows} rows: {share}");
        assert!(share < 0.01, "{coding}, {rows} rows: {share}");
    }
}

#[test]
fn numbers_of_code_books_are_bytes_within_half_a_step_and_integers_are_themselves() {
    for coding in codings() {
        let Coding::Nibbles { values, .. } = &coding else {
            continue;
        };
        let bytes = ByteCoding::new(&coding);
        for (code, value) in values.iter().enumerate() {
            match bytes.numbers {
                ByteNumbers::Integers(zero) => {
                    assert_eq!(*value, code as f32 - f32::from(zero));
                }
                ByteNumbers::Book(book) => {
                    let byte = f32::from(book[code]) * bytes.unit;
                    assert!((byte - value).abs() <= 0.501 / 127.0, "{byte}, {value}");
                }
                other => panic!("{other:?} of 4 bits"),
            }
        }
    }
}

#[test]
fn integers_and_fp4_become_words_exactly() {
    for coding in [Coding::integers(8), Coding::integers(0), codings()[3]] {
        let Coding::Nibbles { values, .. } = coding else {
            panic!("nibbles");
        };
        let table = WordTable::new(&values);
        for (word, value) in table.words.iter().zip(values) {
            assert!((f32::from(*word) * table.unit - value).abs() <= 1e-7);
        }
        assert_eq!(table.levels(), i16::MAX);
    }
}
