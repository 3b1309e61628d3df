//! The model and the prompts of the generation benchmarks.

use overdrive::transformer::{CausalLm, InitOptions, LlamaConfig};
use tch::Kind;

use crate::StepResult;

/// The shape of the claims' model, with 100M parameters.
pub fn config() -> LlamaConfig {
    LlamaConfig {
        vocab_size: 32_000,
        hidden_size: 768,
        intermediate_size: 2048,
        num_hidden_layers: 12,
        num_attention_heads: 12,
        num_key_value_heads: Some(4),
        max_position_embeddings: 4096,
        tie_word_embeddings: true,
        eos_token_id: Vec::new(),
        ..LlamaConfig::default()
    }
}

/// Returns the model with random weights.
///
/// # Errors
/// An error if memory runs out.
pub fn model(kind: Kind) -> StepResult<CausalLm> {
    let options = InitOptions {
        kind,
        ..InitOptions::default()
    };
    Ok(CausalLm::new(&config().into(), &options)?)
}

/// Returns `count` prompts of `tokens` ids, the same at every call.
pub fn prompts(count: usize, tokens: usize, vocabulary: i64) -> Vec<Vec<i64>> {
    let id = |row: usize, place: usize| ((row * 7919 + place * 104_729 + 13) as i64) % vocabulary;
    (0..count)
        .map(|row| (0..tokens).map(|place| id(row, place)).collect())
        .collect()
}

/// Returns `count` prompts of `tokens` ids from a text, which begin 16 tokens apart; `None` if it is too short.
pub fn prompts_of_text(text: &[i64], count: usize, tokens: usize) -> Option<Vec<Vec<i64>>> {
    let prompt = |row: usize| Some(text.get(16 * row..16 * row + tokens)?.to_vec());
    (0..count).map(prompt).collect()
}

/// One measurement; `pytorch/generation.py` has the same table.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// The key in the JSON line.
    pub name: &'static str,
    /// The number of prompts in the batch.
    pub streams: usize,
    /// The number of tokens in a prompt.
    pub prompt: usize,
    /// The number of generated tokens.
    pub new: usize,
    /// If `true`, earlier keys and values are cached.
    pub use_cache: bool,
}

/// All measurements. Eight sequences without a cache are measured on this side only, because the other one takes
/// minutes.
pub const CASES: [Case; 8] = [
    case("prefill", 1, 512, 1),
    case("one_stream", 1, 32, 128),
    case("eight_streams", 8, 32, 128),
    case("cached", 1, 1, 100),
    case("uncached", 1, 1, 100).without_cache(),
    case("eight_cached", 8, 1, 100),
    case("eight_uncached", 8, 1, 100).without_cache(),
    case("long_prompt", 1, 1024, 64),
];

const fn case(name: &'static str, streams: usize, prompt: usize, new: usize) -> Case {
    Case {
        name,
        streams,
        prompt,
        new,
        use_cache: true,
    }
}

impl Case {
    const fn without_cache(self) -> Case {
        Case {
            use_cache: false,
            ..self
        }
    }
}
