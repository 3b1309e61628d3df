//! Gradient clipping compared with torch.nn.utils.

use std::collections::BTreeMap;

use overdrive_optim::{
    ClipOptions, Error, clip_grad_norm, clip_grad_value, grad_norm, scale_grads,
};
use overdrive_sys::grad;
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

const NAMES: [&str; 4] = ["proj.weight", "proj.bias", "conv.weight", "gain"];

fn fixture() -> BTreeMap<String, Tensor> {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/fixtures/clip.safetensors"
    );
    Tensor::read_safetensors(path)
        .expect("run gen_optim.py in tests/fixtures to make clip.safetensors")
        .into_iter()
        .collect()
}

fn with_grad(gradient: &Tensor) -> Tensor {
    let parameter = gradient.zeros_like().set_requires_grad(true);
    grad::set(&parameter, &gradient.copy()).unwrap();
    parameter
}

fn assert_close(a: &Tensor, b: &Tensor) {
    let largest = b.abs().max().double_value(&[]);
    assert!((a - b).abs().max().double_value(&[]) <= 1e-6 * largest);
}

#[test]
fn clipped_gradients_and_norms_equal_torch() {
    let fixture = fixture();
    for (label, norm_type) in [("1", 1.0), ("2", 2.0), ("3", 3.0), ("inf", f64::INFINITY)] {
        for (bound, max_norm) in [("0.5", 0.5), ("1e+06", 1e6)] {
            let parameters = NAMES.map(|name| with_grad(&fixture[&format!("grad.{name}")]));
            let options = ClipOptions {
                norm_type,
                ..Default::default()
            };
            let norm = clip_grad_norm(&parameters, max_norm, options).unwrap();
            assert_close(&norm, &fixture[&format!("norm.{label}.{bound}")]);
            for (name, parameter) in NAMES.iter().zip(&parameters) {
                let expected = &fixture[&format!("clipped.{label}.{bound}.{name}")];
                assert_close(&parameter.grad(), expected);
            }
        }
    }
}

#[test]
fn clipped_values_equal_torch() {
    let fixture = fixture();
    let parameters = NAMES.map(|name| with_grad(&fixture[&format!("grad.{name}")]));
    clip_grad_value(&parameters, 1.5).unwrap();
    for (name, parameter) in NAMES.iter().zip(&parameters) {
        assert!(parameter.grad().equal(&fixture[&format!("value.{name}")]));
    }
}

