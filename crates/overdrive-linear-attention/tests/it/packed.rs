//! Packed sequences: each as alone, and pools of states.

use overdrive_linear_attention::{
    Backend, CausalConv1dOptions, DeltaRuleOptions, causal_conv1d, causal_conv1d_update,
    causal_conv1d_varlen, gated_delta_rule, gated_delta_rule_update, gated_delta_rule_varlen,
};
use tch::{Device, Kind, Tensor};

use crate::common::{Owned, Shape, difference, random};

const SHAPE: Shape = Shape {
    key_heads: 2,
    heads: 4,
    key_dim: 8,
    value_dim: 6,
};
const BACKENDS: [Backend; 2] = [Backend::Auto, Backend::Math];
const OFFSETS: [i64; 6] = [0, 5, 5, 75, 76, 81];

fn options(backend: Backend) -> DeltaRuleOptions {
    DeltaRuleOptions {
        backend,
        qk_l2norm: true,
        ..DeltaRuleOptions::default()
    }
}

#[test]
fn a_packed_sequence_is_computed_as_if_it_were_alone() {
    for backend in BACKENDS {
        let leaves = Owned::random(1, &[81], SHAPE, Kind::Float).leaves();
        let options = options(backend);
        let weights = random(9, &[81, 4, 6], Kind::Float);
        let output = gated_delta_rule_varlen(leaves.inputs(), &OFFSETS, &options).unwrap();
        (&output * &weights).sum(Kind::Float).backward();
        for pair in OFFSETS.windows(2) {
            let rows = |x: &Tensor| x.narrow(0, pair[0], pair[1] - pair[0]);
            let alone = leaves.map(|x| rows(x).unsqueeze(0)).leaves();
            let (expected, _) = gated_delta_rule(alone.inputs(), None, &options).unwrap();
            let loss = (&expected * rows(&weights)).sum(Kind::Float);
            assert!(difference(&rows(&output), &expected.squeeze_dim(0)) < 1e-6);
            if pair[0] == pair[1] {
                continue;
            }
            loss.backward();
            for (of_pack, alone) in leaves.tensors().iter().zip(alone.tensors()) {
                let off = difference(&rows(&of_pack.grad()), &alone.grad().squeeze_dim(0));
                assert!(off < 1e-5, "{backend:?}: {off}");
            }
        }
    }
}

#[test]
fn an_update_continues_each_sequence_from_its_slot() {
    for backend in BACKENDS {
        let all = Owned::random(2, &[81], SHAPE, Kind::Float);
        let options = options(backend);
        let before = random(3, &[7, 4, 8, 6], Kind::Float);
        let mut states = before.copy();
        let slots = [6, 1, 0, 3, 4];
        let output =
            gated_delta_rule_update(all.inputs(), &mut states, &slots, &OFFSETS, &options).unwrap();
        for (pair, &slot) in OFFSETS.windows(2).zip(&slots) {
            let rows = |x: &Tensor| x.narrow(0, pair[0], pair[1] - pair[0]).unsqueeze(0);
            let alone = all.map(rows);
            let state = before.narrow(0, slot, 1);
            let (expected, state) =
                gated_delta_rule(alone.inputs(), Some(&state), &options).unwrap();
            assert!(difference(&rows(&output), &expected) < 1e-5);
            assert!(difference(&states.narrow(0, slot, 1), &state) < 1e-5);
        }
        for unused in [2, 5] {
            assert!(states.get(unused).equal(&before.get(unused)));
        }
    }
}

