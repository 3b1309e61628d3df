//! The quantized cache: within its stated bound, and its kernel against its own dense view.

use crate::reference::{
    Action, Compared, DIM, HEADS, KV_HEADS, actions, attention, close, random, seen,
};
use overdrive_kv_cache::{
    AttendOptions, DynamicCache, Error, KvCache, QuantizationAxis, QuantizationBits,
    QuantizedCache, QuantizedCacheConfig, attend_to_view,
};
use proptest::prelude::*;
use tch::{Kind, Tensor};

fn config() -> impl Strategy<Value = QuantizedCacheConfig> {
    let bits = prop_oneof![Just(QuantizationBits::Eight), Just(QuantizationBits::Four)];
    let axis = || {
        prop_oneof![
            Just(QuantizationAxis::Token),
            Just(QuantizationAxis::Channel)
        ]
    };
    (bits, axis(), axis(), 1i64..5, 0i64..12).prop_map(
        |(bits, axis_keys, axis_values, half, residual)| QuantizedCacheConfig {
            layers: 1,
            bits,
            group_size: 2 * half,
            residual_length: residual,
            axis_keys,
            axis_values,
        },
    )
}

/// Returns the largest quantization step that groups along an axis can have, for each channel: `(B, H, 1, D)`.
fn steps(x: &Tensor, axis: QuantizationAxis, bits: QuantizationBits) -> Tensor {
    let dim = match axis {
        QuantizationAxis::Channel => 2,
        QuantizationAxis::Token => 3,
    };
    let range = x.amax(dim, true) - x.amin(dim, true);
    let levels = f64::from((1 << bits.count()) - 1);
    let steps = range.amax(2, true) / levels;
    steps.expand([x.size()[0], x.size()[1], 1, x.size()[3]], false)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn outputs_are_within_the_stated_bound(
        config in config(),
        chunks in proptest::collection::vec(1i64..20, 1..10),
        size in 0.1f64..3.0,
    ) {
        let mut cache = QuantizedCache::new(config.clone()).unwrap();
        let none = || random(&[2, KV_HEADS, 0, DIM], 0);
        let (mut keys, mut values) = (none(), none());
        for (seed, tokens) in (1u64..).zip(chunks) {
            let q = random(&[2, HEADS, tokens, DIM], seed * 3) * size;
            let k = random(&[2, KV_HEADS, tokens, DIM], seed * 3 + 1) * size;
            let v = random(&[2, KV_HEADS, tokens, DIM], seed * 3 + 2);
            let found = cache.attend(0, &q, &k, &v, &AttendOptions::default()).unwrap();
            keys = Tensor::cat(&[&keys, &k], 2);
            values = Tensor::cat(&[&values, &v], 2);
            let to = keys.size()[2];
            let expected = attention(&q, &keys, &values, &seen(to - tokens, to, None, 0));

            let group = HEADS / KV_HEADS;
            let shared = |t: Tensor| t.repeat_interleave_self_int(group, 1, None);
            let key_steps = shared(steps(&keys, config.axis_keys, config.bits));
            let e = (q.abs() * key_steps).sum_dim_intlist(3, true, Kind::Float) / (2.0 * (DIM as f64).sqrt());
            let range = shared(values.amax(2, true) - values.amin(2, true));
            let value_steps = shared(steps(&values, config.axis_values, config.bits));
            let bound = ((e * 2.0).exp() - 1.0) * range / 2.0 + value_steps / 2.0 + 1e-4;
            let over = ((found - expected).abs() - bound).max().double_value(&[]);
            prop_assert!(over <= 0.0, "over the bound by {over}");
        }
    }

    #[test]
    fn the_kernel_on_codes_equals_attention_over_the_dense_view(
        config in config(),
        chunks in proptest::collection::vec(1i64..9, 1..12),
        window in proptest::option::of(1i64..30),
        softcap in proptest::option::of(0.5f64..4.0),
        masked in any::<bool>(),
    ) {
        let mut cache = QuantizedCache::new(config).unwrap();
        for (seed, tokens) in (1u64..).zip(chunks) {
            let fresh = |heads, n| random(&[2, heads, tokens, DIM], seed * 5 + n);
            let (q, k, v) = (fresh(HEADS, 0), fresh(KV_HEADS, 1), fresh(KV_HEADS, 2));
            let to = cache.len() + tokens;
            let mask = seen(to - tokens, to, None, 0)
                .logical_and(&random(&[2, 1, tokens, to], seed).gt(-1.0))
                .logical_or(&seen(to - tokens, to, Some(1), 0));
            let options = AttendOptions {
                window: window.filter(|_| !masked),
                softcap,
                mask: masked.then_some(&mask),
                ..Default::default()
            };
            let mut fork = cache.fork().unwrap();
            let found = cache.attend(0, &q, &k, &v, &options).unwrap();
            let view = fork.append(0, &k, &v).unwrap();
            close(&found, &attend_to_view(&q, &view, &options).unwrap(), 1e-5)?;
        }
    }

    #[test]
    fn any_sequence_of_actions_keeps_every_token_within_its_steps(
        actions in actions(20),
        config in config(),
    ) {
        let new = || Box::new(QuantizedCache::new(config.clone()).unwrap());
        let mut compared = Compared::new(new(), &[None], 0);
        // A token of a cut block is quantized again with each cut: half a step each.
        let mut cuts = 1;
        for action in actions {
            if matches!(action, Action::Truncate(_) | Action::TruncateBy(_)) {
                cuts += 1;
            }
            if let Action::Append(tokens) = action {
                let [keys, values] = [(); 2].map(|()| compared.fresh(KV_HEADS, tokens));
                let view = compared.cache.append(0, &keys, &values).unwrap();
                let held = &mut compared.all[0];
                for (held, new) in held.iter_mut().zip([&keys, &values]) {
                    *held = Tensor::cat(&[&*held, new], 2);
                }
                for (found, expected) in [&view.keys, &view.values].into_iter().zip(held) {
                    let range = expected.max().double_value(&[]) - expected.min().double_value(&[]);
                    let step = range / f64::from((1 << config.bits.count()) - 1);
                    close(found, expected, f64::from(cuts) * step * 0.51)?;
                    // The newest tokens are in full precision.
                    let len = expected.size()[2];
                    let last = |t: &Tensor| t.narrow(2, len - tokens, tokens);
                    prop_assert_eq!(last(found), last(expected));
                }
            } else {
                compared.run(action, || new(), None)?;
            }
        }
    }
}

