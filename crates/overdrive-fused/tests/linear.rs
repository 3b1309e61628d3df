//! Linear maps by the picked product library: results and gradients of libtorch's own operator.
//! A target of its own: the library is a setting of the process.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../../../test_tensors/mod.rs"]
mod test_tensors;

use overdrive_fused::{Error, adjacent, joint_linear, linear};
use overdrive_sys::gemm::{GemmLibrary, set_library};
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

/// oneDNN is what is tested here, where it multiplies on this processor.
fn library() -> GemmLibrary {
    let known = [GemmLibrary::OneDnn, GemmLibrary::Torch];
    known
        .into_iter()
        .find(|library| library.is_available())
        .unwrap()
}

fn normal(shape: &[i64]) -> Tensor {
    test_tensors::normal(shape).to_kind(Kind::Float)
}

fn leaf(shape: &[i64]) -> Tensor {
    normal(shape).set_requires_grad(true)
}

/// The result and the gradients of `inputs` for a fixed gradient of the result.
fn run(inputs: &[&Tensor], forward: impl Fn() -> Tensor) -> Vec<Tensor> {
    for input in inputs {
        overdrive_sys::grad::clear(input).unwrap();
    }
    let y = forward();
    let seed = y.detach().sin();
    (&y * &seed).sum(None).backward();
    std::iter::once(y.detach())
        .chain(inputs.iter().map(|input| input.grad().copy()))
        .collect()
}

fn assert_close(ours: &[Tensor], theirs: &[Tensor]) {
    for (a, b) in ours.iter().zip(theirs) {
        assert_eq!(a.size(), b.size());
        let scale = 1.0 + b.abs().max().double_value(&[]);
        let difference = (a - b).abs().max().double_value(&[]);
        assert!(difference <= 1e-5 * scale, "{difference} of {scale}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn a_joint_map_equals_the_maps_one_by_one(
        batch in 1i64..4, rows in 1i64..9, input in 1i64..20, outputs in proptest::collection::vec(1i64..20, 1..4),
        biased: bool, together: bool,
    ) {
        // The same value from every test of this file.
        set_library(library());
        let x = leaf(&[batch, rows, input]);
        let mut weights: Vec<Tensor> = outputs.iter().map(|o| leaf(&[*o, input])).collect();
        if together {
            let all: Vec<&Tensor> = weights.iter().collect();
            weights = adjacent(&all).unwrap().into_iter().map(|w| w.set_requires_grad(true)).collect();
        }
        let biases: Vec<Tensor> = outputs.iter().map(|o| leaf(&[*o])).collect();
        let (w, b): (Vec<&Tensor>, Vec<&Tensor>) = (weights.iter().collect(), biases.iter().collect());
        let mut inputs = vec![&x];
        inputs.extend(&w);
        if biased { inputs.extend(&b); }
        let ours = run(&inputs, || joint_linear(&x, &w, biased.then_some(b.as_slice())).unwrap());
        let theirs = run(&inputs, || {
            let each: Vec<Tensor> = w.iter().zip(&b)
                .map(|(w, b)| x.linear(w, biased.then_some(*b)))
                .collect();
            Tensor::cat(&each, -1)
        });
        assert_close(&ours, &theirs);
    }
}

#[test]
fn adjacent_weights_share_one_piece_of_memory() {
    set_library(library());
    let (a, b) = (normal(&[3, 4]), normal(&[5, 4]));
    let parts = adjacent(&[&a, &b]).unwrap();
    assert_eq!((&parts[0], &parts[1]), (&a, &b));
    assert_eq!(
        parts[0].data_ptr() as usize + 3 * 4 * 4,
        parts[1].data_ptr() as usize
    );
}

#[test]
fn frozen_weights_get_no_gradient_and_a_frozen_input_neither() {
    set_library(library());
    let (x, w) = (leaf(&[2, 3]), normal(&[4, 3]));
    linear(&x, &w, None).unwrap().sum(None).backward();
    assert!(x.grad().defined());
    let (x, w) = (normal(&[2, 3]), leaf(&[4, 3]));
    linear(&x, &w, None).unwrap().sum(None).backward();
    assert!(w.grad().defined() && !x.requires_grad());
}

#[test]
fn f64_is_libtorchs_own_and_can_be_differentiated_twice() {
    let double = |shape: &[i64]| {
        let leaf = normal(shape).to_kind(Kind::Double);
        leaf.set_requires_grad(true)
    };
    let (x, w) = (double(&[2, 3]), double(&[4, 3]));
    assert_eq!(linear(&x, &w, None).unwrap(), x.linear::<&Tensor>(&w, None));
    overdrive_autograd::gradgradcheck(
        |i| Ok(vec![joint_linear(&i[0], &[&i[1], &i[1]], None)?]),
        &[x, w],
        &overdrive_autograd::GradcheckOptions::default(),
    )
    .unwrap();
}

#[test]
fn under_autocast_the_results_are_those_of_autocast() {
    use overdrive_sys::autocast::{self, State};
    let (x, w, b) = (leaf(&[8, 16]), leaf(&[12, 16]), leaf(&[12]));
    let inputs = [&x, &w, &b];
    let before = autocast::state(Device::Cpu).unwrap();
    let low = State {
        enabled: true,
        dtype: Kind::BFloat16,
        fp8: false,
    };
    autocast::set_state(Device::Cpu, low).unwrap();
    let ours = run(&inputs, || linear(&x, &w, Some(&b)).unwrap());
    let theirs = run(&inputs, || x.linear(&w, Some(&b)));
    autocast::set_state(Device::Cpu, before).unwrap();
    autocast::clear_cache().unwrap();
    assert_eq!(ours[0].kind(), Kind::BFloat16);
    for (a, b) in ours.iter().zip(&theirs) {
        assert_eq!(a.kind(), b.kind());
        let scale = b.abs().max().double_value(&[]);
        // One rounding to bf16 (2⁻⁸) of sums taken in another order.
        assert!((a - b).abs().max().double_value(&[]) <= scale / 128.0);
    }
}

#[test]
fn shapes_that_do_not_fit_are_named() {
    let (x, w) = (normal(&[2, 3]), normal(&[4, 5]));
    let error = linear(&x, &w, None).unwrap_err();
    assert!(matches!(
        error,
        Error::Common(overdrive_core::Error::Shape { .. })
    ));
    assert_eq!(
        error.to_string(),
        "`weight of linear` has shape [4, 5]; it must be (O, 3) for x of shape [2, 3]"
    );
    let w = normal(&[4, 3]);
    let error = linear(&x, &w, Some(&normal(&[3]))).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("`bias of linear` has shape [3]; it must be (4,)"),
        "{error}"
    );
    assert!(linear(&x.to_kind(Kind::Int64), &w, None).is_err());
}
