//! Linear layers in FP8, against torchao and their own definition.

use std::collections::BTreeMap;

use overdrive_fused::{joint_linear, linear};
use overdrive_precision::{Autocast, Precision, autocast};
use tch::{Device, Kind, Tensor};

use crate::common::values;

/// Returns the result of a layer in FP8 on `(M, I)`, and the gradients of `inputs`.
fn run(inputs: &[&Tensor], dy: &Tensor, forward: impl Fn() -> Tensor) -> (Tensor, Vec<Tensor>) {
    let y = {
        let _autocast = Precision::Fp8.autocast(Device::Cpu).unwrap();
        forward()
    };
    let loss = (y.to_kind(Kind::Float) * dy.to_kind(Kind::Float)).sum(Kind::Float);
    let gradients = Tensor::run_backward(&[loss], inputs, false, false);
    (y.detach(), gradients)
}

fn leaf(shape: &[i64], seed: u64) -> Tensor {
    values(shape, seed).set_requires_grad(true)
}

/// Asserts that no element differs by more than a digit of bf16, or by a small share of the largest: torchao adds the bias to
/// a product that is already rounded.
fn assert_close(found: &Tensor, expected: &Tensor, what: &str) {
    let [found, expected] = [found, expected].map(|tensor| tensor.to_kind(Kind::Double));
    let beyond = (&found - &expected).abs() - expected.abs() * 2f64.powi(-7);
    let share = (beyond.max() / expected.abs().max()).double_value(&[]);
    assert!(share <= 2f64.powi(-9), "{what}: {share}");
}

#[test]
fn a_layer_has_the_numbers_of_torchao() {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/fixtures/fp8_linear.safetensors"
    );
    let tensors: BTreeMap<String, Tensor> = Tensor::read_safetensors(path)
        .unwrap()
        .into_iter()
        .collect();
    for name in ["even", "ragged"] {
        let of = |part: &str| tensors.get(&format!("{name}.{part}"));
        let given = |part| of(part).map(|tensor| tensor.copy().set_requires_grad(true));
        let (x, weight, bias) = (given("x").unwrap(), given("weight").unwrap(), given("bias"));
        let inputs: Vec<&Tensor> = [&x, &weight].into_iter().chain(&bias).collect();
        let dy = of("dy").unwrap();
        let (y, gradients) = run(&inputs, dy, || linear(&x, &weight, bias.as_ref()).unwrap());
        assert_close(&y, of("y").unwrap(), "y");
        for (part, found) in ["dx", "dw", "db"].iter().zip(&gradients) {
            assert_close(found, of(part).unwrap(), part);
        }
        assert_eq!(
            (y.kind(), gradients[1].kind()),
            (Kind::BFloat16, Kind::Float)
        );
    }
}

#[test]
fn joint_weights_are_one_weight() {
    let (x, dy) = (leaf(&[2, 5, 32], 1), values(&[2, 5, 48], 2));
    let (weights, biases) = (
        [leaf(&[32, 32], 3), leaf(&[16, 32], 4)],
        [leaf(&[32], 5), leaf(&[16], 6)],
    );
    let inputs = [&x, &weights[0], &weights[1], &biases[0], &biases[1]];
    let [w, b] = [&weights, &biases].map(|parts| parts.each_ref());
    let (y, gradients) = run(&inputs, &dy, || joint_linear(&x, &w, Some(&b)).unwrap());

    let joint = |parts: &[Tensor; 2]| Tensor::cat(parts, 0).detach().set_requires_grad(true);
    let (weight, bias) = (joint(&weights), joint(&biases));
    let (expected, whole) = run(&[&x, &weight, &bias], &dy, || {
        linear(&x, &weight, Some(&bias)).unwrap()
    });
    assert_eq!(y, expected);
    assert_eq!(gradients[0], whole[0]);
    assert_eq!(Tensor::cat(&gradients[1..3], 0), whole[1]);
    assert_eq!(Tensor::cat(&gradients[3..], 0), whole[2]);
}