fn filled(config: QuantizedCacheConfig, keys: &Tensor, values: &Tensor) -> QuantizedCache {
    let mut cache = QuantizedCache::new(config).unwrap();
    cache.append(0, keys, values).unwrap();
    cache
}

#[test]
fn a_token_takes_the_bytes_that_the_table_says() {
    for (config, bytes) in [
        (QuantizedCacheConfig::int8(1), 144),
        (QuantizedCacheConfig::int4(1), 80),
    ] {
        let [short, long] = [4096 + 128, 8192 + 128].map(|tokens| {
            let new = random(&[1, 2, tokens, 64], 1);
            let cache = filled(config.clone(), &new, &new);
            assert_eq!(cache.quantized_len(), tokens - 128);
            cache
        });
        assert_eq!(short.bytes_per_token(), f64::from(2 * bytes));
        assert_eq!(long.bytes() - short.bytes(), 4096 * 2 * bytes as u64);
        let mut exact = DynamicCache::with_capacity(1, 8320);
        let new = random(&[1, 2, 8320, 64], 1);
        exact.append(0, &new, &new).unwrap();
        let ratio = exact.bytes() as f64 / long.bytes() as f64;
        let whole = 512.0 / f64::from(bytes);
        // The tail of 192 tokens is 2.3 % of the sequence.
        assert!((whole * 0.86..whole).contains(&ratio), "{ratio} of {whole}");
    }
}

/// Returns the relative error of outputs for keys of which some channels are large.
fn relative_error(config: QuantizedCacheConfig, outliers: f64) -> f64 {
    let channels = random(&[1, 1, 1, 64], 9).gt(1.5).to_kind(Kind::Float) * outliers;
    let [keys, values] = [1, 2].map(|seed| random(&[1, 2, 1024, 64], seed));
    let keys = keys + channels;
    let mut cache = filled(config, &keys, &values);
    let mut exact = DynamicCache::new(1);
    exact.append(0, &keys, &values).unwrap();
    let new = random(&[1, 2, 1, 64], 3);
    let query = random(&[1, 8, 1, 64], 4);
    let run = |cache: &mut dyn KvCache| {
        cache
            .attend(0, &query, &new, &new, &AttendOptions::default())
            .unwrap()
    };
    let (found, expected) = (run(&mut cache), run(&mut exact));
    ((found - &expected).norm() / expected.norm()).double_value(&[])
}

