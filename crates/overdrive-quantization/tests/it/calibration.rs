//! Calibrated against rounded weights, on activations like those of a transformer's layers: correlated,
//! and with a few inputs that are much larger than the rest.

use overdrive_quantization::{
    CalibrationOptions, ClipOptions, Error, GptqOptions, InputCollector, InputObserver,
    InputStatistics, Migration, Moments, QuantizedWeight, Result, Scheme, fold_into_columns,
    fold_into_rows, linear, migration_scales, observe_input, observe_inputs, quantize_calibrated,
};
use tch::{Device, Kind, Tensor};

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

/// Returns normal numbers that do not depend on libtorch's global generator, which other tests use at the same
/// time: sums of uniform ones.
fn normal(shape: [i64; 2], seed: u64) -> Tensor {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u32 << 24) as f32 - 0.5
    };
    let numbers: Vec<f32> = (0..shape[0] * shape[1])
        .map(|_| (0..12).map(|_| uniform()).sum())
        .collect();
    Tensor::from_slice(&numbers).view(shape)
}

/// Returns `rows` activations of `inputs` channels with a quarter of that rank; every 50th channel is fifteen times
/// as large.
fn activations(rows: i64, inputs: i64, seed: u64) -> Tensor {
    let hidden = normal([rows, inputs / 4], seed).matmul(&normal([inputs / 4, inputs], 77));
    let noise = normal([rows, inputs], seed + 1000) * 2.0;
    let place = Tensor::arange(inputs, CPU).remainder(50.0);
    (hidden + noise) * (place.eq(7.0) * 14.0 + 1.0) * 0.1
}

/// Returns a weight with a few large elements, as trained ones have.
fn trained(outputs: i64, inputs: i64, seed: u64) -> Tensor {
    let base = normal([outputs, inputs], seed) * 0.02;
    let rare = normal([outputs, inputs], seed + 500).abs().gt(3.2);
    &base + &base * rare * 4.0
}

fn statistics(x: &Tensor, moments: Moments) -> InputStatistics {
    let mut statistics = InputStatistics::new(x.size()[1], moments, Device::Cpu).unwrap();
    // In parts, as batches come.
    for part in x.chunk(4, 0) {
        statistics.add(&part).unwrap();
    }
    statistics
}

fn clip() -> CalibrationOptions {
    CalibrationOptions {
        clip: Some(ClipOptions::default()),
        ..CalibrationOptions::default()
    }
}

fn gptq() -> CalibrationOptions {
    CalibrationOptions {
        gptq: Some(GptqOptions::default()),
        ..CalibrationOptions::default()
    }
}

fn both() -> CalibrationOptions {
    CalibrationOptions {
        clip: clip().clip,
        ..gptq()
    }
}

/// Returns the mean squared error of outputs over rows that calibration has not seen, relative to the outputs.
fn error(weight: &Tensor, packed: &QuantizedWeight, x: &Tensor) -> f64 {
    let exact = x.matmul(&weight.tr());
    let found = x.matmul(&packed.dequantize(Kind::Float).unwrap().tr());
    let error = (found - &exact).square().mean(Kind::Double);
    f64::try_from(error / exact.square().mean(Kind::Double)).unwrap()
}

#[test]
fn gptq_beats_rounding_to_the_nearest_in_every_scheme() {
    let (weight, seen, unseen) = (
        trained(96, 384, 1),
        activations(2048, 384, 2),
        activations(512, 384, 3),
    );
    let statistics = statistics(&seen, Moments::Full);
    for name in Scheme::NAMES {
        let scheme: Scheme = name.parse().unwrap();
        let of = |options: &CalibrationOptions| {
            let packed = quantize_calibrated(&weight, scheme, Some(&statistics), options).unwrap();
            assert_eq!(packed.scheme(), scheme);
            error(&weight, &packed, &unseen)
        };
        let rounded = of(&CalibrationOptions::default());
        let (clipped, chosen, both) = (of(&clip()), of(&gptq()), of(&both()));
        println!(
            "{name:<12} rounded {rounded:.2e}, clipped {:.2}, GPTQ {:.2}, both {:.2} of that",
            clipped / rounded,
            chosen / rounded,
            both / rounded
        );
        assert!(
            chosen < 0.6 * rounded,
            "{name}: {chosen:.2e} of {rounded:.2e}"
        );
        assert!(
            clipped < 1.02 * rounded,
            "{name}: {clipped:.2e} of {rounded:.2e}"
        );
        assert!(both < 0.6 * rounded, "{name}: {both:.2e} of {rounded:.2e}");
    }
}

