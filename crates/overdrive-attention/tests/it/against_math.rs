//! Every back end that runs on a CPU against the math back end in f64: output, log-sum-exp and all
//! gradients, over shapes and options.

use overdrive_attention::{
    Alignment, AttentionOptions, Backend, Layout, Window, attention, attention_with_lse,
};
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

/// Numbers in -1..1 that look random, the same in every run.
fn numbers(shape: &[i64], seed: i64) -> Tensor {
    let count: i64 = shape.iter().product();
    let at = Tensor::arange(count, (Kind::Double, Device::Cpu)) + (seed * 1_000_003) as f64;
    let wild = (at * 12.9898).sin() * 43_758.545_3;
    ((wild.frac().abs() - 0.5) * 2.0).reshape(shape)
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Mask {
    None,
    Keep,
    Add,
}

#[derive(Debug, Clone)]
struct Case {
    batch: i64,
    kv_heads: i64,
    group: i64,
    queries: i64,
    keys: i64,
    key_dim: i64,
    value_dim: i64,
    causal: bool,
    alignment: Alignment,
    window: Window,
    sink_tokens: usize,
    mask: Mask,
    /// The dimensions of the mask that are 1.
    broadcast: [bool; 4],
    scale: Option<f64>,
    softcap: Option<f64>,
    alibi: bool,
    batched_slopes: bool,
    sinks: bool,
    layout: Layout,
}

impl Case {
    fn plain(queries: i64, keys: i64, dim: i64) -> Case {
        Case {
            batch: 2,
            kv_heads: 2,
            group: 1,
            queries,
            keys,
            key_dim: dim,
            value_dim: dim,
            causal: false,
            alignment: Alignment::BottomRight,
            window: Window::default(),
            sink_tokens: 0,
            mask: Mask::None,
            broadcast: [false; 4],
            scale: None,
            softcap: None,
            alibi: false,
            batched_slopes: false,
            sinks: false,
            layout: Layout::Bhtd,
        }
    }

    fn shape(&self, heads: i64, length: i64, dim: i64) -> [i64; 4] {
        match self.layout {
            Layout::Bhtd => [self.batch, heads, length, dim],
            Layout::Bthd => [self.batch, length, heads, dim],
        }
    }

    /// Output, log-sum-exp (if asked for), and gradients of query, key, value, and of the mask and sinks where there
    /// are some, all in f64.
    fn run(&self, backend: Backend, kind: Kind, with_lse: bool) -> Vec<Tensor> {
        let heads = self.kv_heads * self.group;
        let leaf = |shape: &[i64], seed, factor: f64| {
            (numbers(shape, seed) * factor)
                .to_kind(kind)
                .set_requires_grad(true)
        };
        let query = leaf(&self.shape(heads, self.queries, self.key_dim), 1, 2.0);
        let key = leaf(&self.shape(self.kv_heads, self.keys, self.key_dim), 2, 2.0);
        let value = leaf(
            &self.shape(self.kv_heads, self.keys, self.value_dim),
            3,
            2.0,
        );
        let full = [self.batch, heads, self.queries, self.keys];
        let shape: Vec<i64> = full
            .iter()
            .zip(self.broadcast)
            .map(|(size, one)| if one { 1 } else { *size })
            .collect();
        let mask = match self.mask {
            Mask::None => None,
            Mask::Keep => Some(numbers(&shape, 4).gt(-0.4)),
            Mask::Add => Some(leaf(&shape, 4, 3.0)),
        };
        let slope_shape = if self.batched_slopes {
            vec![self.batch, heads]
        } else {
            vec![heads]
        };
        let slopes = self.alibi.then(|| numbers(&slope_shape, 5).abs() * 0.3);
        let sinks = self.sinks.then(|| leaf(&[heads], 6, 3.0));
        let options = AttentionOptions {
            causal: self.causal,
            alignment: self.alignment,
            window: self.window,
            sink_tokens: self.sink_tokens,
            mask: mask.as_ref(),
            scale: self.scale,
            softcap: self.softcap,
            alibi_slopes: slopes.as_ref(),
            sinks: sinks.as_ref(),
            layout: self.layout,
            backend,
            ..AttentionOptions::default()
        };
        let (output, lse) = if with_lse {
            let (output, lse) = attention_with_lse(&query, &key, &value, &options).unwrap();
            (output, Some(lse))
        } else {
            (attention(&query, &key, &value, &options).unwrap(), None)
        };
        let finite = |lse: &Tensor| lse.nan_to_num(f64::NAN, None, -1e6);
        let mut loss =
            (output.to_kind(Kind::Double) * numbers(&output.size(), 7)).sum(Kind::Double);
        if let Some(lse) = &lse {
            let weights = numbers(&lse.size(), 8);
            loss += (finite(&lse.to_kind(Kind::Double)) * weights).sum(Kind::Double);
        }
        loss.backward();
        let mut results = vec![output.detach()];
        results.extend(lse.map(|lse| finite(&lse.detach())));
        results.extend([query.grad(), key.grad(), value.grad()]);
        results.extend(
            mask.filter(|_| self.mask == Mask::Add)
                .map(|mask| mask.grad()),
        );
        results.extend(sinks.map(|sinks| sinks.grad()));
        results
            .iter()
            .map(|result| result.to_kind(Kind::Double))
            .collect()
    }

    /// Largest difference of any result, relative to the largest number in it (or 1).
    fn difference(&self, backend: Backend, kind: Kind) -> f64 {
        // The log-sum-exp of libtorch's kernel has no gradient.
        let with_lse = backend != Backend::Flash;
        let exact = self.run(Backend::Math, Kind::Double, with_lse);
        let got = self.run(backend, kind, with_lse);
        assert_eq!(exact.len(), got.len());
        let mut worst: f64 = 0.0;
        for (index, (exact, got)) in exact.iter().zip(&got).enumerate() {
            assert_eq!(exact.size(), got.size(), "result {index}");
            if exact.numel() > 0 {
                // The log-sum-exps of queries without keys stand as -1e6.
                let size = exact.abs().clamp_max(1e3).max().double_value(&[]).max(1.0);
                let off = (exact - got).abs().max().double_value(&[]);
                assert!(!off.is_nan(), "result {index} has a NaN");
                worst = worst.max(off / size);
            }
        }
        worst
    }

    fn assert_close(&self, backend: Backend, kind: Kind, tolerance: f64) {
        let difference = self.difference(backend, kind);
        assert!(
            difference < tolerance,
            "{backend} in {kind:?} is off by {difference}: {self:?}"
        );
    }
}

/// Sums of up to 200 products in f32.
const F32: f64 = 1e-5;
/// The same in f64.
const F64: f64 = 1e-12;

fn limit() -> impl Strategy<Value = Option<usize>> {
    prop_oneof![
        Just(None),
        (0..150_usize).prop_map(Some),
        Just(Some(usize::MAX))
    ]
}

prop_compose! {
    fn cases()(
        (batch, kv_heads, group) in (1..3_i64, 1..3_i64, prop_oneof![Just(1_i64), Just(3), Just(4)]),
        (queries, keys) in prop_oneof![
            (1..6_i64, 1..230_i64), (1..140_i64, 1..140_i64), (60..70_i64, 90..100_i64),
        ],
        (key_dim, value_dim) in prop_oneof![
            Just((16_i64, 16_i64)), Just((64, 64)), (1..40_i64, 1..40_i64),
        ],
        (causal, top_left, bthd) in any::<(bool, bool, bool)>(),
        (left, right) in (limit(), limit()),
        sink_tokens in prop_oneof![Just(0_usize), 1..9_usize],
        (mask, broadcast) in (
            prop_oneof![3 => Just(Mask::None), 1 => Just(Mask::Keep), 1 => Just(Mask::Add)],
            any::<[bool; 4]>(),
        ),
        scale in prop_oneof![Just(None), Just(Some(0.3)), Just(Some(-0.2))],
        softcap in prop_oneof![2 => Just(None), 1 => Just(Some(1.5)), 1 => Just(Some(30.0))],
        (alibi, batched_slopes, sinks) in any::<(bool, bool, bool)>(),
    ) -> Case {
        Case {
            batch, kv_heads, group, queries, keys, key_dim, value_dim, causal,
            alignment: if top_left { Alignment::TopLeft } else { Alignment::BottomRight },
            window: Window { left, right: if causal { None } else { right } },
            sink_tokens, mask, broadcast, scale, softcap, alibi, batched_slopes, sinks,
            layout: if bthd { Layout::Bthd } else { Layout::Bhtd },
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn the_blockwise_kernel_equals_the_math_back_end_whatever_the_options(case in cases()) {
        let (single, double) = (
            case.difference(Backend::Blockwise, Kind::Float),
            case.difference(Backend::Blockwise, Kind::Double),
        );
        // In one of thousands of cases the terms of a gradient cancel to a tenth.
        prop_assert!(single < 10.0 * F32, "f32 is off by {single}");
        prop_assert!(double < F64, "f64 is off by {double}");
    }
}

#[test]
fn the_blockwise_kernel_holds_over_a_grid_of_lengths_around_its_blocks() {
    for queries in [1, 4, 5, 63, 64, 65, 129] {
        for keys in [1, 6, 95, 96, 97, 200] {
            for causal in [false, true] {
                let case = Case {
                    causal,
                    ..Case::plain(queries, keys, 32)
                };
                case.assert_close(Backend::Blockwise, Kind::Float, F32);
            }
        }
    }
}

#[test]
fn one_query_over_a_cache_long_enough_to_be_split_among_threads() {
    for (batch, kv_heads, group, queries) in [(1, 1, 1, 1), (1, 2, 4, 1), (1, 1, 8, 3)] {
        let plain = Case {
            batch,
            kv_heads,
            group,
            ..Case::plain(queries, 3000, 64)
        };
        plain.assert_close(Backend::Blockwise, Kind::Float, F32);
        let all = Case {
            causal: true,
            window: Window {
                left: Some(2100),
                right: None,
            },
            sink_tokens: 4,
            sinks: true,
            softcap: Some(20.0),
            alibi: true,
            ..plain
        };
        all.assert_close(Backend::Blockwise, Kind::Float, F32);
        all.assert_close(Backend::Blockwise, Kind::Double, F64);
    }
}

#[test]
fn libtorchs_flash_equals_the_math_back_end_where_it_runs() {
    for kind in [(Kind::Float, F32), (Kind::Double, F64)] {
        let plain = Case::plain(70, 70, 16);
        plain.assert_close(Backend::Flash, kind.0, kind.1);
        Case {
            causal: true,
            group: 3,
            ..plain.clone()
        }
        .assert_close(Backend::Flash, kind.0, kind.1);
        Case {
            layout: Layout::Bthd,
            ..plain.clone()
        }
        .assert_close(Backend::Flash, kind.0, kind.1);
        Case {
            mask: Mask::Keep,
            broadcast: [true, false, false, false],
            ..plain.clone()
        }
        .assert_close(Backend::Flash, kind.0, kind.1);
        let top_left = Alignment::TopLeft;
        Case {
            causal: true,
            alignment: top_left,
            keys: 90,
            ..plain
        }
        .assert_close(Backend::Flash, kind.0, kind.1);
    }
}

#[test]
fn half_precisions_are_computed_in_f32_and_rounded_once() {
    // Inputs are rounded to the half precision first, so the difference is that of the results:
    // 2^-9 for bf16 and 2^-12 for f16, and their accumulation in sums of gradients.
    for (kind, tolerance) in [(Kind::BFloat16, 2e-2), (Kind::Half, 2.5e-3)] {
        for (queries, keys) in [(70, 130), (1, 200)] {
            let case = Case {
                causal: true,
                group: 2,
                ..Case::plain(queries, keys, 24)
            };
            case.assert_close(Backend::Blockwise, kind, tolerance);
        }
    }
}

#[test]
fn queries_that_see_nothing_give_zeros_and_no_gradient() {
    // Of 5 queries over 3 keys, aligned at the bottom right, the first two stand before every key.
    let case = Case {
        causal: true,
        ..Case::plain(5, 3, 8)
    };
    for backend in [Backend::Blockwise, Backend::Math] {
        let results = case.run(backend, Kind::Double, true);
        let (output, lse, query) = (&results[0], &results[1], &results[2]);
        for nothing in [output, query] {
            assert_eq!(nothing.narrow(2, 0, 2).abs().max().double_value(&[]), 0.0);
            assert!(nothing.narrow(2, 2, 3).abs().min().double_value(&[]) > 0.0);
        }
        assert_eq!(lse.narrow(2, 0, 2).max().double_value(&[]), -1e6);
    }
    case.assert_close(Backend::Blockwise, Kind::Double, F64);
}

#[test]
fn empty_dimensions_give_empty_or_zero_results() {
    for (queries, keys) in [(0, 4), (4, 0), (0, 0)] {
        let case = Case {
            sinks: true,
            ..Case::plain(queries, keys, 8)
        };
        case.assert_close(Backend::Blockwise, Kind::Double, F64);
    }
}

#[test]
fn infinities_in_a_bias_hide_and_nan_comes_out_as_nan() {
    let plain = numbers(&[1, 1, 4, 8], 1).to_kind(Kind::Float);
    let hidden = Tensor::from_slice(&[0.0_f32, f32::NEG_INFINITY, 0.0, f32::MIN]);
    let options = AttentionOptions {
        mask: Some(&hidden),
        ..AttentionOptions::default()
    };
    let output = attention(&plain, &plain, &plain, &options).unwrap();
    let seen = plain.index_select(2, &Tensor::from_slice(&[0_i64, 2]));
    let expected = attention(&plain, &seen, &seen, &AttentionOptions::default()).unwrap();
    assert!(output.allclose(&expected, 0.0, 1e-6, false));

    let broken = plain.masked_fill(
        &plain.eq_tensor(&plain.narrow(2, 0, 1).narrow(3, 0, 1)),
        f64::NAN,
    );
    let output = attention(&broken, &plain, &plain, &AttentionOptions::default()).unwrap();
    assert!(output.narrow(2, 0, 1).isnan().all().int64_value(&[]) == 1);
    assert!(output.narrow(2, 1, 3).isnan().any().int64_value(&[]) == 0);
}
