//! Weights in every scheme: what they take, what they refuse, what they cost.

use overdrive_quantization::{
    GroupOptions, GroupScales, GroupedParts, Magnitudes, QuantizedWeight, Scheme,
};
use tch::{Device, Kind, Tensor};

fn waves(shape: [i64; 2]) -> Tensor {
    let steps = Tensor::arange(shape[0] * shape[1], (Kind::Float, Device::Cpu));
    (steps * 0.37).sin().view(shape)
}

fn scheme(name: &str) -> Scheme {
    name.parse().unwrap()
}

#[test]
fn values_that_are_not_finite_are_named_with_their_index() {
    for name in Scheme::NAMES {
        for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
            let weight = waves([700, 256]).to_kind(kind);
            let _ = weight.get(650).get(131).fill_(f64::NEG_INFINITY);
            let _ = weight.get(651).get(3).fill_(f64::NAN);
            let error = QuantizedWeight::quantize(&weight, scheme(name)).unwrap_err();
            assert!(
                error.to_string().contains("-inf at [650, 131]"),
                "{name}: {error}"
            );
        }
    }
}

#[test]
fn weights_that_do_not_fit_are_refused_with_what_would() {
    let refused = |weight: &Tensor, name| {
        let error = QuantizedWeight::quantize(weight, scheme(name)).unwrap_err();
        error.to_string()
    };
    assert!(refused(&waves([4, 100]), "int4").contains("128 for a weight with 100 inputs"));
    assert!(refused(&waves([4, 100]).view([400]), "nf4").contains("[400]"));
    assert!(refused(&waves([4, 100]).slice(0, 0, 0, 1), "nf4").contains("[0, 100]"));
    let integers = waves([4, 128]).to_kind(Kind::Int);
    assert!(refused(&integers, "int8").contains("`weight` is Int"));
    let odd = QuantizedWeight::quantize_with(&waves([4, 64]), scheme("nf4"), &|_| [0.0; 2]);
    assert!(odd.unwrap_err().to_string().contains("can be chosen"));
}

#[test]
fn kinds_and_strides_do_not_matter() {
    let weight = waves([96, 128]).to_kind(Kind::BFloat16);
    for name in Scheme::NAMES {
        let dense = |weight: &Tensor| {
            let quantized = QuantizedWeight::quantize(weight, scheme(name)).unwrap();
            quantized.dequantize(Kind::Float).unwrap()
        };
        let expected = dense(&weight.to_kind(Kind::Float));
        assert_eq!(dense(&weight), expected, "{name}");
        assert_eq!(dense(&weight.to_kind(Kind::Double)), expected, "{name}");
        assert_eq!(dense(&weight.tr().contiguous().tr()), expected, "{name}");
        let parameter = weight.to_kind(Kind::Float).set_requires_grad(true);
        assert!(!dense(&parameter).requires_grad());
    }
}

#[test]
fn dequantized_kinds_are_the_floats_rounded_once() {
    for name in Scheme::NAMES {
        let weight = QuantizedWeight::quantize(&waves([33, 128]), scheme(name)).unwrap();
        let floats = weight.dequantize(Kind::Float).unwrap();
        for kind in [Kind::BFloat16, Kind::Half, Kind::Double] {
            assert_eq!(
                weight.dequantize(kind).unwrap(),
                floats.to_kind(kind),
                "{name} {kind:?}"
            );
        }
        assert!(weight.dequantize(Kind::Int).is_err());
    }
}

#[test]
fn rows_are_those_of_the_whole_weight() {
    for name in Scheme::NAMES {
        let weight = QuantizedWeight::quantize(&waves([50, 128]), scheme(name)).unwrap();
        let ids = Tensor::from_slice(&[49i64, 0, 7, 7, 1, 30]).view([2, 3]);
        let rows = weight.rows(&ids, Kind::Float).unwrap();
        assert_eq!(rows.size(), [2, 3, 128]);
        let whole = weight.dequantize(Kind::Float).unwrap();
        assert_eq!(
            rows.view([6, 128]),
            whole.index_select(0, &ids.view([6])),
            "{name}"
        );
        for id in [50i64, -1] {
            let error = weight
                .rows(&Tensor::from_slice(&[id]), Kind::Float)
                .unwrap_err();
            assert!(error.to_string().contains("from 0 to 49"), "{error}");
        }
    }
}

