//! Products with quantized weights against those with the dequantized ones.

use overdrive_quantization::{
    Activations, Error, QuantizedWeight, Scheme, instruction_set, joint_linear, linear,
};
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

/// Returns numbers that need no generator, which tests would share.
fn numbers(seed: i64, size: &[i64]) -> Tensor {
    let count: i64 = size.iter().product();
    let x = (Tensor::arange(count, (Kind::Double, Device::Cpu)) + seed * 1000) * 12.9898;
    let x = x.sin() * 43_758.545_3;
    ((&x - x.floor()) * 2 - 1).view(size).to_kind(Kind::Float)
}

/// Returns integers with 127 as the largest magnitude of each row, so that rounding to 8 bits changes nothing.
fn integers(seed: i64, size: &[i64]) -> Tensor {
    let x = (numbers(seed, size) * 127).round();
    let _ = x.narrow(-1, 0, 1).fill_(127.0);
    x
}

fn scheme(name: &str) -> Scheme {
    name.parse().unwrap()
}

fn error(a: &Tensor, b: &Tensor) -> f64 {
    let b = b.to_kind(Kind::Double);
    let difference = (a.to_kind(Kind::Double) - &b).abs().max().double_value(&[]);
    difference / b.abs().max().double_value(&[]).max(1e-30)
}

const ALL: &[&str] = &Scheme::NAMES;

/// Returns the tolerance for rounded activations, relative to the largest output.
fn tolerance(name: &str) -> f64 {
    let four_bits = name.starts_with("int4") || name.starts_with("nf4") || name == "fp4";
    match name {
        // Half a step of 127 each, averaged over the inputs.
        "int8" | "llm-int8" => 1e-2,
        // Bytes by 32 to 128 inputs.
        _ if four_bits => 1e-2,
        _ => 2e-6,
    }
}

#[test]
fn every_scheme_multiplies_as_its_dequantized_weight() {
    for name in ALL {
        let weight = QuantizedWeight::quantize(&numbers(1, &[96, 256]), scheme(name)).unwrap();
        let dense = weight.dequantize(Kind::Double).unwrap();
        let bias = numbers(2, &[96]);
        for rows in [1, 2, 7, 33, 70] {
            let x = numbers(3, &[rows, 256]);
            let exact = x
                .to_kind(Kind::Double)
                .linear(&dense, Some(&bias.to_kind(Kind::Double)));
            let y = linear(&x, &weight, Some(&bias)).unwrap();
            let found = error(&y, &exact);
            assert!(found < tolerance(name), "{name}, {rows} rows: {found}");
            for (kind, low) in [(Kind::BFloat16, 8e-3), (Kind::Half, 1e-3)] {
                let x = x.to_kind(kind);
                let exact = x.to_kind(Kind::Double).linear(&dense, None::<&Tensor>);
                let y = linear(&x, &weight, None).unwrap();
                assert_eq!(y.kind(), kind);
                let found = error(&y, &exact);
                assert!(
                    found < tolerance(name) + low,
                    "{name}, {rows} rows of {kind:?}: {found}"
                );
            }
        }
    }
}

