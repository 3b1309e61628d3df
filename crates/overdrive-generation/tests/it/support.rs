//! Helpers of several test files.
#![allow(dead_code, reason = "each test file uses its part")]

use std::collections::HashMap;
use std::path::PathBuf;

use overdrive_generation::{GenerationConfig, ImagePatches};
use overdrive_transformer::{CausalLm, InitOptions, LlamaConfig};
use tch::Tensor;
use tokenizers::Tokenizer;

/// Returns a byte-level BPE whose tokens are the 256 bytes, the id of a byte being its index in the
/// sorted alphabet, and one special token, 256.
pub(crate) fn byte_tokenizer() -> Tokenizer {
    let mut alphabet: Vec<char> = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet()
        .into_iter()
        .collect();
    alphabet.sort_unstable();
    let vocab: serde_json::Map<_, _> = alphabet
        .iter()
        .enumerate()
        .map(|(id, c)| (c.to_string(), id.into()))
        .collect();
    let json = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "post_processor": null,
        "added_tokens": [{"id": 256, "content": "<end>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
            "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true,
            "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null,
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
            "byte_fallback": false, "vocab": vocab, "merges": []},
    });
    serde_json::from_value(json).unwrap()
}

pub(crate) fn encode(tokenizer: &Tokenizer, text: &str) -> Vec<i64> {
    let encoding = tokenizer.encode(text, false).unwrap();
    encoding.get_ids().iter().map(|&id| i64::from(id)).collect()
}

/// Returns a random model whose distributions are uneven enough to have preferences.
pub(crate) fn random_model(vocab_size: i64, layers: i64, seed: u64) -> CausalLm {
    let options = InitOptions {
        seed,
        ..InitOptions::default()
    };
    random_model_on(vocab_size, layers, &options)
}

/// Returns [`random_model`] on a device.
pub(crate) fn random_model_on(vocab_size: i64, layers: i64, options: &InitOptions) -> CausalLm {
    let config = LlamaConfig {
        vocab_size,
        hidden_size: 32,
        intermediate_size: 48,
        num_hidden_layers: layers,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        max_position_embeddings: 512,
        initializer_range: 0.2,
        ..LlamaConfig::default()
    };
    CausalLm::new(&config.into(), options).unwrap()
}

/// Returns a checkpoint of overdrive-transformer's fixtures.
pub(crate) fn load(case: &str) -> CausalLm {
    let crates = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let dir = crates
        .join("../overdrive-transformer/tests/fixtures")
        .join(case);
    CausalLm::from_pretrained(dir, &Default::default()).unwrap()
}

pub(crate) fn greedy(new: usize) -> GenerationConfig {
    GenerationConfig {
        max_new_tokens: Some(new),
        ..GenerationConfig::default()
    }
}

pub(crate) fn sampled(new: usize, seed: u64) -> GenerationConfig {
    GenerationConfig {
        do_sample: true,
        top_k: 0,
        seed: Some(seed),
        ..greedy(new)
    }
}

/// Returns the chi-square statistic of counts against probabilities, over cells of at least 5 expected,
/// and its degrees of freedom.
pub(crate) fn chi_squared(counts: &[f64], probabilities: &[f64]) -> (f64, f64) {
    let n: f64 = counts.iter().sum();
    let (mut sum, mut cells) = (0.0, 0.0);
    let (mut rare_count, mut rare) = (0.0, 0.0);
    for (&count, &p) in counts.iter().zip(probabilities) {
        if p * n >= 5.0 {
            sum += (count - p * n).powi(2) / (p * n);
            cells += 1.0;
        } else {
            (rare_count, rare) = (rare_count + count, rare + p * n);
        }
    }
    if rare >= 5.0 {
        sum += (rare_count - rare).powi(2) / rare;
        cells += 1.0;
    }
    (sum, cells - 1.0)
}

/// Returns the value that chi-square with `freedom` degrees exceeds once in a thousand (Wilson &
/// Hilferty 1931).
pub(crate) fn once_in_a_thousand(freedom: f64) -> f64 {
    let part = 2.0 / (9.0 * freedom);
    freedom * (1.0 - part + 3.09 * part.sqrt()).powi(3)
}

/// Prompts with images, and what transformers continues them with greedily.
pub(crate) struct WithImages {
    pub(crate) prompts: Vec<Vec<i64>>,
    pub(crate) images: Vec<Vec<ImagePatches>>,
    pub(crate) continuations: Vec<Vec<i64>>,
}

/// Reads the prompts of the fixture `qwen3_vl` of overdrive-transformer.
pub(crate) fn with_images() -> WithImages {
    let crates = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let file = "../overdrive-transformer/tests/fixtures/qwen3_vl/expected.safetensors";
    let tensors: HashMap<String, Tensor> = Tensor::read_safetensors(crates.join(file))
        .expect("run gen_vision.py of overdrive-transformer")
        .into_iter()
        .collect();
    let numbers =
        |name: &str, row: i64| -> Vec<i64> { Vec::try_from(tensors[name].select(0, row)).unwrap() };
    let pixels = Vec::<f32>::try_from(tensors["pixels"].flatten(0, -1)).unwrap();
    let mut rest = pixels.as_slice();
    let mut image = |number: i64| {
        let grid = numbers("grids", number);
        let grid = [grid[0] as usize, grid[1] as usize];
        let own;
        (own, rest) = rest.split_at(grid[0] * grid[1] * 96);
        ImagePatches::new(own.to_vec(), 96, grid, 2).unwrap()
    };
    let padding = numbers("attention_mask", 1)
        .iter()
        .filter(|mask| **mask == 0)
        .count();
    WithImages {
        prompts: vec![
            numbers("input_ids", 0),
            numbers("input_ids", 1)[padding..].to_vec(),
        ],
        images: vec![vec![image(0), image(1)], vec![image(2)]],
        continuations: [0, 1]
            .map(|row| numbers("greedy", row)[24..].to_vec())
            .to_vec(),
    }
}