#[test]
fn keys_by_channel_stand_outliers_as_kivi_says() {
    let by = |axis_keys, outliers| {
        let config = QuantizedCacheConfig {
            axis_keys,
            ..QuantizedCacheConfig::int4(1)
        };
        relative_error(config, outliers)
    };
    let (channel, token) = (
        by(QuantizationAxis::Channel, 20.0),
        by(QuantizationAxis::Token, 20.0),
    );
    assert!(
        channel * 3.0 < token,
        "by channel {channel}, by token {token}"
    );
    assert!(
        channel < 0.25 && by(QuantizationAxis::Channel, 0.0) < 0.25,
        "{channel}"
    );
    let int8 = relative_error(QuantizedCacheConfig::int8(1), 20.0);
    assert!(int8 < 0.02, "{int8}");
}

#[test]
fn other_kinds_and_a_prompt_of_any_length() {
    for kind in [Kind::Half, Kind::BFloat16, Kind::Double] {
        let mut cache = QuantizedCache::new(QuantizedCacheConfig {
            group_size: 4,
            residual_length: 3,
            ..QuantizedCacheConfig::int8(1)
        })
        .unwrap();
        for tokens in [70, 1, 40, 1, 1] {
            let new = (random(&[1, 2, tokens, DIM], 5) * 0.1).to_kind(kind);
            let query = new.repeat([1, 2, 1, 1]);
            let mut fork = cache.fork().unwrap();
            let found = cache
                .attend(0, &query, &new, &new, &AttendOptions::default())
                .unwrap();
            let view = fork.append(0, &new, &new).unwrap();
            assert_eq!((found.kind(), view.keys.kind()), (kind, kind));
            let expected = attend_to_view(&query, &view, &AttendOptions::default()).unwrap();
            assert!(found.allclose(&expected, 1e-2, 2e-3, false), "{kind:?}");
        }
        assert_eq!(cache.len(), 113);
    }
}

#[test]
fn a_prompt_that_is_read_in_one_step_is_exact() {
    let mut compared = Compared::new(
        Box::new(QuantizedCache::new(QuantizedCacheConfig::int4(2)).unwrap()),
        &[None, None],
        0,
    );
    for [found, expected] in compared.step(500, &AttendOptions::default()) {
        close(&found, &expected, 1e-5).unwrap();
    }
}

#[test]
fn options_and_states_out_of_range_are_refused() {
    let message =
        |config: QuantizedCacheConfig| QuantizedCache::new(config).unwrap_err().to_string();
    let base = QuantizedCacheConfig::int8(1);
    assert!(
        message(QuantizedCacheConfig {
            group_size: 7,
            ..base.clone()
        })
        .contains("`group_size` is 7")
    );
    assert!(
        message(QuantizedCacheConfig {
            residual_length: -1,
            ..base.clone()
        })
        .contains("`residual_length` is -1")
    );
    let mut cache = QuantizedCache::new(base).unwrap();
    let odd = random(&[1, 1, 2, 5], 1);
    assert!(
        cache
            .append(0, &odd, &odd)
            .unwrap_err()
            .to_string()
            .contains("an even number")
    );
    let new = random(&[1, 1, 300, 8], 1);
    cache.append(0, &new, &new).unwrap();
    assert!(matches!(
        cache.append(1, &new, &new),
        Err(Error::NoSuchLayer { .. })
    ));
    assert!(matches!(
        cache.truncate(301),
        Err(Error::TruncateBeyondEnd { .. })
    ));
    let mut state = cache.state().unwrap();
    state[0].1 = state[0].1.narrow(2, 0, 64);
    assert!(
        cache
            .load_state(&state)
            .unwrap_err()
            .to_string()
            .contains("key_scales")
    );
    assert_eq!(cache.len(), 300);
}