#[test]
fn odd_widths_and_shorter_last_blocks_are_taken_by_blocks() {
    for shape in [[7, 9], [5, 31], [3, 43], [1, 1]] {
        for name in ["nf4", "fp4-single"] {
            let original = waves(shape) + 0.01;
            let weight = QuantizedWeight::quantize(&original, scheme(name)).unwrap();
            let whole = weight.dequantize(Kind::Float).unwrap();
            // The books' widest gaps: 0.3 of NF4, 0.34 of FP4, and numbers are at most 1.01.
            assert!(
                (&whole - &original).abs().max().double_value(&[]) < 0.18,
                "{name} {shape:?}"
            );
            let last = Tensor::from_slice(&[shape[0] - 1]);
            let row = weight.rows(&last, Kind::Float).unwrap();
            assert_eq!(row, whole.index_select(0, &last));
        }
    }
}

#[test]
fn weights_take_the_bits_that_they_promise() {
    // A linear map of the 100M Llama.
    let weight = waves([2048, 768]);
    let floats = weight.numel() * 4;
    for (name, bits, ratio) in [
        ("int8", 8.0 + 32.0 / 768.0, 3.9),
        ("int4", 4.125, 7.7),
        ("int4-g32", 4.5, 7.1),
        ("int4-asym", 4.25, 7.5),
        ("int8-g32", 8.5, 3.7),
        // Offsets of bytes are in fp32.
        ("int8-g32-asym", 9.5, 3.3),
        // A byte for 64 weights, a float for 256 of those, and the book.
        (
            "nf4",
            4.0 + 8.0 / 64.0 + 32.0 / 16384.0 + 8192.0 / (2048.0 * 768.0),
            7.2,
        ),
        ("nf4-single", 4.5, 7.1),
        ("fp8", 8.0 + 32.0 / 768.0, 3.9),
    ] {
        let quantized = QuantizedWeight::quantize(&weight, scheme(name)).unwrap();
        assert!((quantized.bits_per_weight() - bits).abs() < 1e-9, "{name}");
        assert!(floats as f64 / quantized.bytes() as f64 > ratio, "{name}");
    }
}

#[test]
fn errors_against_the_original_are_worked_out_by_hand() {
    // Scale 1/127: 0.5 is 63.5 steps and becomes 64.
    let original = Tensor::from_slice(&[1f32, 0.5]).view([1, 2]);
    let weight = QuantizedWeight::quantize(&original, Scheme::Int8Dynamic).unwrap();
    let error = weight.error(&original).unwrap();
    let step = 0.5 / 127.0;
    assert!((error.max_abs - step).abs() < 1e-7);
    assert!((error.rms - step / 2f64.sqrt()).abs() < 1e-7);
    assert!((error.relative_rms - step / 1.25f64.sqrt()).abs() < 1e-7);
    assert!((error.sqnr_db() + 20.0 * error.relative_rms.log10()).abs() < 1e-9);
    let exact = weight
        .error(&weight.dequantize(Kind::Float).unwrap())
        .unwrap();
    assert_eq!((exact.max_abs, exact.sqnr_db()), (0.0, f64::INFINITY));
    assert!(weight.error(&original.tr()).is_err());
}

#[test]
fn finer_schemes_have_smaller_errors() {
    // Columns of different sizes, so that smaller groups fit them better.
    let weight = waves([64, 256]) * Tensor::linspace(0.05, 1.0, 256, (Kind::Float, Device::Cpu));
    let error = |name| {
        let quantized = QuantizedWeight::quantize(&weight, scheme(name)).unwrap();
        quantized.error(&weight).unwrap().relative_rms
    };
    assert!(error("int8-g32") < error("int8"));
    assert!(error("int8") < error("fp8"));
    assert!(error("fp8") < error("int4-g32"));
    assert!(error("int4-g32") < error("int4"));
    assert!(error("nf4-single") < error("fp4-single"));
}

#[test]
fn scales_in_f16_cost_next_to_no_precision() {
    // Numbers as those of weights are distributed: sums of twelve uniform ones.
    let uniform = waves_without_order(12 * 512 * 1024).view([12, 512, 1024]);
    let weight = (uniform.sum_dim_intlist([0i64].as_slice(), false, Kind::Float) - 6.0) * 0.02;
    for (group_size, symmetric, most) in [
        (32, true, 1.001),
        (64, true, 1.001),
        (128, true, 1.001),
        // Scales have 7 to 11 digits.
        (32, false, 1.006),
        (64, false, 1.006),
    ] {
        let options = GroupOptions {
            group_size,
            symmetric,
            ..GroupOptions::default()
        };
        let error = |scales| {
            let packed = QuantizedWeight::quantize_groups(&weight, options, scales).unwrap();
            let error = packed.error(&weight).unwrap().relative_rms;
            println!(
                "{options:?} {scales:?}: {:.3} bits, {error:.6}",
                packed.bits_per_weight()
            );
            error
        };
        let ratio = error(GroupScales::Half) / error(GroupScales::Float);
        assert!((0.99..most).contains(&ratio), "{options:?}: {ratio}");
    }
}