#[test]
fn gptq_in_the_order_of_inputs_and_with_more_damping_is_still_better_than_rounding() {
    let (weight, seen) = (trained(64, 256, 4), activations(2048, 256, 5));
    let statistics = statistics(&seen, Moments::Full);
    let scheme: Scheme = "int4-g64".parse().unwrap();
    let rounded = QuantizedWeight::quantize(&weight, scheme).unwrap();
    let rounded = error(&weight, &rounded, &seen);
    for (desc_act, damp_percent) in [(false, 0.01), (true, 0.1), (false, 0.1)] {
        let options = CalibrationOptions {
            gptq: Some(GptqOptions {
                damp_percent,
                desc_act,
            }),
            ..CalibrationOptions::default()
        };
        let chosen = quantize_calibrated(&weight, scheme, Some(&statistics), &options).unwrap();
        let chosen = error(&weight, &chosen, &seen);
        assert!(
            chosen < 0.7 * rounded,
            "{desc_act} {damp_percent}: {chosen} of {rounded}"
        );
    }
}

#[test]
fn gptq_of_uncorrelated_inputs_is_rounding_to_the_nearest() {
    let weight = trained(16, 64, 6);
    // Moments that are the identity: no input can make good what another loses.
    let eye = Tensor::eye(64, CPU);
    let statistics = statistics(&eye, Moments::Full);
    let scheme: Scheme = "int4-g32".parse().unwrap();
    let chosen = quantize_calibrated(&weight, scheme, Some(&statistics), &gptq()).unwrap();
    let rounded = QuantizedWeight::quantize(&weight, scheme).unwrap();
    let difference =
        chosen.dequantize(Kind::Float).unwrap() - rounded.dequantize(Kind::Float).unwrap();
    assert!(difference.abs().max().double_value(&[]) < 1e-6);
}

#[test]
fn inputs_that_are_always_zero_do_not_break_gptq() {
    let weight = trained(16, 64, 7);
    let x = activations(256, 64, 8);
    let _ = x.narrow(1, 5, 3).zero_();
    let packed = quantize_calibrated(
        &weight,
        "int4-g32".parse().unwrap(),
        Some(&statistics(&x, Moments::Full)),
        &both(),
    )
    .unwrap();
    let back = packed.dequantize(Kind::Float).unwrap();
    assert_eq!(back.isfinite().all().int64_value(&[]), 1);
    assert!(error(&weight, &packed, &x) < 0.02);
}

#[test]
fn clipping_without_data_lowers_the_error_of_the_weight() {
    let weight = trained(64, 512, 9);
    for name in [
        "int4",
        "int4-g32",
        "int4-asym",
        "nf4",
        "nf4-single",
        "fp4",
        "int8",
    ] {
        let scheme: Scheme = name.parse().unwrap();
        let of = |packed: &QuantizedWeight| {
            let difference = packed.dequantize(Kind::Float).unwrap() - &weight;
            difference.square().sum(Kind::Double).double_value(&[])
        };
        let rounded = of(&QuantizedWeight::quantize(&weight, scheme).unwrap());
        let clipped = of(&quantize_calibrated(&weight, scheme, None, &clip()).unwrap());
        // Magnitudes quantized in their turn round a little differently.
        assert!(clipped < 1.001 * rounded, "{name}: {clipped} of {rounded}");
        if name.starts_with("int4") {
            assert!(clipped < 0.9 * rounded, "{name}: {clipped} of {rounded}");
        }
    }
}

