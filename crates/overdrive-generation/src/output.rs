use std::time::Duration;

use crate::TokenLogprobs;

/// Why a row ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FinishReason {
    /// It came to one of `eos_token_id`, which is the last token of its sequence.
    EndOfText,
    /// It came to one of `stop_token_ids`, which is the last token of its sequence.
    StopToken,
    /// It wrote one of `stop_strings`.
    StopString {
        /// Which of them, counted from 0.
        number: usize,
    },
    /// Its constraint allows nothing further.
    Constraint,
    /// It has as many tokens as were asked for.
    Length,
    /// The model's context is full.
    ContextFull,
    /// `max_time` has passed.
    TimeLimit,
    /// The caller stopped it.
    Stopped,
}

/// What [`generate`](crate::generate()) returns: `num_return_sequences` rows for each prompt, those of one
/// prompt side by side.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct GenerateOutput {
    /// Prompt and continuation of each row, without padding.
    pub sequences: Vec<Vec<i64>>,
    /// How many tokens of each are prompt.
    pub prompt_lengths: Vec<usize>,
    /// Why each row ended.
    pub finish_reasons: Vec<FinishReason>,
    /// The continuations as texts, without special tokens and cut before a stop string; empty where no
    /// tokenizer was given.
    pub texts: Vec<String>,
    /// Of each new token of each row, where `logprobs` asks for them.
    pub logprobs: Option<Vec<Vec<TokenLogprobs>>>,
    /// Of a beam search: the sum of log-probabilities of each row over its length to the power of
    /// `length_penalty`.
    pub sequence_scores: Option<Vec<f32>>,
    /// Of a speculation: how much of it was right.
    pub speculation: Option<SpeculationStatistics>,
    /// How long it took.
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

    /// The continuation of row `row`; empty where there is no such row.
    pub fn new_tokens(&self, row: usize) -> &[i64] {
        match (self.sequences.get(row), self.prompt_lengths.get(row)) {
            (Some(sequence), Some(&prompt)) => &sequence[prompt..],
            _ => &[],
        }
    }
}

/// What came of proposed tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct SpeculationStatistics {
    /// Forward passes of the model after the prompts.
    pub rounds: usize,
    /// Tokens that were proposed.
    pub proposed: usize,
    /// Proposed tokens that were taken.
    pub accepted: usize,
}

/// Where the time of a generation went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct GenerateTimings {
    /// Reading the prompts, and choosing the first token of each row.
    pub prefill: Duration,
    /// Tokens of all prompts, padding not counted.
    pub prefill_tokens: usize,
    /// All that came after.
    pub decode: Duration,
    /// Tokens chosen in that time: all but the first of each row.
    pub decode_tokens: usize,
}

impl GenerateTimings {
    /// Prompt tokens read a second.
    pub fn prefill_tokens_per_second(&self) -> f64 {
        rate(self.prefill_tokens, self.prefill)
    }

    /// Tokens generated a second over all rows, the first of each aside.
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

/// A token as it comes.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct GeneratedToken<'a> {
    /// The row of the output that it continues.
    pub row: usize,
    /// Its id.
    pub id: i64,
    /// The text that has become certain with it: whole characters, and nothing that may still become a
    /// stop string. Empty without a tokenizer.
    pub text: &'a str,
    /// Its log-probability, where `logprobs` asks for it.
    pub logprobs: Option<&'a TokenLogprobs>,
    /// Whether it is the last of its row, and why.
    pub finished: Option<FinishReason>,
}
