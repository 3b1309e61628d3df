use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use overdrive_kv_cache::{GrowingCache, KvCache};
use overdrive_transformer::{CausalLm, ForwardInput, Logits};
use tch::{Device, Kind, Tensor};

use crate::prompts::{PaddedPrompts, check};
use crate::random::SplitMix64;
use crate::{GenerationConfig, Result, Sampler};

/// Why a row ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FinishReason {
    /// It came to one of `eos_token_id`, which is the last token of its sequence.
    EndOfText,
    /// It has as many tokens as were asked for.
    Length,
    /// The model's context is full.
    ContextFull,
    /// The caller stopped it.
    Stopped,
}

/// What [`generate`] returns.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct GenerateOutput {
    /// Prompt and continuation of each row, without padding.
    pub sequences: Vec<Vec<i64>>,
    /// How many tokens of each are prompt.
    pub prompt_lengths: Vec<usize>,
    /// Why each row ended.
    pub finish_reasons: Vec<FinishReason>,
    /// How long it took.
    pub timings: GenerateTimings,
}

impl GenerateOutput {
    /// The continuation of row `row`; empty where there is no such row.
    pub fn new_tokens(&self, row: usize) -> &[i64] {
        match (self.sequences.get(row), self.prompt_lengths.get(row)) {
            (Some(sequence), Some(&prompt)) => &sequence[prompt..],
            _ => &[],
        }
    }
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct GeneratedToken {
    /// The row of the batch that it continues.
    pub row: usize,
    /// Its id.
    pub id: i64,
}

/// Continues `prompts`, a batch of token ids of any lengths, as `config` says.
///
/// Rows of different lengths are padded on the left; each row is what it would be alone, up to the
/// rounding of a wider batch, with a random stream of its own. No gradient is recorded.
///
/// # Errors
/// Before anything is computed: when there is no prompt, or one is empty, longer than the model's
/// context or has an id outside the vocabulary, or when a value of `config` is out of its range. Later:
/// when the model fails, or its logits are no numbers.
pub fn generate(
    model: &CausalLm,
    prompts: &[Vec<i64>],
    config: &GenerationConfig,
) -> Result<GenerateOutput> {
    generate_with(model, prompts, config, |_| ControlFlow::Continue(()))
}

/// As [`generate`], and calls `on_token` with each new token, end of text included. Where it breaks,
/// the token's row ends; the others go on.
///
/// # Errors
/// As [`generate`].
pub fn generate_with(
    model: &CausalLm,
    prompts: &[Vec<i64>],
    config: &GenerationConfig,
    mut on_token: impl FnMut(GeneratedToken) -> ControlFlow<()>,
) -> Result<GenerateOutput> {
    config.validate()?;
    check(prompts, model.config())?;
    let _no_grad = tch::no_grad_guard();
    let start = Instant::now();

    let mut rows = Rows::new(model, prompts, config)?;
    let mut decoder = Decoder::new(model, prompts, config)?;
    let mut prefill = start.elapsed();
    if !rows.all_finished() {
        let logits = decoder.prefill()?;
        rows.choose(&logits, &mut on_token)?;
        prefill = start.elapsed();
    }
    let first_tokens = rows.generated();
    while !rows.all_finished() {
        let logits = decoder.step(&rows.last_tokens())?;
        rows.choose(&logits, &mut on_token)?;
    }
    let timings = GenerateTimings {
        prefill,
        prefill_tokens: prompts.iter().map(Vec::len).sum(),
        decode: start.elapsed() - prefill,
        decode_tokens: rows.generated() - first_tokens,
    };
    Ok(rows.into_output(timings))
}

/// The rows of a batch: what each has, and whether it goes on.
struct Rows<'a> {
    config: &'a GenerationConfig,
    rows: Vec<Row>,
}

struct Row {
    ids: Vec<i64>,
    prompt: usize,
    /// The length at which the row ends, and why.
    limit: (usize, FinishReason),
    sampler: Sampler,
    finished: Option<FinishReason>,
}

impl<'a> Rows<'a> {
    fn new(model: &CausalLm, prompts: &[Vec<i64>], config: &'a GenerationConfig) -> Result<Self> {
        // A context of n positions gives the token after the n-th as well.
        let room = model.config().max_position_embeddings().unsigned_abs() as usize + 1;
        // All rows of one call share a seed, and differ by their number.
        let seed = SplitMix64::entropy();
        let rows = prompts
            .iter()
            .enumerate()
            .map(|(row, prompt)| {
                let length = prompt.len() + config.new_tokens(prompt.len());
                let limit = if length > room {
                    (room, FinishReason::ContextFull)
                } else {
                    (length, FinishReason::Length)
                };
                Ok(Row {
                    ids: prompt.clone(),
                    prompt: prompt.len(),
                    limit,
                    sampler: Sampler::new(config, seed, row)?,
                    finished: (prompt.len() >= limit.0).then_some(limit.1),
                })
            })
            .collect::<Result<_>>()?;
        Ok(Rows { config, rows })
    }

