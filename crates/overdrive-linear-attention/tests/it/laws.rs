//! What the kernels promise exactly: results do not depend on how tokens are divided among calls, nor on other sequences.

use overdrive_linear_attention::{
    Backend, CausalConv1dOptions, DeltaRuleOptions, StateSlot, causal_conv1d, causal_conv1d_update,
    gated_delta_rule, gated_delta_rule_update,
};
use proptest::prelude::*;
use tch::{Kind, Tensor};

use crate::common::{Owned, Shape, random, same_bits};

fn options(qk_l2norm: bool) -> DeltaRuleOptions {
    DeltaRuleOptions {
        qk_l2norm,
        ..DeltaRuleOptions::default()
    }
}

fn kinds() -> impl Strategy<Value = Kind> {
    prop_oneof![Just(Kind::Float), Just(Kind::BFloat16), Just(Kind::Half)]
}

fn shapes() -> impl Strategy<Value = Shape> {
    (1..3_i64, 1..3_i64, 1..20_i64, 1..70_i64).prop_map(|(key_heads, group, key_dim, value_dim)| {
        Shape {
            key_heads,
            heads: key_heads * group,
            key_dim,
            value_dim,
        }
    })
}

fn state_size(rows: i64, shape: Shape) -> [i64; 4] {
    [rows, shape.heads, shape.key_dim, shape.value_dim]
}

/// Returns cumulative offsets.
fn offsets(lengths: &[i64]) -> Vec<i64> {
    let mut offsets = vec![0];
    for length in lengths {
        offsets.push(offsets[offsets.len() - 1] + length);
    }
    offsets
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn any_division_of_the_tokens_among_calls_gives_the_same_bits(
        shape in shapes(),
        kind in kinds(),
        steps in prop::collection::vec(prop_oneof![Just(1_i64), 0..4_i64, 0..90_i64], 1..6),
        seed in 0..1000_u64,
    ) {
        let offsets = offsets(&steps);
        let total = offsets[steps.len()];
        let all = Owned::random(seed, &[total], shape, kind);
        let before = random(seed + 9, &state_size(2, shape), Kind::Float);
        let mut whole_states = before.copy();
        let whole = gated_delta_rule_update(
            all.inputs(), &mut whole_states, &[1], &[0, total], &options(true),
        ).unwrap();
        let mut states = before.copy();
        for (&start, &step) in offsets.iter().zip(&steps) {
            let part = all.map(|x| x.narrow(0, start, step));
            let output = gated_delta_rule_update(
                part.inputs(), &mut states, &[1], &[0, step], &options(true),
            ).unwrap();
            prop_assert!(same_bits(&output, &whole.narrow(0, start, step)));
        }
        prop_assert!(same_bits(&states, &whole_states));
        // The function for batches, too.
        let batch = all.map(|x| x.unsqueeze(0));
        let first = before.narrow(0, 1, 1);
        let (output, last) = gated_delta_rule(batch.inputs(), Some(&first), &options(true)).unwrap();
        prop_assert!(same_bits(&output.squeeze_dim(0), &whole));
        prop_assert!(same_bits(&last, &states.narrow(0, 1, 1)));
    }

    #[test]
    fn the_other_sequences_of_a_call_change_no_bit(
        shape in shapes(),
        kind in kinds(),
        lengths in prop::collection::vec(prop_oneof![Just(1_i64), 0..80_i64], 1..6),
        norm: bool,
        seed in 0..1000_u64,
    ) {
        let offsets = offsets(&lengths);
        let count = lengths.len() as i64;
        let all = Owned::random(seed, &[offsets[lengths.len()]], shape, kind);
        let before = random(seed + 9, &state_size(count + 1, shape), Kind::Float) * 0.1;
        // The rows of the pool in reverse.
        let slots: Vec<i64> = (1..=count).rev().collect();
        let mut together = before.copy();
        let output = gated_delta_rule_update(
            all.inputs(), &mut together, &slots, &offsets, &options(norm),
        ).unwrap();
        let mut one_by_one = before.copy();
        for (index, &length) in lengths.iter().enumerate() {
            let rows = |x: &Tensor| x.narrow(0, offsets[index], length);
            let alone = gated_delta_rule_update(
                all.map(rows).inputs(),
                &mut one_by_one,
                &slots[index..=index],
                &[0, length],
                &options(norm),
            ).unwrap();
            prop_assert!(same_bits(&rows(&output), &alone));
        }
        prop_assert!(same_bits(&together, &one_by_one));
    }

    #[test]
    fn a_state_goes_from_one_row_to_another_with_the_bits_of_a_copy_that_advances_in_place(
        shape in shapes(),
        kind in kinds(),
        // Of each sequence: its tokens, and whether it begins with zeros, stays in its row, or moves.
        sequences in prop::collection::vec((prop_oneof![Just(1_i64), 0..70_i64], 0..3_i64), 1..5),
        kernel: bool,
        seed in 0..1000_u64,
    ) {
        let lengths: Vec<i64> = sequences.iter().map(|(tokens, _)| *tokens).collect();
        let (offsets, count) = (offsets(&lengths), lengths.len() as i64);
        let all = Owned::random(seed, &[offsets[lengths.len()]], shape, kind);
        let slot = |(row, &(_, how)): (i64, &(i64, i64))| StateSlot {
            from: (how > 0).then_some(row),
            to: if how == 1 { row } else { count + row },
        };
        let slots: Vec<StateSlot> = (0..).zip(&sequences).map(slot).collect();
        let backend = if kernel { Backend::Fused } else { Backend::Math };
        let copied = |pool: &Tensor| {
            let copy = pool.copy();
            for slot in &slots {
                let state = match slot.from {
                    Some(from) => pool.narrow(0, from, 1),
                    None => pool.narrow(0, 0, 1) * 0.0,
                };
                copy.narrow(0, slot.to, 1).copy_(&state);
            }
            copy
        };
        let in_place: Vec<i64> = slots.iter().map(|slot| slot.to).collect();

        let pool = random(seed + 9, &state_size(2 * count, shape), Kind::Float) * 0.1;
        let (mut moved, mut advanced) = (pool.copy(), copied(&pool));
        let options = DeltaRuleOptions { backend, ..options(true) };
        let output = gated_delta_rule_update(all.inputs(), &mut moved, &slots, &offsets, &options);
        let wanted =
            gated_delta_rule_update(all.inputs(), &mut advanced, &in_place, &offsets, &options);
        prop_assert!(same_bits(&output.unwrap(), &wanted.unwrap()));
        prop_assert!(same_bits(&moved, &advanced));

        let x = all.value.flatten(1, 2);
        let channels = x.size()[1];
        let weight = random(seed + 1, &[channels, 4], kind);
        let pool = random(seed + 2, &[2 * count, channels, 3], kind);
        let (mut moved, mut advanced) = (pool.copy(), copied(&pool));
        let options = CausalConv1dOptions { backend, ..CausalConv1dOptions::default() };
        let y = causal_conv1d_update(&x, &weight, None, &mut moved, &slots, &offsets, &options);
        let wanted =
            causal_conv1d_update(&x, &weight, None, &mut advanced, &in_place, &offsets, &options);
        prop_assert!(same_bits(&y.unwrap(), &wanted.unwrap()));
        prop_assert!(same_bits(&moved, &advanced));
    }

    #[test]
    fn a_convolution_has_the_same_bits_in_any_calls(
        channels in 1..600_i64,
        width in 1..21_i64,
        kind in kinds(),
        steps in prop::collection::vec(prop_oneof![Just(1_i64), 0..4_i64, 0..40_i64], 1..6),
        seed in 0..1000_u64,
    ) {
        let options = CausalConv1dOptions::default();
        let offsets = offsets(&steps);
        let total = offsets[steps.len()];
        let x = random(seed, &[total, channels], kind);
        let weight = random(seed + 1, &[channels, width], kind);
        let bias = random(seed + 2, &[channels], kind);
        let before = random(seed + 3, &[3, channels, width - 1], kind);
        let call = |x: &Tensor, states: &mut Tensor, slots: &[i64], offsets: &[i64]| {
            causal_conv1d_update(x, &weight, Some(&bias), states, slots, offsets, &options).unwrap()
        };
        let mut whole_states = before.copy();
        let whole = call(&x, &mut whole_states, &[2], &[0, total]);
        let mut states = before.copy();
        for (&start, &step) in offsets.iter().zip(&steps) {
            let part = x.narrow(0, start, step);
            // Beside another sequence.
            let pair = Tensor::cat(&[&part, &whole.narrow(0, 0, total.min(5))], 0);
            let ends = [0, step, pair.size()[0]];
            let y = call(&pair, &mut states, &[2, 0], &ends).narrow(0, 0, step);
            prop_assert!(same_bits(&y, &whole.narrow(0, start, step)));
        }
        prop_assert!(same_bits(&states.get(2), &whole_states.get(2)));
        prop_assert!(same_bits(&states.get(1), &before.get(1)));
        let state = before.narrow(0, 2, 1);
        let (y, last) =
            causal_conv1d(&x.unsqueeze(0), &weight, Some(&bias), Some(&state), &options).unwrap();
        prop_assert!(same_bits(&y.squeeze_dim(0), &whole));
        prop_assert!(same_bits(&last, &states.narrow(0, 2, 1)));
    }
}

