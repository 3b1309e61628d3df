//! Attention over caches on the decode kernel of overdrive-gpu, with a library that stands in for the CUDA driver: it
//! writes down launches and does in plain loops in f32 what the kernel does. A target of its own: the stand-in serves all
//! tensors on the CPU of the process.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use counted::StandIn;
use overdrive_attention::{
    AttentionOptions, Backend, DeviceLengths, PagedLayout, PagedSlots, Window,
    attention_at_lengths, attention_decode, attention_paged, paged_write, paged_write_pair,
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
    // Scores reach 20, of which f32 rounds 2e-6 away, and weights are their exponentials.
    let close = found.allclose(expected, 1e-5, 5e-5, true);
    let off = (found - expected).abs().max().double_value(&[]);
    assert!(close, "{name} is off by {off}");
}

/// The blockwise kernel of the CPU, which no GPU kernel replaces.
fn on_cpu(options: AttentionOptions<'_>) -> AttentionOptions<'_> {
    AttentionOptions {
        backend: Backend::Blockwise,
        ..options
    }
}

fn options(sinks: &Tensor) -> [(&'static str, AttentionOptions<'_>); 5] {
    let causal = AttentionOptions::causal();
    [
        ("causal", causal),
        ("full", AttentionOptions::default()),
        (
            "window",
            AttentionOptions {
                window: Window::sliding(9),
                scale: Some(0.3),
                ..causal
            },
        ),
        (
            "softcap",
            AttentionOptions {
                softcap: Some(2.0),
                ..causal
            },
        ),
        (
            "sinks",
            AttentionOptions {
                sinks: Some(sinks),
                ..causal
            },
        ),
    ]
}

/// Returns the launches of a call whose rows fill the stand-in's few multiprocessors, so that its keys are not split.
fn launches(options: &AttentionOptions<'_>, dim: i64) -> usize {
    if dim <= 64 && options.sinks.is_none() {
        1
    } else {
        2
    }
}

#[test]
fn a_ragged_batch_over_a_pool_takes_two_launches_at_most_and_equals_the_cpu_kernel() {
    let stand_in = StandIn::new();
    // Keys of no, one, a block less, more and exactly, and of many tokens; several queries, and more than keys.
    let queries = vec![1, 1, 3, 1, 2, 0, 16, 2];
    let lengths = vec![40, 1, 15, 17, 16, 5, 300, 1];
    let mut next = 0;
    let tables: Vec<Vec<u32>> = lengths
        .iter()
        .map(|length: &usize| {
            let blocks = length.div_ceil(16);
            next += blocks;
            // Another order than that of the pool.
            (next - blocks..next)
                .rev()
                .map(|block| block as u32 * 7 % 40)
                .collect()
        })
        .collect();
    let total: usize = queries.iter().sum();
    let layout = PagedLayout::new(tables, queries, lengths, 16, Device::Cpu).unwrap();
    for (dim, heads, kv_heads) in [(64, 8, 2), (80, 3, 3), (128, 6, 1)] {
        let query = values(&[total as i64, heads, dim], 0.1);
        let keys = values(&[40, kv_heads, 16, dim], 0.2);
        let pool = values(&[40, kv_heads, 16, dim], 0.3);
        let sinks = values(&[heads], 0.4);
        for (name, options) in options(&sinks) {
            let name = format!("{name}, heads of {dim}");
            let of = |options| attention_paged(&query, &keys, &pool, &layout, &options).unwrap();
            let expected = of(on_cpu(options));
            assert_eq!(stand_in.launches().len(), 0, "{name}");
            let launches = launches(&options, dim);
            let found = of(options);
            assert_eq!(stand_in.launches().len(), launches, "{name}");
            assert_close(&found.0, &expected.0, &name);
            assert_close(&found.1, &expected.1, &name);
        }
    }
}

#[test]
fn keys_and_values_are_written_in_one_launch() {
    let stand_in = StandIn::new();
    let (blocks, rows) = ([3_i64, 0, 3], [1_i64, 15, 0]);
    let slots = blocks.iter().zip(rows).map(|(block, row)| 16 * block + row);
    let plain =
        PagedSlots::new(slots.map(|slot| slot as usize).collect(), 16, Device::Cpu).unwrap();
    let of_device =
        PagedSlots::of_device(&Tensor::from_slice(&blocks), &Tensor::from_slice(&rows), 16)
            .unwrap();
    let pool = || values(&[4, 2, 16, 48], 0.3);
    // The keys lie in a joint projection.
    let (joint, new_values) = (values(&[3, 6, 48], 0.1), values(&[3, 2, 48], 0.2));
    let keys = joint.narrow(1, 2, 2);
    let (mut expected_keys, mut expected_values) = (pool(), pool());
    paged_write(&keys, &mut expected_keys, &plain).unwrap();
    paged_write(&new_values, &mut expected_values, &plain).unwrap();
    let (mut found_keys, mut found_values) = (pool(), pool());
    let pools = [&mut found_keys, &mut found_values];
    paged_write_pair([&keys, &new_values], pools, &of_device).unwrap();
    assert_eq!(stand_in.launches(), ["paged_write"]);
    assert_eq!((found_keys, found_values), (expected_keys, expected_values));
    // Heads of other sizes are written by libtorch.
    let (odd, mut pool) = (values(&[3, 1, 40], 0.1), values(&[4, 1, 16, 40], 0.3));
    let mut other = pool.copy();
    paged_write_pair([&odd, &odd], [&mut pool, &mut other], &of_device).unwrap();
    assert_eq!(stand_in.launches().len(), 0);
    assert_eq!(pool, other);
    assert_eq!(pool.get(3).select(1, 1), odd.get(0));
}

#[test]
fn rows_of_lengths_that_the_device_knows_equal_the_cpu_kernel() {
    let stand_in = StandIn::new();
    let lengths = [300_usize, 63, 64, 65, 20];
    let counts: Vec<i64> = lengths.iter().map(|length| *length as i64).collect();
    for (queries, dim, heads, kv_heads) in [(1, 64, 8, 2), (4, 96, 4, 4), (16, 128, 2, 1)] {
        // The first rows of a larger cache.
        let whole = |seed| values(&[7, kv_heads, 300, dim], seed).narrow(0, 0, 5);
        let (keys, held) = (whole(0.2), whole(0.3));
        let query = values(&[5, heads, queries, dim], 0.1);
        let on_device = DeviceLengths::new(&Tensor::from_slice(&counts), &keys).unwrap();
        let sinks = values(&[heads], 0.4);
        for (name, options) in options(&sinks) {
            let name = format!("{name}, {queries} queries of {dim}");
            let expected =
                attention_decode(&query, &keys, &held, Some(&lengths), &on_cpu(options)).unwrap();
            let found = attention_at_lengths(&query, &keys, &held, &on_device, &options);
            let (output, lse) = found.unwrap().unwrap();
            assert_eq!(stand_in.launches().len(), launches(&options, dim), "{name}");
            assert_close(&output, &expected.0, &name);
            assert_close(&lse, &expected.1, &name);
        }
    }
}

#[test]
fn what_the_kernel_does_not_have_runs_as_without_it() {
    let stand_in = StandIn::new();
    let slopes = values(&[2], 0.5).abs();
    let causal = AttentionOptions::causal();
    let window = Window::sliding(9);
    let cases = [
        (
            64,
            1,
            AttentionOptions {
                alibi_slopes: Some(&slopes),
                ..causal
            },
        ),
        (
            64,
            1,
            AttentionOptions {
                window,
                sink_tokens: 2,
                ..causal
            },
        ),
        (40, 1, causal),
        (160, 1, causal),
        (64, 17, causal),
        (64, 1, on_cpu(causal)),
    ];
    for (dim, queries, options) in cases {
        let query = values(&[queries as i64, 2, dim], 0.1);
        let pool = values(&[3, 1, 16, dim], 0.2);
        let tables = vec![vec![2, 0, 1]];
        let layout = PagedLayout::new(tables, vec![queries], vec![40], 16, Device::Cpu).unwrap();
        let of = |options| attention_paged(&query, &pool, &pool, &layout, &options).unwrap();
        let (found, expected) = (of(options), of(on_cpu(options)));
        assert_eq!(stand_in.launches().len(), 0, "{dim} {queries} {options:?}");
        assert_close(&found.0, &expected.0, "left to the CPU");
    }
}
