//! The flags for text generation.

use std::collections::BTreeMap;

use anyhow::Result;
use clap::Args;
use overdrive::core::print_error_line;
use overdrive::generation::{GenerationConfig, ModelFiles};
use serde::Serialize;
use serde_json::Value;

/// The options of a chat's answers; each flag overrides the key of the same name in the model's generation_config.json.
#[derive(Debug, Clone, Default, Args, Serialize)]
#[serde(rename_all = "snake_case")]
pub struct GenerationFlags {
    /// Maximum number of new tokens
    #[arg(long)]
    pub max_new_tokens: Option<usize>,
    /// Sampling temperature; 0 is greedy
    #[arg(long, allow_negative_numbers = true, value_parser = finite)]
    pub temperature: Option<f64>,
    /// Sample from the N most likely tokens; 0 is all
    #[arg(long)]
    pub top_k: Option<usize>,
    /// Sample from the smallest set of tokens with this total probability
    #[arg(long, allow_negative_numbers = true, value_parser = finite)]
    pub top_p: Option<f64>,
    /// Sample from tokens with at least this probability relative to the most likely one
    #[arg(long, allow_negative_numbers = true, value_parser = finite)]
    pub min_p: Option<f64>,
    /// Penalty by which the scores of earlier tokens are divided; 1 is off
    #[arg(long, allow_negative_numbers = true, value_parser = finite)]
    pub repetition_penalty: Option<f64>,
    /// Penalty subtracted once from the scores of tokens already generated; 0 is off
    #[arg(long, allow_negative_numbers = true, value_parser = finite)]
    pub presence_penalty: Option<f64>,
    /// Penalty subtracted from a token's score for each earlier occurrence; 0 is off
    #[arg(long, allow_negative_numbers = true, value_parser = finite)]
    pub frequency_penalty: Option<f64>,
    /// Never repeat an n-gram of this many tokens
    #[arg(long)]
    pub no_repeat_ngram_size: Option<usize>,
    /// Bias added to token scores, such as {"42": -5, "7": 2.5}
    #[arg(long, value_parser = biases)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logit_bias: Option<BTreeMap<i64, f64>>,
    /// Stop at this text; may be given several times
    #[arg(long = "stop")]
    #[serde(rename = "stop_strings", skip_serializing_if = "Vec::is_empty")]
    pub stop: Vec<String>,
    /// Stop at one of these tokens, separated by commas
    #[arg(long, value_delimiter = ',')]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stop_token_ids: Vec<i64>,
    /// Seed for sampling
    #[arg(long)]
    pub seed: Option<u64>,
    /// Propose this many tokens by prompt lookup and verify them in one pass
    #[arg(long)]
    pub prompt_lookup_num_tokens: Option<usize>,
}

/// The options of the continuation of prompts: those of a chat's answers, and those that have no effect in chats.
#[derive(Debug, Clone, Default, Args, Serialize)]
#[serde(rename_all = "snake_case")]
pub struct CompletionFlags {
    /// The options of a chat's answers.
    #[command(flatten)]
    #[serde(flatten)]
    pub generation: GenerationFlags,
    /// Number of beams in beam search
    #[arg(long)]
    pub num_beams: Option<usize>,
    /// Length penalty of a beam search; values above 0 favour long sequences, values below 0 short ones
    #[arg(long, allow_negative_numbers = true, value_parser = finite)]
    pub length_penalty: Option<f64>,
    /// Number of continuations per prompt
    #[arg(long)]
    pub num_return_sequences: Option<usize>,
    /// Print the log-probability of each token and of this many alternatives
    #[arg(long)]
    pub logprobs: Option<usize>,
    /// Propose this many tokens with the assistant model
    #[arg(long)]
    pub num_assistant_tokens: Option<usize>,
    /// Process prompts in chunks of this many tokens
    #[arg(long)]
    pub prefill_chunk_size: Option<usize>,
}

fn biases(text: &str) -> Result<BTreeMap<i64, f64>, &'static str> {
    serde_json::from_str(text).map_err(|_| "it must be a JSON object such as {\"42\": -5}")
}

/// Parses a number. JSON would turn NaN and infinities into null.
fn finite(text: &str) -> Result<f64, String> {
    let number: f64 = text.parse().map_err(|_| "expected a number".to_owned())?;
    match number.is_finite() {
        true => Ok(number),
        false => Err("expected a finite number".to_owned()),
    }
}

/// Returns the model's configuration with the flags applied, [`GenerationFlags`] or [`CompletionFlags`]. A sampling flag turns
/// sampling on; without a length limit, at most `default_new_tokens` are generated.
pub fn generation_config(
    flags: &impl Serialize,
    files: &ModelFiles,
    default_new_tokens: usize,
) -> Result<GenerationConfig> {
    let mut keys = files.generation_config()?;
    if let Value::Object(mut given) = serde_json::to_value(flags)? {
        given.retain(|_, value| !value.is_null());
        let sampling = ["temperature", "top_k", "top_p", "min_p"];
        if sampling.iter().any(|key| given.contains_key(*key)) {
            given.insert("do_sample".to_owned(), true.into());
        }
        keys.extend(given);
    }
    if !keys.contains_key("max_new_tokens") && !keys.contains_key("max_length") {
        keys.insert("max_new_tokens".to_owned(), default_new_tokens.into());
    }
    if let Some(name) = GenerationConfig::unknown_cache(&keys) {
        print_error_line(format_args!(
            "the model's `cache_implementation` is {name}, which is unknown and is ignored"
        ));
    }
    Ok(GenerationConfig::from_map(&keys)?)
}