/// Returns numbers in 0..1 that need no generator, which tests would share.
fn waves_without_order(count: i64) -> Tensor {
    let x = (Tensor::arange(count, (Kind::Double, Device::Cpu)) * 12.9898).sin() * 43_758.545_3;
    (&x - x.floor()).to_kind(Kind::Float)
}

#[test]
fn ranges_can_be_chosen() {
    let mut values = vec![0.5f32; 64];
    values[5] = 100.0;
    let weight = Tensor::from_slice(&values).view([1, 64]);
    for name in ["int8", "int4-g64", "int4-g64-asym", "fp8"] {
        let clipped = QuantizedWeight::quantize_with(&weight, scheme(name), &|numbers| {
            assert_eq!(numbers.len(), 64);
            [0.0, 0.5]
        });
        let back =
            Vec::<f32>::try_from(clipped.unwrap().dequantize(Kind::Float).unwrap().view([64]));
        let back = back.unwrap();
        // The least scale of symmetric codes of 4 bits is 0.5/7.5, and 7 of them the largest.
        assert!(
            back.iter().all(|x| (x - 0.5).abs() < 0.04),
            "{name}: {back:?}"
        );
    }
}

#[test]
fn tensors_that_do_not_fit_are_refused() {
    let parts = || GroupedParts {
        bits: 4,
        codes: Tensor::zeros([2, 16], (Kind::Uint8, Device::Cpu)),
        scales: Tensor::ones([2, 2], (Kind::Float, Device::Cpu)),
        offsets: None,
        order: Some(Tensor::arange(32, (Kind::Int, Device::Cpu))),
    };
    QuantizedWeight::from_grouped(parts()).unwrap();
    let refused = |change: fn(&mut GroupedParts)| {
        let mut parts = parts();
        change(&mut parts);
        QuantizedWeight::from_grouped(parts)
            .unwrap_err()
            .to_string()
    };
    let twice = refused(|parts| drop(parts.order.as_ref().unwrap().get(3).fill_(2)));
    assert!(twice.contains("2 at index 3"), "{twice}");
    let outside = refused(|parts| drop(parts.order.as_ref().unwrap().get(3).fill_(32)));
    assert!(outside.contains("each of 0..32 once"), "{outside}");
    let nan = refused(|parts| drop(parts.scales.get(1).get(0).fill_(f64::NAN)));
    assert!(nan.contains("NaN at index 2"), "{nan}");
    let size = refused(|parts| parts.scales = Tensor::ones([2, 4], (Kind::Float, Device::Cpu)));
    assert!(size.contains("group_size"), "{size}");
    let rows = refused(|parts| parts.scales = Tensor::ones([1, 2], (Kind::Float, Device::Cpu)));
    assert!(rows.contains("[2, 2]"), "{rows}");
    let bits = refused(|parts| parts.bits = 3);
    assert!(bits.contains("4 or 8"), "{bits}");
    let blocks = QuantizedWeight::from_blocks(
        scheme("nf4-single"),
        [4, 64],
        Tensor::zeros([128], (Kind::Uint8, Device::Cpu)),
        Magnitudes::Full(Tensor::ones([3], (Kind::Float, Device::Cpu))),
    );
    assert!(blocks.unwrap_err().to_string().contains("it must be [4]"));
    let codes = Tensor::full([2, 4], 0x7F, (Kind::Uint8, Device::Cpu));
    let nan = QuantizedWeight::from_fp8(codes, Tensor::ones([2], (Kind::Float, Device::Cpu)));
    assert!(nan.unwrap_err().to_string().contains("NaN"));
}

#[test]
fn reordered_codes_come_back_in_the_order_of_the_inputs() {
    // Codes of input i are i % 16, one scale: place p holds input 31 - p.
    let codes: Vec<u8> = (0..16u8)
        .map(|byte| {
            let code = |place: u8| (31 - place) % 16;
            code(2 * byte) | (code(2 * byte + 1) << 4)
        })
        .collect();
    let order: Vec<i32> = (0..32).map(|place| 31 - place).collect();
    let weight = QuantizedWeight::from_grouped(GroupedParts {
        bits: 4,
        codes: Tensor::from_slice(&codes).view([1, 16]),
        scales: Tensor::ones([1, 1], (Kind::Half, Device::Cpu)),
        offsets: None,
        order: Some(Tensor::from_slice(&order)),
    });
    let back = Vec::<f32>::try_from(weight.unwrap().dequantize(Kind::Float).unwrap().view([32]));
    let expected: Vec<f32> = (0..32).map(|input| (input % 16) as f32 - 8.0).collect();
    assert_eq!(back.unwrap(), expected);
}
