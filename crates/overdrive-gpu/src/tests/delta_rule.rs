//! Launches of the gated delta rule.

use tch::{Kind, Tensor};

use super::launches::empty;
use super::stand_in::StandIn;
use crate::{CausalConv1d, DeltaRule, StatePlan};

pub(super) fn delta_rule(stand_in: &StandIn, kind: Kind) {
    let run = |call: &DeltaRule<'_>| stand_in.kernels.delta_rule(call);
    // The widths of keys and values, for each bucket.
    for (key_dim, value_dim) in [(48, 32), (128, 16), (144, 48)] {
        for qk_l2norm in [false, true] {
            let (tokens, key_heads, heads, sequences) = (4, 2, 6, 3);
            // As a convolution leaves them: side by side.
            let widths = [key_heads * key_dim, key_heads * key_dim, heads * value_dim];
            let mixed = empty(&[tokens, widths.iter().sum()], kind);
            let part = |start: i64, heads: i64, dim: i64| {
                let columns = mixed.narrow(1, start, heads * dim);
                columns.view([tokens, heads, dim])
            };
            let [query, key, value] = [
                part(0, key_heads, key_dim),
                part(widths[0], key_heads, key_dim),
                part(2 * widths[0], heads, value_dim),
            ];
            let numbers = empty(&[tokens, heads], Kind::Float);
            let states = empty(&[2 * sequences, heads, key_dim, value_dim], Kind::Float);
            let from = [None, Some(1), Some(2)];
            let plan = StatePlan::new(&[0, 3, 3, 4], &from, &[3, 4, 2]).unwrap();
            let call = DeltaRule {
                query: &query,
                key: &key,
                value: &value,
                decay: &numbers,
                beta: &numbers,
                states: &states,
                plan: &plan,
                scale: 0.25,
                qk_l2norm,
            };
            let y = run(&call).unwrap().unwrap();
            assert_eq!((y.size(), y.kind()), (vec![tokens, heads, value_dim], kind));
            refused(&call, &run);
            convolution(stand_in, &mixed, &plan);
        }
    }
}

/// Checks calls that no kernel takes, and a call that is wrong.
fn refused(call: &DeltaRule<'_>, run: &dyn Fn(&DeltaRule<'_>) -> crate::Result<Option<Tensor>>) {
    let doubles = call.value.to_kind(Kind::Double);
    let other = DeltaRule {
        value: &doubles,
        ..*call
    };
    assert!(run(&other).unwrap().is_none());
    let doubles = [call.decay, call.states].map(|x| x.to_kind(Kind::Double));
    let wide = DeltaRule {
        decay: &doubles[0],
        states: &doubles[1],
        ..*call
    };
    assert!(run(&wide).unwrap().is_none());
    let transposed = call.key.transpose(1, 2).contiguous().transpose(1, 2);
    let strided = DeltaRule {
        key: &transposed,
        ..*call
    };
    assert!(run(&strided).unwrap().is_none());
    let narrow = call.beta.narrow(1, 0, 1);
    let wrong = DeltaRule {
        beta: &narrow,
        ..*call
    };
    assert!(run(&wrong).unwrap_err().to_string().contains("`beta`"));
}

fn convolution(stand_in: &StandIn, x: &Tensor, plan: &StatePlan) {
    let channels = x.size()[1];
    let call = CausalConv1d {
        x,
        weight: &empty(&[channels, 4], x.kind()),
        states: &empty(&[6, channels, 3], x.kind()),
        plan,
    };
    let y = stand_in.kernels.causal_conv1d(&call).unwrap().unwrap();
    assert_eq!((y.size(), y.kind()), (x.size(), x.kind()));
    let wide = CausalConv1d {
        weight: &empty(&[channels, 5], x.kind()),
        states: &empty(&[6, channels, 4], x.kind()),
        ..call
    };
    assert!(stand_in.kernels.causal_conv1d(&wide).unwrap().is_none());
}
