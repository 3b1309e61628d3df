//! Packed sequences, decoding, merging: each equals what it is made of.

use overdrive_attention::{
    Alignment, AttentionOptions, Backend, Error, Layout, PackedLengths, Window, attention,
    attention_decode, attention_varlen, attention_varlen_with_lse, attention_with_lse, merge,
};
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

const CPU: Device = Device::Cpu;

fn numbers(shape: &[i64], seed: i64) -> Tensor {
    let count: i64 = shape.iter().product();
    let at = Tensor::arange(count, (Kind::Double, CPU)) + (seed * 1_000_003) as f64;
    let wild = (at * 12.9898).sin() * 43_758.545_3;
    ((wild.frac().abs() - 0.5) * 4.0).reshape(shape)
}

fn leaf(shape: &[i64], seed: i64) -> Tensor {
    numbers(shape, seed)
        .to_kind(Kind::Float)
        .set_requires_grad(true)
}

fn cumulative(lengths: &[i64]) -> Tensor {
    let mut sums = vec![0_i32];
    for length in lengths {
        sums.push(sums[sums.len() - 1] + i32::try_from(*length).unwrap());
    }
    Tensor::from_slice(&sums)
}

fn assert_close(got: &Tensor, expected: &Tensor, what: &str) {
    assert_eq!(got.size(), expected.size(), "{what}");
    if got.numel() == 0 {
        return;
    }
    let off = (got - expected).abs();
    let off = off
        .masked_fill(&got.eq_tensor(expected), 0.0)
        .max()
        .double_value(&[]);
    // The same sums in f32, in blocks that begin elsewhere.
    assert!(off < 2e-5, "{what} is off by {off}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn a_pack_equals_running_each_sequence_alone(
        lengths in prop::collection::vec((0..90_i64, 0..150_i64), 1..6),
        (causal, alibi, sinks, softcap) in any::<(bool, bool, bool, bool)>(),
        left in prop_oneof![Just(None), (0..80_usize).prop_map(Some)],
        (sink_tokens, top_left) in (0..3_usize, any::<bool>()),
        math in any::<bool>(),
    ) {
        let (heads, kv_heads, dim) = (4, 2, 16);
        let (q_lengths, k_lengths): (Vec<i64>, Vec<i64>) = lengths.iter().copied().unzip();
        let (total_q, total_k) = (q_lengths.iter().sum(), k_lengths.iter().sum());
        let (query, key, value) = (
            leaf(&[total_q, heads, dim], 1),
            leaf(&[total_k, kv_heads, dim], 2),
            leaf(&[total_k, kv_heads, dim], 3),
        );
        let slopes = alibi.then(|| numbers(&[lengths.len() as i64, heads], 4).abs());
        let sinks = sinks.then(|| leaf(&[heads], 5));
        let options = AttentionOptions {
            causal,
            alignment: if top_left { Alignment::TopLeft } else { Alignment::BottomRight },
            window: Window { left, right: None },
            sink_tokens,
            softcap: softcap.then_some(3.0),
            alibi_slopes: slopes.as_ref(),
            sinks: sinks.as_ref(),
            backend: if math { Backend::Math } else { Backend::Blockwise },
            ..AttentionOptions::default()
        };
        let mut leaves = vec![&query, &key, &value];
        leaves.extend(&sinks);
        let gradients = |output: &Tensor| {
            let loss = (output * numbers(&output.size(), 6)).sum(Kind::Double);
            overdrive_autograd::grad(&[&loss], &leaves, &Default::default()).unwrap()
        };

        let packed = PackedLengths::new(&cumulative(&q_lengths), &cumulative(&k_lengths)).unwrap();
        let (output, lse) =
            attention_varlen_with_lse(&query, &key, &value, &packed, &options).unwrap();

        let (mut outputs, mut lses) = (Vec::new(), Vec::new());
        let (mut q_at, mut k_at) = (0, 0);
        for (index, (q_length, k_length)) in (0..).zip(&lengths) {
            let part = |tensor: &Tensor, at, length| {
                tensor.narrow(0, at, length).transpose(0, 1).unsqueeze(0)
            };
            let slopes = slopes.as_ref().map(|slopes| slopes.get(index));
            let options = AttentionOptions { alibi_slopes: slopes.as_ref(), ..options };
            let (output, lse) = attention_with_lse(
                &part(&query, q_at, *q_length),
                &part(&key, k_at, *k_length),
                &part(&value, k_at, *k_length),
                &options,
            )
            .unwrap();
            outputs.push(output.squeeze_dim(0).transpose(0, 1));
            lses.push(lse.squeeze_dim(0));
            (q_at, k_at) = (q_at + q_length, k_at + k_length);
        }
        let alone = Tensor::cat(&outputs, 0);
        assert_close(&output, &alone, "output");
        assert_close(&lse, &Tensor::cat(&lses, 1), "lse");
        if total_q > 0 && total_k > 0 {
            for (got, expected) in gradients(&output).iter().zip(gradients(&alone)) {
                assert_close(got.as_ref().unwrap(), &expected.unwrap(), "gradient");
            }
        }
    }

    #[test]
    fn parts_of_the_keys_merge_to_the_whole(
        cuts in prop::collection::vec(0..60_i64, 1..5),
        bthd in any::<bool>(),
    ) {
        let keys: i64 = cuts.iter().sum();
        prop_assume!(keys > 0);
        let (layout, length) = if bthd { (Layout::Bthd, 1) } else { (Layout::Bhtd, 2) };
        let shape = |heads, n| if bthd { [2, n, heads, 8] } else { [2, heads, n, 8] };
        let query = leaf(&shape(4, 3), 1);
        let (key, value) = (leaf(&shape(2, keys), 2), leaf(&shape(2, keys), 3));
        let options = AttentionOptions { layout, ..AttentionOptions::default() };
        let (mut outputs, mut lses, mut at) = (Vec::new(), Vec::new(), 0);
        for cut in cuts {
            let part = |tensor: &Tensor| tensor.narrow(length, at, cut);
            let (output, lse) =
                attention_with_lse(&query, &part(&key), &part(&value), &options).unwrap();
            outputs.push(output);
            lses.push(lse);
            at += cut;
        }
        let (merged, merged_lse) = merge(&outputs, &lses, layout).unwrap();
        let (whole, whole_lse) = attention_with_lse(&query, &key, &value, &options).unwrap();
        assert_close(&merged, &whole, "output");
        assert_close(&merged_lse, &whole_lse, "lse");
        let gradients = |output: &Tensor| {
            let loss = (output * numbers(&output.size(), 6)).sum(Kind::Double);
            overdrive_autograd::grad(&[&loss], &[&query, &key, &value], &Default::default()).unwrap()
        };
        for (got, expected) in gradients(&merged).iter().zip(gradients(&whole)) {
            assert_close(got.as_ref().unwrap(), &expected.unwrap(), "gradient");
        }
    }
}

