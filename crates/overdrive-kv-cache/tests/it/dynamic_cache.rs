//! The dynamic cache against plain concatenation.

use overdrive_kv_cache::{
    AttendOptions, CacheImplementation, CacheShape, DynamicCache, Error, KvCache, QkvRows,
};
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

fn random(shape: &[i64]) -> Tensor {
    Tensor::randn(shape, (Kind::Float, Device::Cpu))
}

/// The actions of a user between steps.
#[derive(Debug, Clone)]
enum Action {
    Append(i64),
    Truncate(i64),
    Reorder(Vec<i64>),
    Reset,
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        6 => (1i64..9).prop_map(Action::Append),
        2 => (0i64..100).prop_map(Action::Truncate),
        1 => proptest::collection::vec(0i64..2, 2).prop_map(Action::Reorder),
        1 => Just(Action::Reset),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_sequence_of_actions_equals_concatenation(
        actions in proptest::collection::vec(action(), 1..30),
        capacity in 1i64..8,
    ) {
        let (layers, shape) = (2, |tokens| [2, 3, tokens, 4]);
        let mut cache = DynamicCache::with_capacity(layers, capacity);
        let mut expected: Vec<[Tensor; 2]> =
            (0..layers).map(|_| [random(&shape(0)), random(&shape(0))]).collect();
        for action in actions {
            match action {
                Action::Append(tokens) => for (layer, held) in expected.iter_mut().enumerate() {
                    let new = [random(&shape(tokens)), random(&shape(tokens))];
                    for (old, new) in held.iter_mut().zip(&new) {
                        *old = Tensor::cat(&[&*old, new], 2);
                    }
                    let view = cache.append(layer, &new[0], &new[1]).unwrap();
                    prop_assert_eq!(&view.keys, &held[0]);
                    prop_assert_eq!(&view.values, &held[1]);
                },
                Action::Truncate(at) => {
                    let len = at % (cache.len() + 1);
                    cache.truncate(len).unwrap();
                    expected.iter_mut().flatten().for_each(|old| *old = old.narrow(2, 0, len));
                }
                Action::Reorder(rows) => {
                    let rows = Tensor::from_slice(&rows);
                    cache.reorder(&rows).unwrap();
                    expected.iter_mut().flatten().for_each(|old| *old = old.index_select(0, &rows));
                }
                Action::Reset => {
                    cache.reset();
                    expected.iter_mut().flatten().for_each(|old| *old = old.narrow(2, 0, 0));
                }
            }
            prop_assert_eq!(cache.len(), expected[0][0].size()[2]);
            prop_assert_eq!(cache.is_empty(), cache.len() == 0);
        }
    }
}

#[test]
fn appending_moves_the_buffer_only_when_the_capacity_doubles() {
    let mut cache = DynamicCache::with_capacity(1, 4);
    let mut moves = 0;
    let mut address = None;
    for _ in 0..1000 {
        let token = random(&[1, 1, 1, 8]);
        let now = cache.append(0, &token, &token).unwrap().keys.data_ptr();
        moves += i32::from(address.is_some_and(|before| before != now));
        address = Some(now);
    }
    assert_eq!(moves, 8, "4 → 1024 is eight doublings");
    assert_eq!(cache.capacity(), 1024);
    assert_eq!(cache.bytes(), 2 * 1024 * 8 * 4);
    cache.reset();
    assert_eq!((cache.bytes(), cache.len()), (0, 0));
}

#[test]
fn the_length_counts_only_tokens_that_every_layer_holds() {
    let mut cache = DynamicCache::new(2);
    let token = random(&[1, 1, 3, 8]);
    cache.append(0, &token, &token).unwrap();
    assert_eq!(cache.len(), 0, "the second layer has not been called");
    cache.append(1, &token, &token).unwrap();
    assert_eq!(cache.len(), 3);
    cache.append(0, &token, &token).unwrap();
    cache.truncate(cache.len()).unwrap(); // undo a step that stopped half-way
    assert_eq!(cache.append(0, &token, &token).unwrap().keys.size()[2], 6);
}

#[test]
fn values_may_be_wider_than_keys() {
    let mut cache = DynamicCache::new(1);
    let view = cache
        .append(0, &random(&[1, 2, 3, 8]), &random(&[1, 2, 3, 16]))
        .unwrap();
    assert_eq!(
        (view.keys.size(), view.values.size()),
        (vec![1, 2, 3, 8], vec![1, 2, 3, 16])
    );
}

