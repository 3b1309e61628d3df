//! The sliding cache against attention over everything under the mask of its window and sinks.

use crate::reference::{
    Compared, DIM, HEADS, KV_HEADS, actions, attention_with_sinks, close, random, seen,
};
use overdrive_kv_cache::{AttendOptions, Error, KvCache, SlidingCache, SlidingCacheConfig};
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

fn cache(config: &SlidingCacheConfig) -> Box<dyn KvCache> {
    Box::new(SlidingCache::new(config.clone()).unwrap())
}

fn config(windows: &[Option<i64>], sinks: i64, slack: i64) -> SlidingCacheConfig {
    SlidingCacheConfig {
        windows: windows.to_vec(),
        sinks,
        slack,
        initial_capacity: 3,
        ..Default::default()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn any_sequence_of_actions_equals_masked_attention_over_everything(
        actions in actions(20),
        window in 1i64..9,
        sinks in 0i64..4,
        slack in 0i64..7,
    ) {
        let windows = [Some(window), None, Some(2 * window)];
        let config = config(&windows, sinks, slack);
        let mut compared = Compared::new(cache(&config), &windows, sinks);
        for action in actions {
            compared.run(action, || cache(&config), Some("has dropped the tokens before"))?;
        }
    }

    #[test]
    fn padding_is_masked_wherever_its_column_lies(
        chunks in proptest::collection::vec(1i64..7, 1..12),
        window in 1i64..7,
        sinks in 0i64..3,
        slack in 0i64..4,
        padding in 0i64..4,
    ) {
        let windows = [Some(window), None];
        let mut compared = Compared::new(cache(&config(&windows, sinks, slack)), &windows, sinks);
        for tokens in chunks.into_iter().chain([1; 12]) {
            let (from, to) = (compared.len(), compared.len() + tokens);
            // The second row begins with padding, and every token sees itself.
            let column = Tensor::arange(to, (Kind::Int64, Device::Cpu));
            let own = column.eq_tensor(&Tensor::arange_start(from, to, (Kind::Int64, Device::Cpu)).unsqueeze(-1));
            let rows = Tensor::from_slice(&[0, padding]).view([2, 1, 1, 1]);
            let mask = column.ge_tensor(&rows).logical_or(&own).logical_and(&seen(from, to, None, 0));
            let options = AttendOptions { mask: Some(&mask), ..Default::default() };
            for [found, expected] in compared.step(tokens, &options) {
                close(&found, &expected, 1e-5)?;
            }
        }
    }

    #[test]
    fn any_tch_attention_can_read_the_view_that_append_gives(
        chunks in proptest::collection::vec(1i64..12, 1..15),
        window in 1i64..7,
        sinks in 0i64..3,
        slack in 0i64..4,
    ) {
        let mut cache = cache(&config(&[Some(window)], sinks, slack));
        let mut all = random(&[1, 1, 0, DIM], 0);
        for (seed, tokens) in (1..).zip(chunks) {
            let new = random(&[1, 1, tokens, DIM], seed);
            all = Tensor::cat(&[&all, &new], 2);
            let view = cache.append(0, &new, &new).unwrap();
            let expected = Tensor::cat(&[
                all.narrow(2, 0, view.sinks),
                all.narrow(2, view.first, all.size()[2] - view.first),
            ], 2);
            prop_assert_eq!(&view.keys, &expected);
            prop_assert_eq!(&view.values, &expected);
            prop_assert!(view.first <= (all.size()[2] - tokens + 1 - window).max(sinks));
        }
    }

    #[test]
    fn a_model_whose_window_is_narrower_than_the_cache_sees_its_own(
        chunks in proptest::collection::vec(1i64..7, 1..12),
        narrow in 1i64..5,
        more in 0i64..5,
    ) {
        let mut compared = Compared::new(cache(&config(&[Some(narrow + more)], 0, 0)), &[Some(narrow)], 0);
        let options = AttendOptions { window: Some(narrow), ..Default::default() };
        for tokens in chunks.into_iter().chain([1; 12]) {
            for [found, expected] in compared.step(tokens, &options) {
                close(&found, &expected, 1e-5)?;
            }
        }
    }

    /// StreamingLLM numbers the tokens of the cache: here every visible key is rotated again, for every
    /// query, to its position in the cache, in f64.
    #[test]
    fn rotated_sinks_equal_positions_numbered_within_the_cache(
        chunks in proptest::collection::vec((1i64..15, 0i64..4), 1..10),
        window in 1i64..8,
        sinks in 1i64..5,
        slack in 0i64..4,
        partial in any::<bool>(),
        with_logits in any::<bool>(),
    ) {
        let logits = random(&[HEADS], 7);
        let logits = with_logits.then_some(&logits);
        let options = AttendOptions { sinks: logits, ..Default::default() };
        let frequencies: Vec<f64> = match partial {
            true => vec![1.0, 0.1, 0.01],
            false => vec![1.0, 0.1, 0.01, 0.001],
        };
        let mut cache = SlidingCache::new(SlidingCacheConfig {
            inverse_frequencies: Some(frequencies.clone()),
            ..config(&[Some(window)], sinks, slack)
        }).unwrap();
        prop_assert_eq!(cache.span(), Some(window + sinks));
        let rotate = |x: &Tensor, from: &[f64]| rotated(x, &frequencies, from);
        let (mut keys, mut values) = (random(&[2, KV_HEADS, 0, DIM], 0), random(&[2, KV_HEADS, 0, DIM], 0));
        let mut seed = 0;
        let mut fresh = |heads, tokens| {
            seed += 1;
            random(&[2, heads, tokens, DIM], seed)
        };
        let steps = chunks.into_iter().chain([(1, 0), (1, 1), (1, 0), (2, 0), (1, 0)]);
        for (tokens, back) in steps {
            let past = keys.size()[2];
            let (k, v, q) = (fresh(KV_HEADS, tokens), fresh(KV_HEADS, tokens), fresh(HEADS, tokens));
            let positions: Vec<f64> = (past..past + tokens).map(|p| p as f64).collect();
            let found = cache
                .attend(0, &rotate(&q, &positions), &rotate(&k, &positions), &v, &options)
                .unwrap();
            keys = Tensor::cat(&[&keys, &k], 2);
            values = Tensor::cat(&[&values, &v], 2);
            for query in 0..tokens {
                let position = past + query;
                let shown: Vec<i64> = (0..=position)
                    .filter(|n| *n < sinks || *n > position - window)
                    .collect();
                let positions: Vec<f64> = (0..shown.len()).map(|n| n as f64).collect();
                let shown = Tensor::from_slice(&shown);
                let mask = Tensor::ones([1, positions.len() as i64], (Kind::Bool, Device::Cpu));
                let expected = attention_with_sinks(
                    &rotate(&q.narrow(2, query, 1), &positions[positions.len() - 1..]),
                    &rotate(&keys.index_select(2, &shown), &positions),
                    &values.index_select(2, &shown),
                    &mask,
                    logits,
                );
                close(&found.narrow(2, query, 1), &expected, 2e-5)?;
            }
            let len = (past + tokens - back).max(0);
            if cache.truncate(len).is_ok() {
                keys = keys.narrow(2, 0, len);
                values = values.narrow(2, 0, len);
            }
        }
    }
}

/// Rows rotated to `positions` in the half-split convention; channels without a frequency stay.
fn rotated(x: &Tensor, frequencies: &[f64], positions: &[f64]) -> Tensor {
    let half = frequencies.len() as i64;
    let angles = Tensor::from_slice(positions).unsqueeze(-1) * Tensor::from_slice(frequencies);
    let (cos, sin) = (angles.cos(), angles.sin());
    let x = x.to_kind(Kind::Double);
    let (a, b) = (x.narrow(3, 0, half), x.narrow(3, half, half));
    let rest = x.narrow(3, 2 * half, x.size()[3] - 2 * half);
    let channels = [&a * &cos - &b * &sin, &b * &cos + &a * &sin, rest];
    Tensor::cat(&channels, 3).to_kind(Kind::Float)
}

#[test]
fn memory_is_that_of_the_window_and_the_sinks_however_long_the_sequence() {
    let windows = [Some(32), None];
    let mut compared = Compared::new(cache(&config(&windows, 4, 0)), &windows, 4);
    let token = (KV_HEADS * 2 * DIM * 4) as u64; // keys and values of one row, f32
    for _ in 0..300 {
        compared.step(1, &AttendOptions::default());
    }
    let ring = 2 * (4 + 32) * token;
    let grown = compared.cache.bytes() - ring;
    assert!(
        (2 * 300 * token..=4 * 300 * token).contains(&grown),
        "the other layer keeps all: {grown}"
    );
    assert_eq!(compared.cache.bytes_per_token(), 2.0 * token as f64);

    let mut short = SlidingCache::new(SlidingCacheConfig::uniform(1, 1 << 20)).unwrap();
    let new = random(&[1, 1, 10, DIM], 1);
    short.append(0, &new, &new).unwrap();
    assert_eq!(
        short.bytes(),
        64 * 2 * DIM as u64 * 4,
        "a wide window takes memory as it fills"
    );
    assert_eq!((short.span(), short.max_len()), (Some(1 << 20), None));
}

#[test]
fn one_token_is_written_in_place() {
    let mut cache = SlidingCache::new(config(&[Some(8)], 2, 0)).unwrap();
    let token = random(&[1, 2, 1, DIM], 3);
    for _ in 0..40 {
        let _mixed = cache
            .attend(0, &token, &token, &token, &AttendOptions::default())
            .unwrap();
    }
    let before = cache.bytes();
    let output = cache
        .attend(0, &token, &token, &token, &AttendOptions::default())
        .unwrap();
    assert_eq!((cache.bytes(), output.size()), (before, vec![1, 2, 1, DIM]));
    // Ten equal values have themselves as their mean.
    assert!(output.allclose(&token, 1e-6, 1e-6, false));
}

#[test]
fn truncating_by_more_than_the_slack_names_the_remedy() {
    let mut compared = Compared::new(cache(&config(&[Some(4)], 1, 3)), &[Some(4)], 1);
    for _ in 0..20 {
        compared.step(1, &AttendOptions::default());
    }
    let error = compared.cache.truncate(15).unwrap_err();
    assert!(matches!(
        error,
        Error::AlreadyDropped {
            len: 15,
            layer: 0,
            first: 13,
            window: 4
        }
    ));
    assert!(error.to_string().contains("`slack`"));
    compared.cache.truncate(16).unwrap(); // slack + 1
    compared.truncated(16);
    for [found, expected] in compared.step(1, &AttendOptions::default()) {
        close(&found, &expected, 1e-5).unwrap();
    }
    compared.cache.truncate(1).unwrap(); // into the sinks
    assert_eq!(compared.cache.len(), 1);
}

#[test]
fn options_out_of_range_are_named() {
    let message = |config: SlidingCacheConfig| SlidingCache::new(config).unwrap_err().to_string();
    assert!(message(config(&[Some(0)], 0, 0)).contains("`windows` is 0"));
    assert!(message(config(&[None], -1, 0)).contains("`sinks` is -1"));
    assert!(message(config(&[None], 0, -2)).contains("`slack` is -2"));
    let rotating = |n| SlidingCacheConfig {
        inverse_frequencies: Some(vec![0.5; n]),
        ..config(&[Some(2)], 1, 0)
    };
    assert!(message(rotating(0)).contains("inverse_frequencies"));

    let mut cache = SlidingCache::new(rotating(2)).unwrap();
    let new = random(&[1, 1, 5, DIM], 1);
    let error = cache.append(0, &new, &new).unwrap_err().to_string();
    assert!(error.contains("call `attend` instead"), "{error}");
    let mut cache = SlidingCache::new(rotating(DIM as usize)).unwrap();
    let error = cache
        .attend(0, &new, &new, &new, &AttendOptions::default())
        .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("8 numbers for keys of 8 channels"),
        "{error}"
    );
    assert!(cache.append(3, &new, &new).is_err());
}

#[test]
fn a_state_that_does_not_fit_changes_nothing() {
    let mut cache = SlidingCache::new(config(&[Some(4)], 1, 0)).unwrap();
    let new = random(&[1, 1, 9, DIM], 1);
    cache.append(0, &new, &new).unwrap();
    let mut state = cache.state().unwrap();
    let saved = state
        .iter_mut()
        .find(|(name, _)| name == "layers.0.place")
        .unwrap();
    saved.1 = Tensor::from_slice(&[100i64, 3]);
    let error = cache.load_state(&state).unwrap_err().to_string();
    assert!(error.contains("100 tokens kept from 3 on"), "{error}");
    state.pop();
    assert!(
        cache
            .load_state(&state)
            .unwrap_err()
            .to_string()
            .contains("missing")
    );
    assert_eq!(cache.len(), 9);
}
