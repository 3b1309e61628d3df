use std::time::Duration;

use crate::{FinishReason, TokenLogprobs};

/// The output of [`generate`](crate::generate()): `num_return_sequences` rows for each prompt, those of
/// one prompt side by side.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct GenerateOutput {
    /// The prompt and continuation of each row, without padding.
    pub sequences: Vec<Vec<i64>>,
    /// The number of prompt tokens of each row.
    pub prompt_lengths: Vec<usize>,
    /// The finish reason of each row.
    pub finish_reasons: Vec<FinishReason>,
    /// The continuations as text, without special tokens and the end-of-text or stop token, and cut before a stop
    /// string; empty without a tokenizer.
    pub texts: Vec<String>,
    /// The log-probabilities of each new token of each row, if `logprobs` asks for them.
    pub logprobs: Option<Vec<Vec<TokenLogprobs>>>,
    /// The scores of a beam search: the sum of log-probabilities of each row divided by its length to
    /// the power of `length_penalty`. If a prompt has fewer continuations than `num_return_sequences`, the other rows
    /// repeat some, with a score from a sum below -10^8; transformers pads them instead.
    pub sequence_scores: Option<Vec<f32>>,
    /// The counters of a speculation.
    pub speculation: Option<SpeculationStatistics>,
    /// The times.
    pub timings: GenerateTimings,
}

impl GenerateOutput {
    pub(crate) fn empty(timings: GenerateTimings) -> GenerateOutput {
        GenerateOutput {
            sequences: Vec::new(),
            prompt_lengths: Vec::new(),
            finish_reasons: Vec::new(),
            texts: Vec::new(),
            logprobs: None,
            sequence_scores: None,
            speculation: None,
            timings,
        }
    }

    /// Returns the continuation of row `row`; empty if there is no such row.
    pub fn new_tokens(&self, row: usize) -> &[i64] {
        match (self.sequences.get(row), self.prompt_lengths.get(row)) {
            (Some(sequence), Some(&prompt)) => &sequence[prompt..],
            _ => &[],
        }
    }
}

/// The counters of speculative decoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct SpeculationStatistics {
    /// The forward passes of the model after the prompts.
    pub rounds: usize,
    /// The proposed tokens.
    pub proposed: usize,
    /// The accepted tokens.
    pub accepted: usize,
}

/// The times of a generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct GenerateTimings {
    /// The time of reading the prompts and choosing the first token of each row.
    pub prefill: Duration,
    /// The tokens of all prompts, without padding.
    pub prefill_tokens: usize,
    /// The time after that.
    pub decode: Duration,
    /// The tokens generated in that time: all but the first of each row.
    pub decode_tokens: usize,
}

impl GenerateTimings {
    /// Returns the prompt tokens read per second.
    pub fn prefill_tokens_per_second(&self) -> f64 {
        rate(self.prefill_tokens, self.prefill)
    }

    /// Returns the tokens generated per second over all rows, without the first of each.
    pub fn decode_tokens_per_second(&self) -> f64 {
        rate(self.decode_tokens, self.decode)
    }
}

impl std::fmt::Display for GenerateTimings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (prefill, decode) = (
            self.prefill_tokens_per_second(),
            self.decode_tokens_per_second(),
        );
        write!(
            f,
            "prefill {} tokens at {prefill:.0} tokens/s, ",
            self.prefill_tokens
        )?;
        write!(
            f,
            "decode {} tokens at {decode:.1} tokens/s",
            self.decode_tokens
        )
    }
}

fn rate(tokens: usize, time: Duration) -> f64 {
    if tokens == 0 {
        0.0
    } else {
        tokens as f64 / time.as_secs_f64().max(1e-9)
    }
}

/// A token as it is generated.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct GeneratedToken<'a> {
    /// The row of the output that it continues.
    pub row: usize,
    /// The token id.
    pub id: i64,
    /// The text that is certain with it: whole characters, and no beginning of a stop string. Empty
    /// without a tokenizer.
    pub text: &'a str,
    /// The log-probability of the token, if `logprobs` asks for it.
    pub logprobs: Option<&'a TokenLogprobs>,
    /// The finish reason, if it is the last token of its row.
    pub finished: Option<FinishReason>,
}