    fn all_finished(&self) -> bool {
        self.rows.iter().all(|row| row.finished.is_some())
    }

    fn generated(&self) -> usize {
        self.rows.iter().map(|row| row.ids.len() - row.prompt).sum()
    }

    /// What goes into the next step; padding for rows that have ended.
    fn last_tokens(&self) -> Vec<i64> {
        let pad = self.config.pad();
        let last = |row: &Row| match row.finished {
            Some(_) => pad,
            None => row.ids.last().copied().unwrap_or(pad),
        };
        self.rows.iter().map(last).collect()
    }

    /// Chooses the next token of every row that goes on. `logits (B, 1, V)`.
    fn choose(
        &mut self,
        logits: &Tensor,
        on_token: &mut impl FnMut(GeneratedToken) -> ControlFlow<()>,
    ) -> Result<()> {
        let vocabulary = logits.size()[2] as usize;
        let host = logits
            .f_to_device(Device::Cpu)?
            .f_to_kind(Kind::Float)?
            .f_reshape([-1])?;
        let mut scores = Vec::<f32>::try_from(host)?;
        let rows = self
            .rows
            .iter_mut()
            .zip(scores.chunks_exact_mut(vocabulary));
        for (number, (row, scores)) in rows.enumerate() {
            if row.finished.is_some() {
                continue;
            }
            let new = row.ids.len() - row.prompt;
            let id = row.sampler.next_token(scores, &row.ids, new)?;
            row.ids.push(id);
            if self.config.eos_token_id.contains(&id) {
                row.finished = Some(FinishReason::EndOfText);
            } else if row.ids.len() >= row.limit.0 {
                row.finished = Some(row.limit.1);
            }
            if on_token(GeneratedToken { row: number, id }).is_break() {
                row.finished.get_or_insert(FinishReason::Stopped);
            }
        }
        Ok(())
    }

    fn into_output(self, timings: GenerateTimings) -> GenerateOutput {
        let mut output = GenerateOutput {
            sequences: Vec::new(),
            prompt_lengths: Vec::new(),
            finish_reasons: Vec::new(),
            timings,
        };
        for row in self.rows {
            output.prompt_lengths.push(row.prompt);
            output
                .finish_reasons
                .push(row.finished.unwrap_or(FinishReason::Length));
            output.sequences.push(row.ids);
        }
        output
    }
}

/// The model with what it has read.
struct Decoder<'a> {
    model: &'a CausalLm,
    prompts: PaddedPrompts,
    memory: Memory,
}

/// How earlier tokens are remembered.
enum Memory {
    Cache(GrowingCache),
    /// All ids so far, `(B, S)`, to be read again at each step.
    Text(Tensor),
}

impl<'a> Decoder<'a> {
    fn new(model: &'a CausalLm, prompts: &[Vec<i64>], config: &GenerationConfig) -> Result<Self> {
        let context = model.config().max_position_embeddings();
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
        let wanted = (longest + config.new_tokens(longest)) as i64;
        let prompts = PaddedPrompts::new(prompts, config.pad(), context, model.device())?;
        let memory = if config.use_cache {
            let capacity = wanted.min(context);
            Memory::Cache(GrowingCache::with_capacity(model.num_layers(), capacity))
        } else {
            Memory::Text(prompts.ids.shallow_clone())
        };
        Ok(Decoder {
            model,
            prompts,
            memory,
        })
    }

    /// Reads the prompts; returns the logits after them, `(B, 1, V)`.
    fn prefill(&mut self) -> Result<Tensor> {
        let ids = self.prompts.ids.shallow_clone();
        self.forward(&ids)
    }

    /// Reads one more token a row; returns the logits after it.
    fn step(&mut self, tokens: &[i64]) -> Result<Tensor> {
        let tokens = Tensor::f_from_slice(tokens)?
            .f_unsqueeze(1)?
            .f_to_device(self.model.device())?;
        let ids = match &mut self.memory {
            Memory::Cache(_) => tokens,
            Memory::Text(text) => {
                *text = Tensor::f_cat(&[&*text, &tokens], 1)?;
                text.shallow_clone()
            }
        };
        self.forward(&ids)
    }

    fn forward(&mut self, ids: &Tensor) -> Result<Tensor> {
        let tokens = ids.size()[1];
        let past = match &self.memory {
            Memory::Cache(cache) => cache.len(),
            Memory::Text(_) => 0,
        };
        let positions = self.prompts.positions(past, tokens)?;
        let mask = self.prompts.mask(past + tokens)?;
        let mut input = ForwardInput::new(ids).with_logits(Logits::Last);
        input.position_ids = positions.as_ref();
        input.attention_mask = mask.as_ref();
        if let Memory::Cache(cache) = &mut self.memory {
            input.cache = Some(cache);
        }
        Ok(self.model.forward(input)?)
    }
}