#[test]
fn tensors_that_do_not_fit_are_refused_and_leave_the_cache_as_it_was() {
    let mut cache = DynamicCache::new(1);
    let token = random(&[2, 1, 1, 8]);
    cache.append(0, &token, &token).unwrap();

    let message = |result: Result<_, Error>| {
        let error: Error = match result {
            Err(error) => error,
            Ok(()) => panic!("must be refused"),
        };
        error.to_string()
    };
    assert!(
        message(cache.append(3, &token, &token).map(drop))
            .contains("layer 3 does not exist in a cache of 1")
    );
    assert!(
        message(cache.append(0, &token, &random(&[2, 1, 2, 8])).map(drop))
            .contains("with the B, H and T of the keys")
    );
    assert!(
        message(cache.append(0, &random(&[2, 8]), &token).map(drop))
            .contains("must be (B, H, T, D)")
    );
    let other = random(&[1, 1, 1, 8]);
    assert!(message(cache.append(0, &other, &other).map(drop)).contains("reset the cache"));
    let half = token.to_kind(Kind::Half);
    assert!(message(cache.append(0, &half, &half).map(drop)).contains("Half"));
    let tracked = token.copy().set_requires_grad(true);
    assert!(message(cache.append(0, &tracked, &token).map(drop)).contains("no_grad"));
    assert!(message(cache.truncate(2)).contains("the cache holds 1"));
    assert!(message(cache.truncate(-1)).contains("`len` is -1; it must be 0 or positive"));
    assert!(message(cache.reorder(&Tensor::from_slice(&[5i64]))).contains("libtorch"));
    assert_eq!(cache.len(), 1);
}

#[test]
fn every_cache_has_the_logits_without_a_value() {
    use crate::reference::{BATCH, Compared, DIM, HEADS, KV_HEADS};
    let logits = crate::reference::random(&[HEADS], 5);
    let options = AttendOptions {
        sinks: Some(&logits),
        ..AttendOptions::default()
    };
    for implementation in CacheImplementation::ALL {
        let shape = CacheShape {
            windows: vec![None],
            batch: BATCH,
            max_len: Some(200),
            kv_heads: KV_HEADS,
            head_dim: DIM,
            ..CacheShape::default()
        };
        let cache = implementation.build(&shape).unwrap();
        let mut compared = Compared::new(cache, &[None], 0);
        let tolerance = match implementation {
            CacheImplementation::Int8 => 0.05,
            CacheImplementation::Int4 => 0.6,
            _ => 1e-5,
        };
        for tokens in [150, 1, 3, 1] {
            for [found, expected] in compared.step(tokens, &options) {
                let off = (found - expected).abs().max().double_value(&[]);
                assert!(
                    off < tolerance,
                    "{implementation}, {tokens} tokens: off by {off}"
                );
            }
        }
    }
}

#[test]
fn attention_on_rows_leaves_cache_and_output_as_attention_on_tensors_does() {
    let (batch, heads, kv_heads, dim) = (2, 4, 2, 8);
    let width = (heads + 2 * kv_heads) * dim;
    let random = crate::reference::random;
    let logits = random(&[heads], 3);
    let options = AttendOptions {
        window: Some(6),
        sinks: Some(&logits),
        ..AttendOptions::default()
    };
    let [mut on_rows, mut on_tensors] = [0, 1].map(|_| DynamicCache::with_capacity(1, 2));
    // The first tokens, which make the buffers, are tensors for both; the buffers grow behind them.
    for (step, tokens) in [3, 1, 4, 1].into_iter().enumerate() {
        let qkv = random(&[batch, tokens, width], 7 + step as u64);
        let by_head = qkv.view([batch, tokens, -1, dim]).transpose(1, 2);
        let parts = by_head.split_with_sizes([heads, kv_heads, kv_heads], 1);
        let attend = |cache: &mut DynamicCache| {
            let mixed = cache.attend(0, &parts[0], &parts[1], &parts[2], &options);
            mixed.unwrap().transpose(1, 2).contiguous().view(-1)
        };
        let expected = attend(&mut on_tensors);
        let rows = Vec::<f32>::try_from(qkv.view(-1)).unwrap();
        let new = QkvRows {
            rows: &rows,
            batch: 2,
            heads: 4,
            kv_heads: 2,
            head_dim: 8,
        };
        let mut output = vec![0.0; (batch * tokens * heads * dim) as usize];
        let done = on_rows.attend_rows(0, &new, &options, &mut output).unwrap();
        assert_eq!(done, step > 0);
        let found = match done {
            true => Tensor::from_slice(&output),
            false => attend(&mut on_rows),
        };
        assert_eq!(found, expected, "step {step}");
        assert_eq!(on_rows.state().unwrap(), on_tensors.state().unwrap());
    }
    // A batch of another size is left to `attend`, which says what does not fit.
    let other = QkvRows {
        rows: &[0.0; 64],
        batch: 1,
        heads: 4,
        kv_heads: 2,
        head_dim: 8,
    };
    assert!(
        !on_rows
            .attend_rows(0, &other, &options, &mut [0.0; 32])
            .unwrap()
    );
    assert_eq!(on_rows.len(), 9);
}