#[test]
fn smoothing_lets_activations_with_outliers_be_quantized() {
    let (weight, x) = (trained(96, 384, 10), activations(256, 384, 11));
    let statistics = statistics(&activations(1024, 384, 12), Moments::Diagonal);
    let scheme = Scheme::Int8Dynamic;
    let exact = x.matmul(&weight.tr());
    let of = |y: Tensor| {
        let error = (y - &exact).square().mean(Kind::Double);
        error.double_value(&[])
    };
    let packed = QuantizedWeight::quantize(&weight, scheme).unwrap();
    let plain = of(linear(&x, &packed, None).unwrap());
    let scales =
        migration_scales(&[&weight], &statistics, Migration::Strength(0.5), scheme).unwrap();
    let packed = fold_into_columns(&weight, &scales).unwrap();
    let packed = QuantizedWeight::quantize(&packed, scheme).unwrap();
    let smooth = of(linear(&(&x / &scales), &packed, None).unwrap());
    println!(
        "8-bit activations with outliers: smoothing leaves {:.3} of the error",
        smooth / plain
    );
    assert!(smooth < 0.4 * plain, "{smooth} of {plain}");
}

#[test]
fn the_searched_migration_is_never_worse_than_none() {
    let (weight, x) = (trained(96, 384, 13), activations(1024, 384, 14));
    let statistics = statistics(&x, Moments::Full);
    for name in ["int4", "int4-g32", "nf4"] {
        let scheme: Scheme = name.parse().unwrap();
        let search = Migration::Search { steps: 20 };
        let scales = migration_scales(&[&weight], &statistics, search, scheme).unwrap();
        let packed = fold_into_columns(&weight, &scales).unwrap();
        let packed = QuantizedWeight::quantize(&packed, scheme).unwrap();
        let back = packed.dequantize(Kind::Float).unwrap() / &scales;
        let searched = statistics.output_error(&weight, &back).unwrap();
        let plain = QuantizedWeight::quantize(&weight, scheme).unwrap();
        let plain = plain.dequantize(Kind::Float).unwrap();
        let plain = statistics.output_error(&weight, &plain).unwrap();
        println!(
            "{name}: searched migration leaves {:.2} of the error",
            searched / plain
        );
        assert!(searched < 0.8 * plain, "{name}: {searched} of {plain}");
    }
}

#[test]
fn folded_scales_change_nothing_that_is_computed() {
    let (gain, weight, x) = (
        normal([1, 64], 15).view(64),
        normal([32, 64], 16),
        normal([8, 64], 17),
    );
    let before = normal([64, 48], 18);
    let scales = normal([1, 64], 19).view(64).abs() + 0.1;
    let columns = fold_into_columns(&weight, &scales).unwrap();
    let close = |a: Tensor, b: Tensor| {
        let difference = (&a - &b).abs().max() / b.abs().max();
        assert!(difference.double_value(&[]) < 1e-5);
    };
    let norm = fold_into_rows(&gain, &scales, false).unwrap();
    close(
        (&x * &norm).matmul(&columns.tr()),
        (&x * &gain).matmul(&weight.tr()),
    );
    let norm = fold_into_rows(&gain, &scales, true).unwrap();
    close(
        (&x * (norm + 1.0)).matmul(&columns.tr()),
        (&x * (&gain + 1.0)).matmul(&weight.tr()),
    );
    let rows = fold_into_rows(&before, &scales, false).unwrap();
    let z = normal([8, 48], 20);
    close(
        z.matmul(&rows.tr()).matmul(&columns.tr()),
        z.matmul(&before.tr()).matmul(&weight.tr()),
    );
    let statistics = statistics(&x, Moments::Full).divided_by(&scales).unwrap();
    let expected = (&x / &scales).tr().matmul(&(&x / &scales)) / 8.0;
    close(statistics.second_moments().unwrap().unwrap(), expected);
}

#[test]
fn the_output_error_is_that_of_the_outputs() {
    let (weight, x) = (normal([24, 64], 21), activations(128, 64, 22));
    let other = &weight + normal([24, 64], 23) * 0.1;
    let statistics = statistics(&x, Moments::Full);
    let exact = (x.matmul(&other.tr()) - x.matmul(&weight.tr()))
        .square()
        .sum(Kind::Double)
        / 128.0;
    let found = statistics.output_error(&weight, &other).unwrap();
    assert!((found / exact.double_value(&[]) - 1.0).abs() < 1e-4);
}

