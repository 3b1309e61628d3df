//! Caches on the decode kernel of overdrive-gpu, with a library that stands in for the CUDA driver: it writes down
//! launches and does in plain loops in f32 what the kernel does. A target of its own: the stand-in serves all tensors on
//! the CPU of the process.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use counted::StandIn;
use overdrive_attention::Backend;
use overdrive_kv_cache::{
    AttendOptions, KvCache, PagedCache, PagedCacheConfig, QuantizedCache, QuantizedCacheConfig,
    StaticCache, StaticCacheConfig,
};
use tch::{Device, Kind, Tensor};

#[path = "../../overdrive-gpu/tests/stand_in/counted.rs"]
mod counted;

fn values(shape: &[i64], seed: f64) -> Tensor {
    let count: i64 = shape.iter().product();
    let at = Tensor::arange(count, (Kind::Double, Device::Cpu)) * 12.9898 + seed;
    ((at.sin() * 43_758.545_3).frac() * 2.0)
        .reshape(shape)
        .to_kind(Kind::Float)
}

fn assert_close(found: &Tensor, expected: &Tensor, name: &str) {
    assert_eq!(found.size(), expected.size(), "{name}");
    let off = (found - expected).abs().max().double_value(&[]);
    // Scores reach 20, of which f32 rounds 2e-6 away. A NaN is no match either.
    assert!(off <= 5e-5, "{name} is off by {off}");
}

/// The options with and without the kernel, which runs for no back end that is asked for.
fn options() -> [(AttendOptions<'static>, AttendOptions<'static>); 3] {
    let plain = AttendOptions::default();
    let limited = AttendOptions {
        window: Some(90),
        scale: Some(0.2),
        ..plain
    };
    let capped = AttendOptions {
        softcap: Some(2.0),
        ..plain
    };
    [plain, limited, capped].map(|options| {
        let without = AttendOptions {
            backend: Backend::Blockwise,
            ..options
        };
        (options, without)
    })
}

#[test]
fn a_captured_step_of_a_static_cache_reads_the_filled_tokens_by_the_kernel() {
    let stand_in = StandIn::new();
    let config = StaticCacheConfig {
        batch: 3,
        max_len: 200,
        kv_heads: 2,
        head_dim: 80,
        ..StaticCacheConfig::default()
    };
    for (options, without) in options() {
        let mut caches = [
            StaticCache::new(config.clone()).unwrap(),
            StaticCache::new(config.clone()).unwrap(),
        ];
        for cache in &mut caches {
            let prompt = values(&[2, 2, 150, 80], 0.1);
            cache.append(0, &prompt, &prompt.flip([2_i64])).unwrap();
        }
        stand_in.launches();
        // Rows of one length, and of several.
        for (step, positions) in [
            (0.0, Tensor::from_slice(&[150_i64])),
            (1.0, Tensor::from_slice(&[151_i64, 3]).view([2, 1])),
        ] {
            let new = |heads, seed| values(&[2, heads, 1, 80], step + seed);
            let (query, keys, held) = (new(6, 0.2), new(2, 0.3), new(2, 0.4));
            let [found, expected] =
                [(0, options, 2), (1, without, 0)].map(|(at, options, count)| {
                    let mut step = caches[at].at(&positions).unwrap();
                    let output = step.attend(0, &query, &keys, &held, &options).unwrap();
                    assert_eq!(stand_in.launches().len(), count);
                    output
                });
            assert_close(&found, &expected, &format!("{options:?}"));
        }
    }
}