#[test]
fn decoding_reads_only_the_filled_part_of_each_row_of_the_cache() {
    let (query, slopes) = (numbers(&[3, 4, 2, 16], 1), numbers(&[3, 4], 9).abs());
    let (keys, values) = (numbers(&[3, 2, 900, 16], 2), numbers(&[3, 2, 900, 16], 3));
    let mask = numbers(&[3, 1, 1, 900], 4).gt(-1.0);
    let lengths = [900_usize, 2, 611];
    // What is not filled may hold anything.
    for (row, length) in (0..).zip(lengths) {
        let length = i64::try_from(length).unwrap();
        for cache in [&keys, &values] {
            let _ = cache
                .get(row)
                .narrow(1, length, 900 - length)
                .fill_(f64::NAN);
        }
    }
    for backend in [Backend::Auto, Backend::Math] {
        for layout in [Layout::Bhtd, Layout::Bthd] {
            let in_layout = |tensor: &Tensor| match layout {
                Layout::Bhtd => tensor.shallow_clone(),
                Layout::Bthd => tensor.transpose(1, 2),
            };
            let options = AttentionOptions {
                causal: true,
                window: Window {
                    left: Some(650),
                    right: None,
                },
                sink_tokens: 3,
                mask: Some(&mask),
                alibi_slopes: Some(&slopes),
                layout,
                backend,
                ..AttentionOptions::default()
            };
            let (output, lse) = attention_decode(
                &in_layout(&query),
                &in_layout(&keys),
                &in_layout(&values),
                Some(&lengths),
                &options,
            )
            .unwrap();
            let output = in_layout(&output);
            for (row, length) in (0..).zip(lengths) {
                let length = i64::try_from(length).unwrap();
                let part = |tensor: &Tensor| tensor.narrow(0, row, 1).narrow(2, 0, length);
                let (row_mask, row_slopes) =
                    (mask.narrow(0, row, 1).narrow(3, 0, length), slopes.get(row));
                let alone = AttentionOptions {
                    mask: Some(&row_mask),
                    alibi_slopes: Some(&row_slopes),
                    layout: Layout::Bhtd,
                    backend: Backend::Math,
                    ..options
                };
                let (expected, expected_lse) = attention_with_lse(
                    &query.narrow(0, row, 1),
                    &part(&keys),
                    &part(&values),
                    &alone,
                )
                .unwrap();
                assert_close(&output.narrow(0, row, 1), &expected, "output");
                assert_close(&lse.narrow(0, row, 1), &expected_lse, "lse");
            }
        }
    }
}