#[test]
fn layers_of_the_same_input_share_their_statistics() {
    let collector = InputCollector::new(Moments::Diagonal);
    let (mut collector, result) = observe_inputs(collector, || -> Result<()> {
        for seed in 0..3 {
            let x = normal([5, 8], 30 + seed);
            for name in ["q", "k", "v"] {
                observe_input(name, &x)?;
            }
            observe_input("o", &normal([5, 16], 40 + seed))?;
        }
        Ok(())
    });
    result.unwrap();
    collector.finish();
    assert_eq!(collector.names().collect::<Vec<_>>(), ["k", "o", "q", "v"]);
    for name in ["q", "k", "v", "o"] {
        assert_eq!(collector.get(name).unwrap().rows(), 15, "{name}");
    }
    let address = |name| std::ptr::from_ref(collector.get(name).unwrap());
    assert_eq!(address("q"), address("v"));
    assert_ne!(address("q"), address("o"));
}

/// An observer that counts its calls.
struct Counter(usize);

impl InputObserver for Counter {
    fn observe(&mut self, _: &str, _: &Tensor) -> Result<()> {
        self.0 += 1;
        Ok(())
    }
}

/// An observer that runs a layer of its own in each call.
struct Runs(Vec<String>);

impl InputObserver for Runs {
    fn observe(&mut self, name: &str, x: &Tensor) -> Result<()> {
        self.0.push(name.to_owned());
        observe_input("its_own", x)
    }
}

#[test]
fn observers_may_run_layers_of_their_own() {
    let x = Tensor::ones([2, 8], (Kind::Float, Device::Cpu));
    let (runs, seen) = observe_inputs(Runs(Vec::new()), || {
        observe_input("a", &x)?;
        observe_input("b", &x)
    });
    seen.unwrap();
    assert_eq!(runs.0, ["a", "b"]);
}

#[test]
fn observers_see_only_what_runs_under_them() {
    let x = Tensor::zeros([1, 4], CPU);
    observe_input("a", &x).unwrap();
    let (outer, inner) = observe_inputs(Counter(0), || {
        observe_input("a", &x).unwrap();
        let (inner, ()) = observe_inputs(Counter(0), || observe_input("a", &x).unwrap());
        let failed =
            std::panic::catch_unwind(|| observe_inputs(Counter(0), || panic!("on purpose")));
        assert!(failed.is_err());
        observe_input("a", &x).unwrap();
        inner.0
    });
    observe_input("a", &x).unwrap();
    assert_eq!((outer.0, inner), (2, 1));
}

#[test]
fn invalid_statistics_and_options_are_refused_with_a_reason() {
    let weight = normal([4, 32], 50);
    let scheme: Scheme = "int4-g32".parse().unwrap();
    let text = |result: Result<QuantizedWeight>| result.unwrap_err().to_string();
    assert_eq!(
        text(quantize_calibrated(&weight, scheme, None, &gptq())),
        "`gptq` is enabled without statistics; it must be given statistics of the inputs over a calibration set"
    );
    let diagonal = statistics(&normal([8, 32], 51), Moments::Diagonal);
    assert_eq!(
        text(quantize_calibrated(
            &weight,
            scheme,
            Some(&diagonal),
            &gptq()
        )),
        "`gptq` is enabled without second moments of the inputs; it must be given statistics with \
         `Moments::Full` over a calibration set"
    );
    let other = statistics(&normal([8, 16], 52), Moments::Full);
    assert_eq!(
        text(quantize_calibrated(&weight, scheme, Some(&other), &gptq())),
        "`statistics` has shape [16]; it must be (32,), one value for each input of the weight"
    );
    let options = CalibrationOptions {
        gptq: Some(GptqOptions {
            damp_percent: 0.0,
            desc_act: true,
        }),
        ..CalibrationOptions::default()
    };
    let full = statistics(&normal([8, 32], 53), Moments::Full);
    assert_eq!(
        text(quantize_calibrated(&weight, scheme, Some(&full), &options)),
        "`damp_percent` is 0; it must be positive; 0.01 to 0.1 is usual"
    );
    let mut statistics = InputStatistics::new(2, Moments::Diagonal, Device::Cpu).unwrap();
    let bad = statistics.add(&Tensor::from_slice(&[1f32, f32::INFINITY]));
    assert!(
        matches!(bad, Err(Error::Values { tensor: "x", .. })),
        "{bad:?}"
    );
    assert_eq!(statistics.rows(), 0);
}