#[test]
fn integers_are_multiplied_exactly() {
    // Activations and weights that are integers lose nothing; sums below 2²⁴ fit f32.
    for (rows, width, outputs) in [(1, 64, 48), (3, 100, 33), (20, 640, 65), (40, 65, 1)] {
        let weight = integers(4, &[outputs, width]);
        let x = integers(5, &[rows, width]);
        let quantized = QuantizedWeight::quantize(&weight, Scheme::Int8Dynamic).unwrap();
        let y = linear(&x, &quantized, None).unwrap();
        let exact = x
            .to_kind(Kind::Double)
            .matmul(&weight.to_kind(Kind::Double).tr());
        assert!(
            error(&y, &exact) < 3e-7,
            "{rows} {width} {outputs}: {}",
            error(&y, &exact)
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn joint_maps_are_the_maps_side_by_side(
        names in prop::collection::vec(prop::sample::select(ALL.to_vec()), 1..4),
        outputs in prop::collection::vec(1_i64..70, 3),
        rows in 1_i64..50,
        biased in prop::collection::vec(any::<bool>(), 3),
    ) {
        let x = numbers(6, &[rows, 256]);
        let weights: Vec<_> = names
            .iter()
            .zip(&outputs)
            .map(|(name, outputs)| {
                QuantizedWeight::quantize(&numbers(7, &[*outputs, 256]), scheme(name)).unwrap()
            })
            .collect();
        let biases: Vec<_> = outputs.iter().map(|outputs| numbers(8, &[*outputs])).collect();
        let biases: Vec<_> = biases
            .iter()
            .zip(&biased)
            .take(weights.len())
            .map(|(bias, biased)| biased.then_some(bias))
            .collect();
        let joint = joint_linear(&x, &weights.iter().collect::<Vec<_>>(), &biases).unwrap();
        let each: Vec<_> = weights
            .iter()
            .zip(&biases)
            .map(|(weight, bias)| linear(&x, weight, *bias).unwrap())
            .collect();
        prop_assert!(error(&joint, &Tensor::cat(&each, -1)) < 1e-6);
    }
}

#[test]
fn gradients_are_those_of_the_dequantized_weight() {
    for name in ALL {
        let weights = [40, 17].map(|outputs| {
            QuantizedWeight::quantize(&numbers(9, &[outputs, 256]), scheme(name)).unwrap()
        });
        for kind in [Kind::Float, Kind::BFloat16] {
            let leaf = |x: Tensor| x.to_kind(kind).set_requires_grad(true);
            let (x, bias) = (leaf(numbers(10, &[2, 3, 256])), leaf(numbers(11, &[17])));
            let y = joint_linear(&x, &[&weights[0], &weights[1]], &[None, Some(&bias)]).unwrap();
            let dy = numbers(12, &y.size()).to_kind(kind);
            (&y * &dy).sum(Kind::Float).backward();

            let dense = [0, 1].map(|index: usize| weights[index].dequantize(Kind::Double).unwrap());
            let dense = Tensor::cat(&dense, 0);
            let exact = dy.to_kind(Kind::Double).matmul(&dense);
            let tolerance = if kind == Kind::Float { 1e-6 } else { 1e-2 };
            assert_eq!(x.grad().kind(), kind);
            let found = error(&x.grad(), &exact);
            assert!(found < tolerance, "{name} {kind:?}: {found}");
            let exact = dy.narrow(-1, 40, 17).to_kind(Kind::Double);
            let exact = exact.sum_dim_intlist([0i64, 1].as_slice(), false, Kind::Double);
            assert!(error(&bias.grad(), &exact) < tolerance);
        }
    }
}

#[test]
fn gradients_of_large_weights_are_made_of_blocks() {
    // More than 2²⁰ numbers: several blocks, and for `nf4` blocks of whole magnitudes of magnitudes.
    for name in [
        "int8",
        "int8-weight",
        "int4-g64",
        "nf4",
        "nf4-single",
        "fp8",
    ] {
        let weight = QuantizedWeight::quantize(&numbers(13, &[1500, 1088]), scheme(name)).unwrap();
        let dense = weight.dequantize(Kind::Float).unwrap();
        let x = numbers(14, &[40, 1088]).set_requires_grad(true);
        let y = linear(&x, &weight, None).unwrap();
        let found = error(&y, &x.matmul(&dense.tr()));
        assert!(found < tolerance(name), "{name}: {found}");
        let dy = numbers(15, &[40, 1500]);
        (&y * &dy).sum(Kind::Float).backward();
        let found = error(&x.grad(), &dy.matmul(&dense));
        assert!(found < 1e-5, "{name}: {found}");
    }
}

#[test]
fn an_explicit_choice_of_activations_is_kept() {
    let quantize =
        |name: &str| QuantizedWeight::quantize(&numbers(16, &[50, 128]), scheme(name)).unwrap();
    let x = numbers(17, &[5, 128]);
    let exact = |weight: &QuantizedWeight| {
        x.to_kind(Kind::Double)
            .matmul(&weight.dequantize(Kind::Double).unwrap().tr())
    };
    for name in ["int8", "int4-g32", "nf4", "llm-int8"] {
        let weight = quantize(name).with_activations(Activations::Float).unwrap();
        let found = error(&linear(&x, &weight, None).unwrap(), &exact(&weight));
        assert!(found < 1e-6, "{name}: {found}");
    }
    let weight = quantize("int8-weight")
        .with_activations(Activations::Int8)
        .unwrap();
    let same = linear(&x, &quantize("int8"), None).unwrap();
    assert_eq!(linear(&x, &weight, None).unwrap(), same);
    let found = quantize("fp8")
        .with_activations(Activations::Int8)
        .unwrap_err();
    assert!(found.to_string().contains("scheme fp8"), "{found}");
}

/// Returns the norm of the difference over the norm of `b`.
fn relative(a: &Tensor, b: &Tensor) -> f64 {
    let norm = |x: Tensor| x.square().sum(Kind::Double).sqrt().double_value(&[]);
    let b = b.to_kind(Kind::Double);
    norm(a.to_kind(Kind::Double) - &b) / norm(b)
}

/// Returns the sum of six numbers of [`numbers`] for each element: nearly normally distributed.
fn normal(seed: i64, size: &[i64]) -> Tensor {
    let parts: Vec<Tensor> = (0..6)
        .map(|part| numbers(seed + 100 * part, size))
        .collect();
    Tensor::stack(&parts, 0).sum_dim_intlist([0i64].as_slice(), false, Kind::Float)
}

#[test]
fn rounding_of_activations_is_less_than_that_of_weights_in_four_bits() {
    let dense = normal(28, &[80, 512]);
    for outliers in [1.0, 40.0] {
        let x = normal(29, &[64, 512]);
        // One large input in each group of 128.
        let _ = x.slice(1, 5, None, 128).g_mul_scalar_(outliers);
        for name in [
            "int4-g128",
            "int4-g64",
            "int4-g32",
            "int4-asym",
            "nf4",
            "fp4",
        ] {
            let weight = QuantizedWeight::quantize(&dense, scheme(name)).unwrap();
            let product = |weight: &Tensor, x: &Tensor| {
                x.to_kind(Kind::Double)
                    .matmul(&weight.to_kind(Kind::Double).tr())
            };
            let rounded = weight.dequantize(Kind::Double).unwrap();
            for rows in [1, 3, 8, 33, 64] {
                let x = x.narrow(0, 0, rows);
                let of_weights = relative(&product(&rounded, &x), &product(&dense, &x));
                let int8 = weight.shallow_clone().with_activations(Activations::Int8);
                let y = linear(&x, &int8.unwrap(), None).unwrap();
                let of_activations = relative(&y, &product(&rounded, &x));
                // Independent errors add as squares: a third of it adds 6 % to the error of the weights.
                assert!(
                    of_activations < of_weights / 3.0,
                    "{name}, {rows} rows, {outliers}: {of_activations}, {of_weights}"
                );
                // They were rounded, not computed in floats.
                assert!(
                    of_activations > 1e-4,
                    "{name}, {rows} rows: {of_activations}"
                );
            }
        }
    }
}

#[test]
fn activations_of_four_bits_are_rounded_alike_for_any_number_of_rows_but_not_with_gradients() {
    let x = normal(30, &[70, 256]);
    for name in ["int4-g128", "int4-g32", "nf4"] {
        let weight = QuantizedWeight::quantize(&normal(31, &[48, 256]), scheme(name)).unwrap();
        let with = |activations| {
            weight
                .shallow_clone()
                .with_activations(activations)
                .unwrap()
        };
        let (int8, floats) = (with(Activations::Int8), with(Activations::Float));
        let all = linear(&x, &int8, None).unwrap();
        let most = linear(&x.narrow(0, 0, 63), &int8, None).unwrap();
        for rows in [1, 2, 4, 8, 33] {
            let few = linear(&x.narrow(0, 0, rows), &int8, None).unwrap();
            let found = error(&few, &most.narrow(0, 0, rows));
            assert!(found < 2e-6, "{name}, {rows} rows: {found}");
        }
        // From 64 rows on, the groups of 128 inputs share a scale.
        let first = linear(&x.narrow(0, 0, 64), &int8, None).unwrap();
        assert!(error(&first, &all.narrow(0, 0, 64)) < 2e-6, "{name}");
        let found = error(&all.narrow(0, 0, 63), &most);
        assert!(found < 2e-2, "{name}: {found}");
        let floats = linear(&x, &floats, None).unwrap();
        assert!(error(&all, &floats) > 1e-4, "{name}");
        // By default they are rounded where bytes are fast, while gradients are disabled.
        let default = tch::no_grad(|| linear(&x, &weight, None).unwrap());
        match instruction_set() {
            "portable" => assert!(error(&default, &floats) < 1e-6, "{name}"),
            _ => assert_eq!(default, all, "{name}"),
        }
        // In training the first layer of a model is not rounded either, whose input needs no gradient.
        for needs_gradient in [true, false] {
            let leaf = x.copy().set_requires_grad(needs_gradient);
            let recorded = linear(&leaf, &weight, None).unwrap().detach();
            assert!(error(&recorded, &floats) < 1e-6, "{name}");
        }
    }
}

#[test]
fn large_activations_are_apart_in_llm_int8() {
    let dense = numbers(18, &[60, 192]);
    let x = numbers(19, &[4, 192]);
    let _ = x.narrow(1, 77, 1).fill_(3000.0);
    let exact = |weight: &QuantizedWeight| {
        x.to_kind(Kind::Double)
            .matmul(&weight.dequantize(Kind::Double).unwrap().tr())
    };
    // Without the threshold all numbers but the large one round to zero or nearly.
    let found = |scheme| {
        let weight = QuantizedWeight::quantize(&dense, scheme).unwrap();
        let difference = linear(&x, &weight, None).unwrap() - exact(&weight);
        difference.abs().max().double_value(&[])
    };
    let apart = found(Scheme::LlmInt8 { threshold: 6.0 });
    let together = found(Scheme::LlmInt8 { threshold: 1e9 });
    assert!(apart < 0.05, "{apart}");
    assert!(together > 20.0 * apart, "{together} {apart}");
    // As in bitsandbytes, where 0 is the default of its layers.
    for none in [0.0, f64::INFINITY] {
        assert_eq!(found(Scheme::LlmInt8 { threshold: none }), together);
    }
}

#[test]
fn nothing_in_is_nothing_out_and_views_will_do() {
    for name in ALL {
        let weight = QuantizedWeight::quantize(&numbers(20, &[9, 128]), scheme(name)).unwrap();
        let empty = linear(&Tensor::zeros([2, 0, 128], F32), &weight, None).unwrap();
        assert_eq!(empty.size(), [2, 0, 9]);
        let x = numbers(21, &[128, 6]);
        let view = linear(&x.tr(), &weight, None).unwrap();
        assert_eq!(view, linear(&x.tr().contiguous(), &weight, None).unwrap());
        let double = linear(&x.tr().to_kind(Kind::Double), &weight, None).unwrap();
        assert_eq!(double.kind(), Kind::Double);
        let vector = linear(&x.tr().get(0), &weight, None).unwrap();
        assert_eq!(vector.size(), [9]);
    }
}

#[test]
fn autocast_sets_the_kind() {
    let weight = QuantizedWeight::quantize(&numbers(22, &[9, 128]), Scheme::Int8Dynamic).unwrap();
    let x = numbers(23, &[2, 128]);
    let bias = numbers(24, &[9]);
    let state = overdrive_sys::autocast::State {
        enabled: true,
        dtype: Kind::BFloat16,
        fp8: false,
    };
    // The state belongs to this thread, which ends with the test.
    overdrive_sys::autocast::set_state(Device::Cpu, state).unwrap();
    let y = linear(&x, &weight, Some(&bias)).unwrap();
    let off = overdrive_sys::autocast::State {
        enabled: false,
        ..state
    };
    overdrive_sys::autocast::set_state(Device::Cpu, off).unwrap();
    assert_eq!(y.kind(), Kind::BFloat16);
    assert!(error(&y, &linear(&x, &weight, Some(&bias)).unwrap()) < 1e-2);
}

#[test]
fn what_does_not_fit_is_named() {
    let weight = QuantizedWeight::quantize(&numbers(25, &[9, 128]), Scheme::Int8Dynamic).unwrap();
    let text = |result: Result<Tensor, Error>| result.unwrap_err().to_string();
    let x = numbers(26, &[2, 64]);
    let found = text(linear(&x, &weight, None));
    assert_eq!(
        found,
        "`x` has shape [2, 64]; it must be (…, 128), since the weight is [9, 128]"
    );
    let x = numbers(26, &[2, 128]);
    let found = text(linear(&x.to_kind(Kind::Int64), &weight, None));
    assert!(found.contains("Int64"), "{found}");
    let found = text(linear(&x, &weight, Some(&numbers(27, &[8]))));
    assert!(
        found.contains("`bias`") && found.contains("(9,)"),
        "{found}"
    );
    let found = text(joint_linear(&x, &[], &[]));
    assert!(found.contains("at least one"), "{found}");
}