#[test]
fn parameters_without_gradients_have_norm_zero() {
    let parameter = Tensor::zeros([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let norm = clip_grad_norm(&[parameter], 1.0, ClipOptions::default()).unwrap();
    assert_eq!(norm.double_value(&[]), 0.0);
    assert_eq!(
        clip_grad_norm(&[], 1.0, ClipOptions::default())
            .unwrap()
            .double_value(&[]),
        0.0
    );
}

#[test]
fn a_nonfinite_norm_is_an_error_only_if_the_option_is_set() {
    let parameter = with_grad(&Tensor::from_slice(&[1.0f32, f32::INFINITY]));
    let strict = ClipOptions {
        error_if_nonfinite: true,
        ..Default::default()
    };
    let error = clip_grad_norm(&[parameter.shallow_clone()], 1.0, strict).unwrap_err();
    assert!(matches!(error, Error::NonFiniteNorm { norm, .. } if norm == f64::INFINITY));
    assert_eq!(
        parameter.grad().double_value(&[0]),
        1.0,
        "untouched after the error"
    );
    let norm = clip_grad_norm(&[parameter.shallow_clone()], 1.0, ClipOptions::default()).unwrap();
    assert_eq!(norm.double_value(&[]), f64::INFINITY);
    // As in torch: a factor of zero, and infinity times zero.
    assert_eq!(parameter.grad().double_value(&[0]), 0.0);
    assert!(parameter.grad().double_value(&[1]).is_nan());
}

#[test]
fn an_infinite_limit_measures_the_norm_and_leaves_the_gradients() {
    for gradient in [[3.0f32, 4.0], [1.0, f32::INFINITY]] {
        let parameter = with_grad(&Tensor::from_slice(&gradient));
        let parameters = [parameter.shallow_clone()];
        let norm = clip_grad_norm(&parameters, f64::INFINITY, ClipOptions::default()).unwrap();
        assert_eq!(
            norm.double_value(&[]),
            f64::from(gradient[0].hypot(gradient[1]))
        );
        assert_eq!(parameter.grad(), Tensor::from_slice(&gradient));
    }
}

#[test]
fn mixed_kinds_are_clipped_together() {
    let parameters = [
        with_grad(&Tensor::from_slice(&[3f32])),
        with_grad(&Tensor::from_slice(&[4f32]).to_kind(Kind::BFloat16)),
    ];
    let norm = clip_grad_norm(&parameters, 1.0, ClipOptions::default()).unwrap();
    assert!((norm.double_value(&[]) - 5.0).abs() < 1e-6);
    assert!((parameters[0].grad().double_value(&[0]) - 0.6).abs() < 1e-6);
    assert!((parameters[1].grad().double_value(&[0]) - 0.8).abs() < 4e-3);
    assert_eq!(parameters[1].grad().kind(), Kind::BFloat16);
}

#[test]
fn limits_and_orders_out_of_their_range_are_an_error() {
    let error = clip_grad_norm(&[], -1.0, ClipOptions::default()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`max_norm` is -1; it must be 0 or positive; infinity is allowed"
    );
    let zero = ClipOptions {
        norm_type: 0.0,
        ..Default::default()
    };
    let error = grad_norm(&[], zero).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`norm_type` is 0; it must be positive; infinity is allowed"
    );
    assert!(clip_grad_value(&[], f64::NAN).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn the_norm_after_clipping_is_at_most_the_bound(
        values in prop::collection::vec(-1e3f64..1e3, 1..40),
        split in 0usize..40,
        max_norm in 0.01f64..100.0,
    ) {
        let split = split.min(values.len());
        let parameters: Vec<Tensor> = [&values[..split], &values[split..]]
            .into_iter()
            .filter(|part| !part.is_empty())
            .map(|part| with_grad(&Tensor::from_slice(part)))
            .collect();
        let before = clip_grad_norm(&parameters, max_norm, ClipOptions::default()).unwrap();
        let expected = values.iter().map(|v| v * v).sum::<f64>().sqrt();
        prop_assert!((before.double_value(&[]) - expected).abs() <= 1e-9 * expected.max(1.0));
        let after = grad_norm(&parameters, ClipOptions::default()).unwrap().double_value(&[]);
        prop_assert!(after <= max_norm * (1.0 + 1e-9));
        if expected + 1e-6 <= max_norm {
            prop_assert_eq!(after, before.double_value(&[]));
        }
    }

    #[test]
    fn scaling_gradients_scales_their_norm(values in prop::collection::vec(-10f64..10.0, 1..20), factor in 0.1f64..10.0) {
        let parameters = [with_grad(&Tensor::from_slice(&values))];
        let before = grad_norm(&parameters, ClipOptions::default()).unwrap().double_value(&[]);
        scale_grads(&parameters, &Tensor::from(factor)).unwrap();
        let after = grad_norm(&parameters, ClipOptions::default()).unwrap().double_value(&[]);
        prop_assert!((after - before * factor).abs() <= 1e-9 * (1.0 + after));
    }
}

#[test]
fn a_sparse_gradient_is_named() {
    let weight = Tensor::zeros([5, 3], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let ids = Tensor::from_slice(&[1_i64, 2]);
    let rows = Tensor::embedding(&weight, &ids, -1, false, true);
    rows.sum(Kind::Float).backward();
    let parameters = [Tensor::zeros([1], (Kind::Float, Device::Cpu)), weight];
    for refused in [
        clip_grad_norm(&parameters, 1.0, ClipOptions::default()).map(drop),
        clip_grad_value(&parameters, 1.0),
    ] {
        let error = refused.unwrap_err().to_string();
        assert!(
            error.starts_with("the gradient of parameter `parameters[1]` is sparse"),
            "{error}"
        );
    }
}
