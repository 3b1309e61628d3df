//! Tests of the effect of quantized keys and values on a model's logits and loss.

use overdrive_kv_cache::{DynamicCache, KvCache, QuantizedCache, QuantizedCacheConfig};
use overdrive_transformer::{CausalLm, ForwardInput, InitOptions, LlamaConfig};
use tch::{Device, Kind, Tensor};

const TOKENS: i64 = 192;

/// Returns a model whose weights are so large that attention is far from uniform.
fn model() -> CausalLm {
    let config = LlamaConfig {
        vocab_size: 256,
        hidden_size: 128,
        intermediate_size: 256,
        num_hidden_layers: 4,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        initializer_range: 0.08,
        ..LlamaConfig::default()
    };
    CausalLm::new(&config.into(), &InitOptions::default()).unwrap()
}

/// Returns the logits `(T, V)` of a sequence that is read eight tokens at a time.
fn logits(model: &CausalLm, ids: &Tensor, cache: &mut dyn KvCache) -> Tensor {
    let mut parts = Vec::new();
    for start in (0..TOKENS).step_by(8) {
        let chunk = ids.narrow(1, start, 8);
        let input = ForwardInput::new(&chunk).with_cache(&mut *cache);
        parts.push(model.forward(input).unwrap().squeeze_dim(0));
    }
    Tensor::cat(&parts, 0)
}

/// Returns the relative root mean square error of the logits, and the rise of the loss on tokens drawn
/// from the exact distribution.
fn cost(config: QuantizedCacheConfig) -> (f64, f64) {
    let _no_grad = tch::no_grad_guard();
    let model = model();
    let ids: Vec<i64> = (0..TOKENS)
        .map(|i| (i * i * 31 + i * 7 + 3) % 256)
        .collect();
    let ids = Tensor::from_slice(&ids).unsqueeze(0);
    let exact = logits(&model, &ids, &mut DynamicCache::new(4));
    let mut cache = QuantizedCache::new(config).unwrap();
    let rounded = logits(&model, &ids, &mut cache);
    assert!(
        cache.quantized_len() > TOKENS / 2,
        "most of the text was rounded"
    );
    let off = (&rounded - &exact)
        .square()
        .mean(Kind::Double)
        .double_value(&[]);
    let size = exact.square().mean(Kind::Double).double_value(&[]);
    // The Kullback-Leibler divergence: the expected rise of the loss, in nats a token.
    let (p, q) = (
        exact.log_softmax(-1, Kind::Double),
        rounded.log_softmax(-1, Kind::Double),
    );
    let divergence = (p.exp() * (p - q)).sum(Kind::Double).double_value(&[]) / TOKENS as f64;
    assert_eq!(exact.device(), Device::Cpu);
    let off = (off / size).sqrt();
    println!("logits off by {off:.4}, {divergence:.6} nats a token");
    (off, divergence)
}

fn with_short_tail(config: QuantizedCacheConfig) -> QuantizedCacheConfig {
    QuantizedCacheConfig {
        residual_length: 16,
        ..config
    }
}

#[test]
fn int8_moves_logits_by_less_than_a_percent_and_the_loss_by_less_than_a_thousandth() {
    let (off, divergence) = cost(with_short_tail(QuantizedCacheConfig::int8(4)));
    assert!(off > 0.0 && off < 0.01, "logits are off by {off}");
    assert!(
        (0.0..1e-3).contains(&divergence),
        "{divergence} nats a token"
    );
}

#[test]
fn int4_moves_logits_by_less_than_a_sixth_and_the_loss_by_less_than_a_tenth() {
    let (off, divergence) = cost(with_short_tail(QuantizedCacheConfig::int4(4)));
    assert!(off > 0.0 && off < 0.17, "logits are off by {off}");
    assert!(
        (0.0..0.1).contains(&divergence),
        "{divergence} nats a token"
    );
}
