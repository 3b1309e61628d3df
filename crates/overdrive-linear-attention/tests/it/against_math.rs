//! The kernels against libtorch's operators, and these against finite differences.

use overdrive_autograd::{GradcheckOptions, gradcheck};
use overdrive_linear_attention::{
    Backend, CausalConv1dOptions, ConvActivation, DeltaRuleInputs, DeltaRuleOptions, causal_conv1d,
    gated_delta_rule,
};
use overdrive_sys::autocast;
use tch::{Device, Kind, Tensor};

use crate::common::{Owned, Shape, difference, random, same_bits};

fn options(backend: Backend) -> DeltaRuleOptions {
    DeltaRuleOptions {
        backend,
        qk_l2norm: true,
        ..DeltaRuleOptions::default()
    }
}

/// Returns the results, and the gradients of the inputs and of the first state.
fn run(leaves: &Owned, state: &Tensor, options: &DeltaRuleOptions) -> Vec<Tensor> {
    let (output, last) = gated_delta_rule(leaves.inputs(), Some(state), options).unwrap();
    let loss = (output.to_kind(Kind::Double) * random(91, &output.size(), Kind::Double))
        .sum(Kind::Double)
        + (last.to_kind(Kind::Double) * random(92, &last.size(), Kind::Double)).sum(Kind::Double);
    loss.backward();
    let gradients = leaves.tensors().map(Tensor::grad);
    [output, last, state.grad()]
        .into_iter()
        .chain(gradients)
        .collect()
}

/// Compares the kernel in `kind` with the chunked form in f64, relative to the largest number of each result.
fn check(seed: u64, tokens: i64, shape: Shape, kind: Kind, tolerance: f64) {
    let rounded = Owned::random(seed, &[2, tokens], shape, kind);
    let state = random(
        seed + 9,
        &[2, shape.heads, shape.key_dim, shape.value_dim],
        Kind::Float,
    );
    let leaf = |x: &Tensor, kind| x.to_kind(kind).detach().copy().set_requires_grad(true);
    let exact = run(
        &rounded.map(|x| leaf(x, Kind::Double)),
        &leaf(&state, Kind::Double),
        &options(Backend::Math),
    );
    let fused = run(
        &rounded.leaves(),
        &leaf(&state, Kind::Float),
        &options(Backend::Fused),
    );
    for (index, (a, b)) in fused.iter().zip(&exact).enumerate() {
        let largest = b.abs().max().double_value(&[]).max(1.0);
        let off = difference(a, b) / largest;
        assert!(
            off < tolerance,
            "result {index} of {shape:?}, {tokens} tokens, {kind:?}: {off}"
        );
    }
}

fn shape(key_heads: i64, heads: i64, key_dim: i64, value_dim: i64) -> Shape {
    Shape {
        key_heads,
        heads,
        key_dim,
        value_dim,
    }
}

#[test]
fn the_kernel_agrees_with_the_chunked_form_in_results_and_gradients() {
    for (seed, (tokens, shape)) in [
        (1, shape(1, 1, 1, 1)),
        (7, shape(1, 3, 5, 33)),
        (64, shape(2, 2, 16, 32)),
        (65, shape(2, 6, 7, 70)),
        (200, shape(1, 2, 32, 16)),
        (150, shape(1, 2, 128, 128)),
    ]
    .into_iter()
    .enumerate()
    {
        // Rounding errors of sums in f32.
        check(seed as u64, tokens, shape, Kind::Float, 1e-5);
        // One rounding of each result to 8 and 11 bits.
        check(seed as u64, tokens, shape, Kind::BFloat16, 5e-3);
        check(seed as u64, tokens, shape, Kind::Half, 1e-3);
    }
}

#[test]
fn autocast_rounds_nothing_in_the_chunked_form_and_the_convolution() {
    let all = Owned::random(3, &[1, 70], shape(1, 2, 16, 8), Kind::Float);
    let (x, filter) = (
        random(5, &[1, 9, 6], Kind::Float),
        random(6, &[6, 4], Kind::Float),
    );
    let convolution = CausalConv1dOptions {
        backend: Backend::Math,
        ..CausalConv1dOptions::default()
    };
    let results = || {
        let rule = gated_delta_rule(all.inputs(), None, &options(Backend::Math)).unwrap();
        let convolved = causal_conv1d(&x, &filter, None, None, &convolution).unwrap();
        [rule.0, rule.1, convolved.0, convolved.1]
    };
    let expected = results();
    let on = autocast::State {
        enabled: true,
        dtype: Kind::BFloat16,
        ..autocast::state(Device::Cpu).unwrap()
    };
    let _region = autocast::Region::enter(Device::Cpu, on, true).unwrap();
    for (found, expected) in results().iter().zip(&expected) {
        assert!(same_bits(found, expected));
    }
}

#[test]
fn a_state_that_is_forgotten_at_once_leaves_finite_gradients() {
    let shape = shape(1, 2, 8, 8);
    let all = Owned::random(3, &[1, 70], shape, Kind::Float);
    let all = Owned {
        decay: &all.decay - 200.0,
        ..all
    };
    let state = random(4, &[1, 2, 8, 8], Kind::Float).set_requires_grad(true);
    let exact = run(&all.leaves(), &state, &options(Backend::Math));
    let state = state.detach().set_requires_grad(true);
    let fused = run(&all.leaves(), &state, &options(Backend::Fused));
    for (a, b) in fused.iter().zip(&exact) {
        assert!(difference(a, b) < 1e-5);
    }
}

