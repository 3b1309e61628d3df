//! Steps over a pool by the kernels of overdrive-gpu, with a library that stands in for the CUDA driver: it writes down
//! launches and does in plain loops in f32 what the kernels do. A target of its own: the stand-in serves all tensors on
//! the CPU of the process.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use counted::StandIn;
use overdrive_linear_attention::{
    Backend, CausalConv1dOptions, ConvActivation, DeltaRuleInputs, DeltaRuleOptions, StateSlot,
    causal_conv1d_update, gated_delta_rule_update,
};
use tch::{Device, Kind, Tensor};

#[path = "../../overdrive-gpu/tests/stand_in/counted.rs"]
mod counted;

const OFFSETS: [i64; 4] = [0, 3, 3, 8];

/// A sequence that starts, one without tokens, and one that keeps its row.
fn slots() -> [StateSlot; 3] {
    let slot = |from, to| StateSlot { from, to };
    [slot(None, 4), slot(Some(1), 3), slot(Some(2), 2)]
}

fn values(shape: &[i64], seed: f64) -> Tensor {
    let count: i64 = shape.iter().product();
    let at = Tensor::arange(count, (Kind::Double, Device::Cpu)) * 12.9898 + seed;
    let fraction = (at.sin() * 43_758.545_3).frac() * 2.0;
    fraction.reshape(shape).to_kind(Kind::Float)
}

fn assert_close(found: &Tensor, expected: &Tensor, name: &str) {
    let off = (found - expected).abs().max().double_value(&[]);
    assert!(off <= 2e-5, "{name} is off by {off}");
}

#[test]
fn a_step_of_the_rule_is_one_launch_with_the_result_of_libtorchs_operators() {
    let stand_in = StandIn::new();
    // As a convolution leaves them, side by side.
    let mixed = values(&[8, 2 * 2 * 32 + 4 * 16], 0.1);
    let part = |start, heads: i64, dim: i64| {
        let columns = mixed.narrow(1, start, heads * dim);
        columns.unflatten(1, [heads, dim])
    };
    let (query, key, value) = (part(0, 2, 32), part(64, 2, 32), part(128, 4, 16));
    let (decay, beta) = (-values(&[8, 4], 0.2).abs(), values(&[8, 4], 0.3).sigmoid());
    let inputs = DeltaRuleInputs {
        query: &query,
        key: &key,
        value: &value,
        decay: &decay,
        beta: &beta,
    };
    let run = |backend, qk_l2norm| {
        let options = DeltaRuleOptions {
            backend,
            qk_l2norm,
            ..DeltaRuleOptions::default()
        };
        let mut states = values(&[5, 4, 32, 16], 0.4);
        let output = gated_delta_rule_update(inputs, &mut states, &slots(), &OFFSETS, &options);
        (output.unwrap(), states, stand_in.launches())
    };
    let (output, states, launches) = run(Backend::Auto, true);
    assert_eq!(launches, ["delta_rule"]);
    let (expected, expected_states, launches) = run(Backend::Math, true);
    assert!(launches.is_empty());
    assert_close(&output, &expected, "the output");
    assert_close(&states, &expected_states, "a state");
}

#[test]
fn a_step_of_the_convolution_is_one_launch_and_what_no_kernel_takes_is_not() {
    let stand_in = StandIn::new();
    let x = values(&[8, 48], 0.1);
    let run = |width: i64, options: &CausalConv1dOptions| {
        let weight = values(&[48, width], 0.2);
        let mut states = values(&[5, 48, width - 1], 0.3);
        let y = causal_conv1d_update(&x, &weight, None, &mut states, &slots(), &OFFSETS, options);
        (y.unwrap(), states, stand_in.launches().len())
    };
    let own = CausalConv1dOptions::default();
    let math = CausalConv1dOptions {
        backend: Backend::Math,
        ..own
    };
    let linear = CausalConv1dOptions {
        activation: ConvActivation::Identity,
        ..own
    };
    let (found, expected) = (run(4, &own), run(4, &math));
    assert_eq!((found.2, expected.2), (1, 0));
    assert_close(&found.0, &expected.0, "y");
    assert_close(&found.1, &expected.1, "a state");
    assert_eq!([run(3, &own).2, run(4, &linear).2], [0, 0]);
}
