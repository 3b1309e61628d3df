//! The flags for text generation.

use anyhow::{Result, ensure};
use clap::Args;
use overdrive::core::{check_option, print_error_line};
use overdrive::generation::{GenerationConfig, ModelFiles};
use serde::Serialize;
use serde_json::Value;

/// The options of text generation; each flag overrides the key of the same name in the model's generation_config.json.
#[derive(Debug, Clone, Default, Args, Serialize)]
#[serde(rename_all = "snake_case")]
pub struct GenerationFlags {
    /// Maximum number of new tokens
    #[arg(long)]
    pub max_new_tokens: Option<usize>,
    /// Sampling temperature; 0 is greedy
    #[arg(long, allow_negative_numbers = true)]
    pub temperature: Option<f64>,
    /// Sample from the N most likely tokens; 0 is all
    #[arg(long)]
    pub top_k: Option<usize>,
    /// Sample from the smallest set of tokens with this total probability
    #[arg(long, allow_negative_numbers = true)]
    pub top_p: Option<f64>,
    /// Sample from tokens with at least this probability relative to the most likely one
    #[arg(long, allow_negative_numbers = true)]
    pub min_p: Option<f64>,
    /// Penalty by which the scores of earlier tokens are divided; 1 is off
    #[arg(long, allow_negative_numbers = true)]
    pub repetition_penalty: Option<f64>,
    /// Penalty subtracted once from the scores of tokens already generated; 0 is off
    #[arg(long, allow_negative_numbers = true)]
    pub presence_penalty: Option<f64>,
    /// Penalty subtracted from a token's score for each earlier occurrence; 0 is off
    #[arg(long, allow_negative_numbers = true)]
    pub frequency_penalty: Option<f64>,
    /// Never repeat an n-gram of this many tokens
    #[arg(long)]
    pub no_repeat_ngram_size: Option<usize>,
    /// Bias added to token scores, such as {"42": -5, "7": 2.5}
    #[arg(long, value_parser = json)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logit_bias: Option<Value>,
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
    /// Number of beams in beam search
    #[arg(long)]
    pub num_beams: Option<usize>,
    /// Length penalty of a beam search; values above 0 favour long sequences, values below 0 short ones
    #[arg(long, allow_negative_numbers = true)]
    pub length_penalty: Option<f64>,
    /// Number of continuations per prompt
    #[arg(long)]
    pub num_return_sequences: Option<usize>,
    /// Print the log-probability of each token and of this many alternatives
    #[arg(long)]
    pub logprobs: Option<usize>,
    /// Propose this many tokens by prompt lookup and verify them in one pass
    #[arg(long)]
    pub prompt_lookup_num_tokens: Option<usize>,
    /// Propose this many tokens with the assistant model
    #[arg(long)]
    pub num_assistant_tokens: Option<usize>,
    /// Process prompts in chunks of this many tokens
    #[arg(long)]
    pub prefill_chunk_size: Option<usize>,
}

fn json(text: &str) -> Result<Value, serde_json::Error> {
    serde_json::from_str(text)
}

impl GenerationFlags {
    /// Returns the model's configuration with the flags applied. A sampling flag turns sampling on; without a length
    /// limit, at most `default_new_tokens` are generated.
    pub fn config(
        &self,
        files: &ModelFiles,
        default_new_tokens: usize,
    ) -> Result<GenerationConfig> {
        self.check_finite()?;
        let mut keys = files.generation_config()?;
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
        if let Some(name) = GenerationConfig::unknown_cache(&keys) {
            print_error_line(format_args!(
                "the model's `cache_implementation` is {name}, which is unknown and is ignored"
            ));
        }
        Ok(GenerationConfig::from_map(&keys)?)
    }

    /// Checks that no flag is NaN or infinite, which JSON would turn into null.
    fn check_finite(&self) -> Result<()> {
        for (name, value) in [
            ("temperature", self.temperature),
            ("top_p", self.top_p),
            ("min_p", self.min_p),
            ("repetition_penalty", self.repetition_penalty),
            ("presence_penalty", self.presence_penalty),
            ("frequency_penalty", self.frequency_penalty),
            ("length_penalty", self.length_penalty),
        ] {
            let value = value.unwrap_or(0.0);
            check_option(value.is_finite(), name, value, "a finite number")?;
        }
        Ok(())
    }

    /// Checks that no flag is set that has no effect in a program with one sampled answer per conversation and without a
    /// draft model.
    ///
    /// # Errors
    /// With the first such flag.
    pub fn check_for_chat(&self) -> Result<()> {
        for (flag, is_set) in [
            (
                "--num-beams",
                self.num_beams.is_some_and(|beams| beams != 1),
            ),
            ("--length-penalty", self.length_penalty.is_some()),
            (
                "--num-return-sequences",
                self.num_return_sequences.is_some_and(|rows| rows != 1),
            ),
            ("--logprobs", self.logprobs.is_some()),
            (
                "--num-assistant-tokens",
                self.num_assistant_tokens.is_some(),
            ),
            ("--prefill-chunk-size", self.prefill_chunk_size.is_some()),
        ] {
            ensure!(
                !is_set,
                "`{flag}` has no effect in chats; leave it out, or use the example `generate`"
            );
        }
        Ok(())
    }
}