#[test]
fn inputs_without_gradients_change_no_others() {
    let (x, weight, dy) = (leaf(&[7, 32], 1), leaf(&[48, 32], 2), values(&[7, 48], 3));
    let (frozen_x, frozen_weight) = (x.detach(), weight.detach());
    let (y, all) = run(&[&x, &weight], &dy, || linear(&x, &weight, None).unwrap());
    let (y1, of_x) = run(&[&x], &dy, || linear(&x, &frozen_weight, None).unwrap());
    let (y2, of_weight) = run(&[&weight], &dy, || {
        linear(&frozen_x, &weight, None).unwrap()
    });
    assert_eq!((&y, &y), (&y1, &y2));
    assert_eq!((&all[0], &all[1]), (&of_x[0], &of_weight[0]));
    let _autocast = Precision::Fp8.autocast(Device::Cpu).unwrap();
    let plain = tch::no_grad(|| linear(&x, &weight, None).unwrap());
    assert_eq!(plain, y);
}

#[test]
fn fp8_is_used_where_the_region_and_the_sizes_allow_it() {
    let (x, weight) = (values(&[4, 32], 1), values(&[16, 32], 2));
    let product = || linear(&x, &weight, None).unwrap();
    let bf16 = {
        let _autocast = autocast(Device::Cpu, Kind::BFloat16).unwrap();
        product()
    };
    let _fp8 = Precision::Fp8.autocast(Device::Cpu).unwrap();
    let fp8 = product();
    assert_ne!(fp8, bf16);
    {
        let _inner = autocast(Device::Cpu, Kind::BFloat16).unwrap();
        assert_eq!(
            product(),
            bf16,
            "a region that names a dtype is one of that dtype"
        );
    }
    {
        let _inner = Autocast::new(Device::Cpu)
            .cache_enabled(false)
            .enter()
            .unwrap();
        assert_eq!(product(), fp8, "a region that names none keeps the setting");
    }
    {
        let _full = Autocast::new(Device::Cpu).enabled(false).enter().unwrap();
        assert!(product().allclose(&x.matmul(&weight.tr()), 1e-5, 1e-6, false));
    }
    let elsewhere = std::thread::scope(|scope| {
        let [x, weight] = [&x, &weight].map(Tensor::shallow_clone);
        scope
            .spawn(move || linear(&x, &weight, None).unwrap())
            .join()
            .unwrap()
    });
    assert_eq!(
        elsewhere.kind(),
        Kind::Float,
        "another thread is in no region"
    );
    assert_eq!(product(), fp8);

    for (outputs, inputs) in [(15, 32), (16, 24)] {
        let (x, weight) = (values(&[4, inputs], 1), values(&[outputs, inputs], 2));
        let found = linear(&x, &weight, None).unwrap();
        let _bf16 = autocast(Device::Cpu, Kind::BFloat16).unwrap();
        assert_eq!(
            found,
            linear(&x, &weight, None).unwrap(),
            "{outputs} {inputs}"
        );
    }
}

#[test]
fn zeros_stay_zeros_and_nan_stays_visible() {
    let _autocast = Precision::Fp8.autocast(Device::Cpu).unwrap();
    let (zeros, weight) = (
        Tensor::zeros([3, 16], (Kind::Float, Device::Cpu)),
        values(&[16, 16], 2),
    );
    let y = linear(&zeros, &weight, None).unwrap();
    assert_eq!(y.abs().max().double_value(&[]), 0.0);
    let broken = values(&[3, 16], 1);
    let _ = broken.get(1).get(5).fill_(f64::NAN);
    let y = linear(&broken, &weight, None).unwrap();
    assert!(y.get(1).isnan().all().double_value(&[]) > 0.0);
    // Empty batches are left to libtorch.
    assert_eq!(
        linear(&zeros.narrow(0, 0, 0), &weight, None)
            .unwrap()
            .size(),
        [0, 16]
    );
}
