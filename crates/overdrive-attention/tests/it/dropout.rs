//! Dropout of the blockwise kernel. One file: some of it draws from libtorch's generator, which is the
//! process's.

use std::sync::Mutex;

use overdrive_attention::{AttentionOptions, Backend, attention};
use tch::{Device, Kind, Tensor};

static GENERATOR: Mutex<()> = Mutex::new(());

const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);

fn dropping(p: f64, seed: Option<u64>) -> AttentionOptions<'static> {
    AttentionOptions {
        dropout_p: p,
        dropout_seed: seed,
        backend: Backend::Blockwise,
        ..AttentionOptions::default()
    }
}

/// The factor that each weight (B, H, T, S) was given: values that are unit vectors show the weights,
/// and queries of zero make all of these `1/S`.
fn factors(shape: [i64; 4], p: f64, seed: u64) -> Tensor {
    let [batch, heads, queries, keys] = shape;
    let zeros = |length| Tensor::zeros([batch, heads, length, 4], DOUBLE);
    let value = Tensor::eye(keys, DOUBLE).expand([batch, heads, keys, keys], false);
    attention(
        &zeros(queries),
        &zeros(keys),
        &value,
        &dropping(p, Some(seed)),
    )
    .unwrap()
        * keys as f64
}

#[test]
fn the_share_of_dropped_weights_is_the_probability_and_the_rest_is_scaled_up() {
    for p in [0.1, 0.5, 0.9] {
        let factors = factors([2, 3, 100, 150], p, 7);
        let dropped = factors.eq(0.0).to_kind(Kind::Double);
        // 90,000 weights: five standard deviations of the share are below 0.009.
        assert!((dropped.mean(Kind::Double).double_value(&[]) - p).abs() < 0.009);
        let kept = factors.masked_select(&factors.ne(0.0));
        assert!((kept - 1.0 / (1.0 - p)).abs().max().double_value(&[]) < 1e-9);
        // No query, key or head is treated worse: their shares spread as independent draws do.
        for along in [[0_i64, 1, 2], [0, 1, 3], [0, 2, 3], [1, 2, 3]] {
            let share = dropped.mean_dim(&along[..], false, Kind::Double);
            let draws = 90_000.0 / share.numel() as f64;
            let deviation = (p * (1.0 - p) / draws).sqrt();
            assert!((share - p).abs().max().double_value(&[]) < 5.0 * deviation);
        }
    }
}

#[test]
fn a_seed_repeats_its_pattern_and_another_has_another() {
    let pattern = |seed| factors([1, 2, 70, 110], 0.5, seed);
    assert_eq!(pattern(3), pattern(3));
    let differing = pattern(3).ne_tensor(&pattern(4)).to_kind(Kind::Double);
    assert!((differing.mean(Kind::Double).double_value(&[]) - 0.5).abs() < 0.05);
}

#[test]
fn the_backward_pass_drops_what_the_forward_pass_dropped() {
    // With the pattern known, dropout is a product with a constant that autograd can differentiate.
    let [batch, heads, queries, keys, dim] = [2, 2, 70, 110, 8];
    let leaf = |length: i64, seed: f64| {
        let count = batch * heads * length * dim;
        let x = (Tensor::arange(count, DOUBLE) * 12.9898 + seed).sin();
        x.reshape([batch, heads, length, dim])
            .set_requires_grad(true)
    };
    let (query, key, value) = (leaf(queries, 0.1), leaf(keys, 0.2), leaf(keys, 0.3));
    let weight = (Tensor::arange(batch * heads * queries * dim, DOUBLE) * 7.7).cos();
    let weight = weight.reshape([batch, heads, queries, dim]);
    let gradients = |output: &Tensor| {
        let loss = (output * &weight).sum(Kind::Double);
        overdrive_autograd::grad(&[&loss], &[&query, &key, &value], &Default::default()).unwrap()
    };
    let output = attention(&query, &key, &value, &dropping(0.3, Some(11))).unwrap();
    let scores = query.matmul(&key.transpose(2, 3)) / (dim as f64).sqrt();
    let factors = factors([batch, heads, queries, keys], 0.3, 11);
    let expected = (scores.softmax(-1, Kind::Double) * factors).matmul(&value);
    assert!(output.allclose(&expected, 0.0, 1e-12, false));
    for (got, expected) in gradients(&output).iter().zip(gradients(&expected)) {
        assert!(
            got.as_ref()
                .unwrap()
                .allclose(&expected.unwrap(), 0.0, 1e-12, false)
        );
    }
}

#[test]
fn without_a_seed_the_pattern_follows_libtorchs_generator() {
    let _alone = GENERATOR.lock().unwrap();
    let x = Tensor::ones([1, 1, 40, 40], (Kind::Float, Device::Cpu));
    let run = || attention(&x, &x, &x.cumsum(2, Kind::Float), &dropping(0.5, None)).unwrap();
    tch::manual_seed(5);
    let (first, second) = (run(), run());
    tch::manual_seed(5);
    assert_eq!(run(), first);
    assert_ne!(first, second);
}