#[test]
fn the_convolution_of_packed_sequences_does_not_cross_their_bounds() {
    for backend in BACKENDS {
        let options = CausalConv1dOptions {
            backend,
            ..CausalConv1dOptions::default()
        };
        let leaf = |x: Tensor| x.set_requires_grad(true);
        let x = leaf(random(4, &[81, 18], Kind::Float));
        let weight = leaf(random(5, &[18, 4], Kind::Float));
        let bias = leaf(random(6, &[18], Kind::Float));
        let before = random(7, &[7, 18, 3], Kind::Float);
        let scales = random(8, &[81, 18], Kind::Float);
        let y = causal_conv1d_varlen(&x, &weight, Some(&bias), &OFFSETS, &options).unwrap();
        (&y * &scales).sum(Kind::Float).backward();
        let mut states = before.copy();
        let slots = [6, 1, 0, 3, 4];
        let continued = causal_conv1d_update(
            &x,
            &weight,
            Some(&bias),
            &mut states,
            &slots,
            &OFFSETS,
            &options,
        )
        .unwrap();
        assert!(!continued.requires_grad());
        let (weight_alone, bias_alone) = (leaf(weight.detach().copy()), leaf(bias.detach().copy()));
        for (pair, &slot) in OFFSETS.windows(2).zip(&slots) {
            let rows = |x: &Tensor| x.narrow(0, pair[0], pair[1] - pair[0]);
            let alone = leaf(rows(&x).detach().copy().unsqueeze(0));
            let call = |state: Option<&Tensor>| {
                causal_conv1d(&alone, &weight_alone, Some(&bias_alone), state, &options).unwrap()
            };
            let (expected, _) = call(None);
            assert!(difference(&rows(&y).unsqueeze(0), &expected) < 1e-5);
            let state = before.narrow(0, slot, 1);
            let (from_state, state) = call(Some(&state));
            assert!(difference(&rows(&continued).unsqueeze(0), &from_state) < 1e-5);
            assert!(difference(&states.narrow(0, slot, 1), &state) < 1e-5);
            if pair[0] == pair[1] {
                continue;
            }
            (expected * rows(&scales)).sum(Kind::Float).backward();
            assert!(difference(&rows(&x.grad()), &alone.grad().squeeze_dim(0)) < 1e-5);
        }
        assert!(difference(&weight.grad(), &weight_alone.grad()) < 1e-4);
        assert!(difference(&bias.grad(), &bias_alone.grad()) < 1e-4);
    }
}

fn assert_inputs_may_be_views_of_the_pool(device: Device) {
    let slots = [1i64, 0];
    let offsets = [0, 4, 6];
    for backend in BACKENDS {
        let all = Owned::random(2, &[6], SHAPE, Kind::Float).map(|x| x.to_device(device));
        let start = random(3, &[2, 4, 8, 6], Kind::Float).to_device(device);
        let run = |shares: bool| {
            let mut states = start.copy();
            let pool = if shares {
                states.shallow_clone()
            } else {
                start.copy()
            };
            let flat = pool.view([-1]);
            let own = Owned {
                key: flat.narrow(0, 0, 6 * 2 * 8).view([6, 2, 8]),
                value: flat.narrow(0, 100, 6 * 4 * 6).view([6, 4, 6]),
                ..all.map(Tensor::shallow_clone)
            };
            let options = options(backend);
            let output =
                gated_delta_rule_update(own.inputs(), &mut states, &slots, &offsets, &options);
            (output.unwrap(), states)
        };
        assert_eq!(run(true), run(false), "{backend:?}");

        let options = CausalConv1dOptions {
            backend,
            ..CausalConv1dOptions::default()
        };
        let start = random(4, &[2, 18, 3], Kind::Float).to_device(device);
        let run = |shares: bool| {
            let mut states = start.copy();
            let pool = if shares {
                states.shallow_clone()
            } else {
                start.copy()
            };
            let flat = pool.view([-1]);
            let x = flat.narrow(0, 0, 6 * 18).view([6, 18]);
            let weight = flat.narrow(0, 20, 18 * 4).view([18, 4]);
            let bias = flat.narrow(0, 50, 18);
            let y = causal_conv1d_update(
                &x,
                &weight,
                Some(&bias),
                &mut states,
                &slots,
                &offsets,
                &options,
            );
            (y.unwrap(), states)
        };
        assert_eq!(run(true), run(false), "{backend:?}");
    }
}

#[test]
fn inputs_may_be_views_of_the_pool_that_is_updated() {
    assert_inputs_may_be_views_of_the_pool(Device::Cpu);
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn inputs_may_be_views_of_the_pool_that_is_updated_on_a_gpu() {
    assert_inputs_may_be_views_of_the_pool(Device::Cuda(0));
}
