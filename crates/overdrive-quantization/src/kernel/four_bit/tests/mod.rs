#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(clippy::cast_possible_truncation, clippy::cast_precision_loss)]

mod reference;

use half::bf16;
use overdrive_kernels::InstructionSet;
use proptest::prelude::*;

use self::reference::{
    Case, Kept, Numbers, Owned, Random, activations, check, check_with, codings, of_bytes, run,
};
use super::coded_weight::{ByteCoding, ByteNumbers, CodedWeight, Coding, WordTable};
use super::dequantize::dequantize_on;

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
        rows in prop_oneof![1..30_usize, 64..70_usize, 126..132_usize],
        seed in any::<u64>(),
    ) {
        let case = of_bytes(coding, outputs, groups, block, kept, offsets, seed);
        check_with(case, rows, true);
    }

    #[test]
    fn a_row_has_the_same_bits_whatever_lies_beside_it(
        coding in 0..6_usize,
        outputs in 1..70_usize,
        groups in 1..36_usize,
        block in prop::sample::select(vec![16_usize, 32, 64, 128, 256, 512]),
        kept in prop::sample::select(vec![Kept::F32, Kept::F16, Kept::Quantized]),
        offsets in any::<bool>(),
        rows in prop_oneof![2..10_usize, 62..68_usize, 126..132_usize],
        seed in any::<u64>(),
    ) {
        let case = of_bytes(coding, outputs, groups, block, kept, offsets, seed);
        let mut owned = Owned::new(case);
        owned.bytes = true;
        let map = owned.map();
        prop_assert_eq!(owned.numbers(), Numbers::Bytes);
        let x = activations(rows, case.inputs, seed);
        let bits = |y: &[f32]| y.iter().map(|y| y.to_bits()).collect::<Vec<_>>();
        for set in InstructionSet::available() {
            let together = run::<f32>(set, &x, &[map], &[None]);
            // Alone, and beside fewer rows than before.
            for (first, count) in [(0, 1), (rows - 1, 1), (rows / 2, 2), (0, rows.min(5)), (1, rows - 1)] {
                let count = count.min(rows - first);
                let part = &x[first * case.inputs..(first + count) * case.inputs];
                let alone = run::<f32>(set, part, &[map], &[None]);
                let beside = &together[first * outputs..(first + count) * outputs];
                prop_assert_eq!(bits(&alone), bits(beside), "{:?} {:?}: {} of {}", set, case, count, rows);
            }
        }
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
        let mut finite = Owned::new(case);
        let mut owned = Owned::new(case);
        owned.floats[7 * groups] = f32::NAN;
        if let Some(all) = &mut owned.offsets {
            all[9 * groups] = f32::NAN;
            all[outputs * groups - 1] = f32::NAN;
        }
        for (rows, bytes) in [
            (1, true),
            (3, true),
            (5, true),
            (1, false),
            (3, false),
            (5, false),
        ] {
            (owned.bytes, finite.bytes) = (bytes, bytes);
            let x = activations(rows, case.inputs, 9);
            for set in InstructionSet::available() {
                let y = run::<f32>(set, &x, &[owned.map()], &[None]);
                for (at, y) in y.iter().enumerate() {
                    let output = at % outputs;
                    let bad = output == 7 || offsets && [9, outputs - 1].contains(&output);
                    assert_eq!(
                        y.is_nan(),
                        bad,
                        "{set:?} {coding} {rows} rows, bytes: {bytes}: output {output}"
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
