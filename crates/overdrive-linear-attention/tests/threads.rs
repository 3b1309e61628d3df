//! Results do not depend on the number of threads, which is set here for the process.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use overdrive_linear_attention::{
    CausalConv1dOptions, DeltaRuleInputs, DeltaRuleOptions, causal_conv1d, gated_delta_rule,
};
use overdrive_sys::threads::set_intra_op;
use tch::{Device, Kind, Tensor};

#[test]
fn any_number_of_threads_gives_the_same_bits_and_gradients() {
    tch::manual_seed(1);
    let random = |shape: &[i64]| Tensor::randn(shape, (Kind::Float, Device::Cpu));
    let leaf = |x: Tensor| x.set_requires_grad(true);
    let (query, key) = (
        leaf(random(&[3, 130, 2, 16])),
        leaf(random(&[3, 130, 2, 16])),
    );
    let value = leaf(random(&[3, 130, 6, 40]));
    let decay = leaf(-random(&[3, 130, 6]).abs());
    let beta = leaf(random(&[3, 130, 6]).sigmoid());
    let weight = leaf(random(&[240, 4]));
    let run = || {
        let inputs = DeltaRuleInputs {
            query: &query,
            key: &key,
            value: &value,
            decay: &decay,
            beta: &beta,
        };
        let options = DeltaRuleOptions {
            qk_l2norm: true,
            ..DeltaRuleOptions::default()
        };
        let (output, state) = gated_delta_rule(inputs, None, &options).unwrap();
        let options = CausalConv1dOptions::default();
        let (y, _) = causal_conv1d(&output.flatten(2, 3), &weight, None, None, &options).unwrap();
        let loss = y.square().sum(Kind::Float) + state.square().sum(Kind::Float);
        let leaves = [&query, &key, &value, &decay, &beta, &weight];
        let mut found = Tensor::run_backward(&[loss], &leaves, false, false);
        found.extend([output, state, y]);
        found
    };
    set_intra_op(1).unwrap();
    let alone = run();
    for threads in [2, 3, 8] {
        set_intra_op(threads).unwrap();
        for (index, (a, b)) in run().iter().zip(&alone).enumerate() {
            assert!(a.equal(b), "result {index} with {threads} threads");
        }
    }
}