#[test]
fn decoding_records_no_gradient() {
    let (query, cache) = (leaf(&[1, 2, 1, 8], 1), leaf(&[1, 2, 9, 8], 2));
    let (output, _) =
        attention_decode(&query, &cache, &cache, None, &AttentionOptions::causal()).unwrap();
    assert!(!output.requires_grad());
    let whole = attention(&query, &cache, &cache, &AttentionOptions::causal()).unwrap();
    assert_close(&output, &whole.detach(), "output");
}

#[test]
fn an_empty_pack_has_empty_results_and_gradients() {
    for backend in [Backend::Auto, Backend::Math, Backend::Blockwise] {
        let (query, key) = (leaf(&[0, 2, 8], 1), leaf(&[0, 1, 8], 2));
        let value = leaf(&[0, 1, 4], 3);
        let lengths = PackedLengths::from_lengths(&[], CPU).unwrap();
        let slopes = Tensor::zeros([0, 2], (Kind::Float, CPU));
        let options = AttentionOptions {
            backend,
            alibi_slopes: Some(&slopes),
            ..AttentionOptions::causal()
        };
        let (output, lse) =
            attention_varlen_with_lse(&query, &key, &value, &lengths, &options).unwrap();
        assert_eq!((output.size(), lse.size()), (vec![0, 2, 4], vec![2, 0]));
        output.sum(Kind::Float).backward();
        for tensor in [&query, &key, &value] {
            assert_eq!(tensor.grad().size(), tensor.size(), "{backend:?}");
        }
    }
}

#[test]
fn what_does_not_describe_the_pack_is_refused_by_name() {
    let message = |result: Result<PackedLengths, Error>| result.unwrap_err().to_string();
    let of = |lengths: &[i64]| Tensor::from_slice(lengths);
    assert_eq!(
        message(PackedLengths::new(&of(&[1, 2]), &of(&[0, 2]))),
        "cu_seqlens_q: begins with 1, expected 0"
    );
    assert_eq!(
        message(PackedLengths::new(&of(&[0, 2]), &of(&[0, 5, 3]))),
        "cu_seqlens_k: falls from 5 to 3 at 2"
    );
    assert_eq!(
        message(PackedLengths::new(&of(&[0, 2]), &of(&[0, 5, 6]))),
        "cu_seqlens_k: describes 2 sequences, but cu_seqlens_q describes 1"
    );
    assert_eq!(
        message(PackedLengths::new(
            &Tensor::from_slice(&[0.0_f32]),
            &of(&[0])
        )),
        "cu_seqlens_q: Float of shape [1], expected integers (sequences + 1)"
    );
    let lengths = PackedLengths::from_lengths(&[3, 4], CPU).unwrap();
    let (short, pack) = (numbers(&[6, 2, 8], 1), numbers(&[7, 2, 8], 1));
    let options = AttentionOptions::default();
    let error = attention_varlen(&pack, &short, &pack, &lengths, &options).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`key` has shape [6, 2, 8]; it must be [7, heads, dim], with the length of the pack first"
    );
    let mask = Tensor::ones([7, 7], (Kind::Bool, CPU));
    let options = AttentionOptions {
        mask: Some(&mask),
        ..options
    };
    let error = attention_varlen(&pack, &pack, &pack, &lengths, &options).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`mask` is set; it must be None for packed sequences, whose scores have no common shape"
    );
    let error = merge(&[pack], &[], Layout::Bhtd).unwrap_err();
    assert_eq!(
        error.to_string(),
        "cannot merge 1 outputs and 0 log-sum-exps; pass at least one output, and one log-sum-exp for each"
    );
}

/// Without a GPU it fails at its first step, which names the copy that it makes.
#[test]
fn the_bounds_of_a_pack_go_to_a_gpu_through_pinned_memory() {
    match PackedLengths::from_lengths(&[3, 4], Device::Cuda(0)) {
        Ok(lengths) => assert_eq!(lengths.total_queries(), 7),
        Err(error) => {
            assert!(!tch::Cuda::is_available(), "{error}");
            assert!(error.to_string().contains("pin_memory"), "{error}");
        }
    }
}