#[test]
fn the_scale_of_the_queries_is_that_of_the_options() {
    let all = Owned::random(3, &[1, 9], shape(1, 2, 16, 8), Kind::Float);
    for backend in [Backend::Math, Backend::Fused] {
        let options = options(backend);
        let (default, _) = gated_delta_rule(all.inputs(), None, &options).unwrap();
        let scaled = DeltaRuleOptions {
            scale: Some(-0.5),
            ..options
        };
        let (scaled, _) = gated_delta_rule(all.inputs(), None, &scaled).unwrap();
        // 1/sqrt(16) by default.
        assert!(difference(&scaled, &(default * -2.0)) < 1e-6);
    }
}

#[test]
fn the_gradients_of_the_chunked_form_are_those_of_finite_differences() {
    let all = Owned::random(5, &[1, 5], shape(1, 2, 3, 2), Kind::Double);
    let state = random(6, &[1, 2, 3, 2], Kind::Double);
    let mut inputs: Vec<Tensor> = all
        .tensors()
        .map(|x| x.copy().set_requires_grad(true))
        .into();
    inputs.push(state.set_requires_grad(true));
    let options = DeltaRuleOptions {
        chunk_size: 2,
        ..options(Backend::Auto)
    };
    let function = |x: &[Tensor]| {
        let inputs = DeltaRuleInputs {
            query: &x[0],
            key: &x[1],
            value: &x[2],
            decay: &x[3],
            beta: &x[4],
        };
        let (output, state) = gated_delta_rule(inputs, Some(&x[5]), &options)?;
        Ok(vec![output, state])
    };
    gradcheck(function, &inputs, &GradcheckOptions::default()).unwrap();
}

#[test]
fn the_convolution_agrees_with_libtorchs_in_results_and_gradients() {
    for (seed, (tokens, channels, width, silu, bias)) in [
        (1, 1, 1, true, false),
        (5, 20, 4, true, true),
        (40, 300, 4, true, false),
        (33, 130, 3, false, true),
        (50, 7, 21, true, true),
        (3, 18, 8, true, true),
    ]
    .into_iter()
    .enumerate()
    {
        let seed = seed as u64;
        for (kind, tolerance) in [(Kind::Float, 1e-5), (Kind::BFloat16, 8e-3)] {
            let x = random(seed, &[2, tokens, channels], kind);
            let weight = random(seed + 1, &[channels, width], kind);
            let bias = bias.then(|| random(seed + 2, &[channels], kind));
            let state = random(seed + 3, &[2, channels, width - 1], kind);
            let run = |backend, kind: Kind| {
                let leaf = |x: &Tensor| x.to_kind(kind).copy().set_requires_grad(true);
                let (x, weight, state) = (leaf(&x), leaf(&weight), leaf(&state));
                let bias = bias.as_ref().map(leaf);
                let options = CausalConv1dOptions {
                    backend,
                    activation: match silu {
                        true => ConvActivation::Silu,
                        false => ConvActivation::Identity,
                    },
                };
                let (y, last) =
                    causal_conv1d(&x, &weight, bias.as_ref(), Some(&state), &options).unwrap();
                let factor = random(77, &y.size(), Kind::Double);
                let of_last = random(78, &last.size(), Kind::Double);
                let loss = (y.to_kind(Kind::Double) * factor).sum(Kind::Double)
                    + (last.to_kind(Kind::Double) * of_last).sum(Kind::Double);
                loss.backward();
                let mut found = vec![y, last, x.grad(), weight.grad(), state.grad()];
                found.extend(bias.map(|bias| bias.grad()));
                found
            };
            let exact = run(Backend::Math, Kind::Double);
            for (index, (a, b)) in run(Backend::Fused, kind).iter().zip(&exact).enumerate() {
                if b.numel() == 0 {
                    continue;
                }
                let largest = b.abs().max().double_value(&[]).max(1.0);
                let off = difference(a, b) / largest;
                assert!(
                    off < tolerance,
                    "result {index} of case {seed}, {kind:?}: {off}"
                );
            }
        }
    }
}

#[test]
fn the_kernels_can_be_differentiated_once() {
    let leaves = Owned::random(3, &[1, 9], shape(1, 2, 16, 8), Kind::Float).leaves();
    let (output, _) = gated_delta_rule(leaves.inputs(), None, &options(Backend::Fused)).unwrap();
    let loss = output.square().sum(Kind::Float);
    let first = Tensor::run_backward(&[loss], &[&leaves.query], true, true).remove(0);
    let second = first.sum(Kind::Float).f_backward().unwrap_err().to_string();
    assert!(second.contains("gated_delta_rule"), "{second}");
}

#[test]
fn only_one_result_may_have_a_gradient() {
    for backend in [Backend::Math, Backend::Fused] {
        let leaves = Owned::random(3, &[1, 9], shape(1, 2, 16, 8), Kind::Float).leaves();
        let (_, state) = gated_delta_rule(leaves.inputs(), None, &options(backend)).unwrap();
        state.sum(Kind::Float).backward();
        // The query has no part in the state.
        let query = leaves.query.grad();
        assert!(!query.defined() || query.abs().max().double_value(&[]) == 0.0);
        assert!(leaves.key.grad().abs().max().double_value(&[]) > 0.0);
    }
}