#[test]
fn views_of_one_tensor_are_read_in_place() {
    // As a model has them: query, key and value are columns of one projection.
    let shape = Shape {
        key_heads: 2,
        heads: 4,
        key_dim: 8,
        value_dim: 6,
    };
    let joint = random(5, &[2, 30, 2 * 16 + 24 + 3], Kind::Float);
    let all = Owned::random(6, &[2, 30], shape, Kind::Float);
    let heads = |start: i64, heads: i64, dim: i64| {
        let columns = joint.narrow(2, start, heads * dim);
        columns.unflatten(2, [heads, dim])
    };
    let views = Owned {
        query: heads(0, 2, 8),
        key: heads(16, 2, 8),
        value: heads(32, 4, 6),
        ..all
    };
    let copies = views.map(|x| x.copy().contiguous());
    let (a, s) = gated_delta_rule(views.inputs(), None, &options(true)).unwrap();
    let (b, t) = gated_delta_rule(copies.inputs(), None, &options(true)).unwrap();
    assert!(same_bits(&a, &b) && same_bits(&s, &t));
    // Without contiguous rows, a copy is made.
    let scattered = copies.map(|x| x.transpose(0, -1).contiguous().transpose(0, -1));
    let (c, u) = gated_delta_rule(scattered.inputs(), None, &options(true)).unwrap();
    assert!(same_bits(&a, &c) && same_bits(&s, &u));
    let weight = random(7, &[16, 4], Kind::Float);
    let x = joint.narrow(2, 3, 16);
    let options = CausalConv1dOptions::default();
    let (y, _) = causal_conv1d(&x, &weight, None, None, &options).unwrap();
    let (z, _) = causal_conv1d(&x.contiguous(), &weight, None, None, &options).unwrap();
    assert!(same_bits(&y, &z));
}
