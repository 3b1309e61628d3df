//! The flags of the examples that generate.

use std::path::Path;

use anyhow::Result;
use clap::Args;
use overdrive::generation::GenerationConfig;
use serde::Serialize;
use serde_json::{Map, Value};

/// How text is generated; each flag is the key of generation_config.json with the same name, and
/// wins over the folder's.
#[derive(Debug, Clone, Default, Args, Serialize)]
#[serde(rename_all = "snake_case")]
pub struct GenerationFlags {
    /// Stop after so many tokens
    #[arg(long)]
    pub max_new_tokens: Option<usize>,
    /// 0 takes the likeliest token; higher is more varied
    #[arg(long)]
    pub temperature: Option<f64>,
    /// Sample among so many of the likeliest tokens; 0 is all
    #[arg(long)]
    pub top_k: Option<usize>,
    /// Sample among the fewest tokens with this probability together
    #[arg(long)]
    pub top_p: Option<f64>,
    /// Sample among tokens at least so likely, relative to the likeliest
    #[arg(long)]
    pub min_p: Option<f64>,
    /// Divides the scores of tokens that are there already; 1 is off
    #[arg(long)]
    pub repetition_penalty: Option<f64>,
    /// Taken from the scores of generated tokens; 0 is off
    #[arg(long, allow_negative_numbers = true)]
    pub presence_penalty: Option<f64>,
    /// The same for each time that a token was generated
    #[arg(long, allow_negative_numbers = true)]
    pub frequency_penalty: Option<f64>,
    /// No sequence of so many tokens twice
    #[arg(long)]
    pub no_repeat_ngram_size: Option<usize>,
    /// Added to scores, such as {"42": -5, "7": 2.5}
    #[arg(long, value_parser = json)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logit_bias: Option<Value>,
    /// End at this text; may be given several times
    #[arg(long = "stop")]
    #[serde(rename = "stop_strings", skip_serializing_if = "Vec::is_empty")]
    pub stop: Vec<String>,
    /// End at one of these tokens, separated by commas
    #[arg(long, value_delimiter = ',')]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stop_token_ids: Vec<i64>,
    /// The same seed gives the same text
    #[arg(long)]
    pub seed: Option<u64>,
    /// Beams of a beam search
    #[arg(long)]
    pub num_beams: Option<usize>,
    /// Above 0 a beam search likes long texts, below 0 short ones
    #[arg(long, allow_negative_numbers = true)]
    pub length_penalty: Option<f64>,
    /// Continuations of each prompt
    #[arg(long)]
    pub num_return_sequences: Option<usize>,
    /// Log-probabilities of each token and of so many others
    #[arg(long)]
    pub logprobs: Option<usize>,
    /// Guess so many tokens from earlier text and check them together
    #[arg(long)]
    pub prompt_lookup_num_tokens: Option<usize>,
    /// Guess so many tokens by the assistant model
    #[arg(long)]
    pub num_assistant_tokens: Option<usize>,
    /// Read prompts in chunks of so many tokens
    #[arg(long)]
    pub prefill_chunk_size: Option<usize>,
}

fn json(text: &str) -> Result<Value, serde_json::Error> {
    serde_json::from_str(text)
}

impl GenerationFlags {
    /// The folder's configuration with what was given. A flag about sampling asks for sampling, and
    /// without any limit on the length there are at most `default_new_tokens`.
    pub fn config(&self, folder: &Path, default_new_tokens: usize) -> Result<GenerationConfig> {
        let path = folder.join("generation_config.json");
        let mut keys: Map<String, Value> = if path.exists() {
            serde_json::from_str(&std::fs::read_to_string(path)?)?
        } else {
            Map::new()
        };
        if let Value::Object(given) = serde_json::to_value(self)? {
            keys.extend(given.into_iter().filter(|(_, value)| !value.is_null()));
        }
        let sampling = [self.temperature, self.top_p, self.min_p];
        if sampling.iter().any(Option::is_some) || self.top_k.is_some() {
            keys.insert("do_sample".to_owned(), true.into());
        }
        if !keys.contains_key("max_new_tokens") && !keys.contains_key("max_length") {
            keys.insert("max_new_tokens".to_owned(), default_new_tokens.into());
        }
        Ok(GenerationConfig::from_map(&keys)?)
    }
}