#[test]
fn the_kernel_reads_the_codes_of_an_int8_cache() {
    let stand_in = StandIn::new();
    for dim in [64, 128] {
        for (options, without) in options() {
            let new = || QuantizedCache::new(QuantizedCacheConfig::int8(1)).unwrap();
            let (mut cache, mut other) = (new(), new());
            // A prompt in full precision; one token and four over codes and a tail; so many that the tail is quantized.
            for (step, (tokens, launches)) in [(300, 0), (1, 2), (4, 2), (16, 2), (1, 2)]
                .into_iter()
                .chain([(16, 2); 2])
                .enumerate()
            {
                let new = |heads, seed| values(&[2, heads, tokens, dim], step as f64 + seed);
                let (query, keys, held) = (new(4, 0.2), new(2, 0.3), new(2, 0.4));
                stand_in.launches();
                let found = cache.attend(0, &query, &keys, &held, &options).unwrap();
                assert_eq!(stand_in.launches().len(), launches, "step {step}");
                let expected = other.attend(0, &query, &keys, &held, &without).unwrap();
                assert_eq!(stand_in.launches().len(), 0, "step {step}");
                assert_close(
                    &found,
                    &expected,
                    &format!("step {step} of {dim}: {options:?}"),
                );
            }
            assert!(cache.quantized_len() > 128);
        }
    }
}

#[test]
fn caches_of_other_formats_are_read_as_without_the_kernel() {
    let stand_in = StandIn::new();
    let other = QuantizedCacheConfig {
        group_size: 32,
        ..QuantizedCacheConfig::int8(1)
    };
    for (config, dim) in [
        (QuantizedCacheConfig::int4(1), 64),
        (QuantizedCacheConfig::int8(1), 96),
        (other, 64),
    ] {
        let mut caches = [0, 1].map(|_| QuantizedCache::new(config.clone()).unwrap());
        let (plain, without) = options()[0];
        for tokens in [300, 1] {
            let new = |heads, seed| values(&[1, heads, tokens, dim], seed);
            let (query, keys, held) = (new(4, 0.2), new(2, 0.3), new(2, 0.4));
            let [found, expected] = [(0, plain), (1, without)].map(|(at, options)| {
                caches[at]
                    .attend(0, &query, &keys, &held, &options)
                    .unwrap()
            });
            assert_close(&found, &expected, "left to the CPU");
        }
        assert_eq!(stand_in.launches().len(), 0, "{config:?}");
    }
}

#[test]
fn a_decode_step_of_a_paged_cache_runs_the_kernel_and_a_prompt_does_not() {
    let stand_in = StandIn::new();
    let config = PagedCacheConfig {
        kv_heads: 2,
        head_dim: 64,
        num_blocks: 32,
        ..PagedCacheConfig::default()
    };
    let mut caches = [0, 1].map(|_| PagedCache::new(config.clone()).unwrap());
    let prompts: [Vec<i64>; 3] = [(0..70).collect(), (100..117).collect(), vec![7, 8]];
    let (plain, without) = options()[0];
    let ids = caches.each_mut().map(|cache| {
        prompts
            .each_ref()
            .map(|prompt| cache.add(prompt).unwrap().0)
    });
    // The few keys are not split, so that no launch combines splits.
    for (step, launches) in [(0, 0), (1, 1), (2, 1)] {
        let tokens: [Vec<i64>; 3] = match step {
            0 => prompts.clone(),
            // Three tokens of the last sequence, as in speculation.
            step => [vec![step], vec![step], vec![1, 2, step]],
        };
        let count = tokens.iter().map(Vec::len).sum::<usize>() as i64;
        let new = |heads, seed| values(&[1, heads, count, 64], step as f64 + seed);
        let (query, keys, held) = (new(4, 0.2), new(2, 0.3), new(2, 0.4));
        let cases = [(0, plain, launches), (1, without, 0)];
        let [found, expected] = cases.map(|(at, options, launches)| {
            let of = |n: usize| (ids[at][n], tokens[n].as_slice());
            let mut batch = caches[at].batch(&[of(0), of(1), of(2)]).unwrap();
            let output = batch.attend(0, &query, &keys, &held, &options).unwrap();
            batch.commit().unwrap();
            assert_eq!(stand_in.launches().len(), launches, "step {step}");
            output
        });
        assert_close(&found, &expected, &format!("step {step}"));
    }
}
