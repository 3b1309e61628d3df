use std::ops::ControlFlow;
use std::time::Instant;

use overdrive_transformer::CausalLm;
use tch::Tensor;

use crate::cache;
use crate::candidates::Candidates;
use crate::decoder::to_host;
use crate::random::SplitMix64;
use crate::row_text::RowText;
use crate::{
    Choice, Constraint, Error, FinishReason, GenerateOptions, GenerateOutput, GenerateTimings,
    GeneratedToken, GenerationConfig, Result, Sampler, TokenLogprobs, TokenMask,
};

/// What is called with each new token.
pub(crate) type OnToken<'a> = dyn FnMut(GeneratedToken<'_>) -> ControlFlow<()> + 'a;

/// One row of the output: what it has, and whether it goes on.
pub(crate) struct Row<'a> {
    number: usize,
    pub(crate) ids: Vec<i64>,
    pub(crate) prompt: usize,
    /// The length at which the row ends, and why.
    pub(crate) limit: (usize, FinishReason),
    pub(crate) sampler: Sampler,
    constraint: Option<(Box<dyn Constraint>, TokenMask)>,
    text: Option<RowText<'a>>,
    logprobs: Vec<TokenLogprobs>,
    pub(crate) finished: Option<FinishReason>,
}

/// The length at which a row of a prompt of `prompt` tokens ends, and why.
pub(crate) fn limit(
    model: &CausalLm,
    config: &GenerationConfig,
    prompt: usize,
) -> (usize, FinishReason) {
    // A context of n positions gives the token after the n-th as well.
    let room = cache::context(model, config).saturating_add(1);
    let length = prompt + config.new_tokens(prompt);
    if length > room {
        (room, FinishReason::ContextFull)
    } else {
        (length, FinishReason::Length)
    }
}

impl Row<'_> {
    /// How many tokens it has written.
    pub(crate) fn new_tokens(&self) -> usize {
        self.ids.len() - self.prompt
    }

    /// Chooses the next token from its logits `(V,)`, which are changed.
    pub(crate) fn choose(&mut self, scores: &mut [f32]) -> Result<Choice> {
        let new = self.new_tokens();
        let allowed = allowed(&mut self.constraint)?;
        self.sampler.choose(scores, &self.ids, new, allowed)
    }

    /// Checks a proposed token against its logits, which are changed: the token to take, and whether it
    /// is the proposed one.
    pub(crate) fn verify(
        &mut self,
        scores: &mut [f32],
        token: i64,
        proposal: Option<&Candidates>,
    ) -> Result<(Choice, bool)> {
        let new = self.new_tokens();
        let allowed = allowed(&mut self.constraint)?;
        self.sampler.prepare(scores, &self.ids, new, allowed)?;
        self.sampler.verify(scores, new, token, proposal)
    }

    /// Takes a chosen token, sees whether the row ends with it, and hands it out.
    pub(crate) fn take(
        &mut self,
        choice: Choice,
        config: &GenerationConfig,
        on_token: &mut OnToken<'_>,
    ) -> Result<()> {
        let id = choice.id;
        self.ids.push(id);
        if let Some((constraint, _)) = &mut self.constraint {
            constraint.advance(id)?;
            if constraint.is_finished() {
                self.finished = Some(FinishReason::Constraint);
            }
        }
        if config.eos_token_id.contains(&id) {
            self.finished = Some(FinishReason::EndOfText);
        } else if config.stop_token_ids.contains(&id) {
            self.finished = Some(FinishReason::StopToken);
        }
        if self.ids.len() >= self.limit.0 {
            self.finished.get_or_insert(self.limit.1);
        }
        let mut text = String::new();
        if let Some(stream) = &mut self.text {
            let (piece, stop) = stream.push(id, self.finished.is_some())?;
            text = piece;
            if let Some(number) = stop {
                self.finished = Some(FinishReason::StopString { number });
            }
        }
        self.logprobs.extend(choice.logprobs);
        let token = GeneratedToken {
            row: self.number,
            id,
            text: &text,
            logprobs: self.logprobs.last(),
            finished: self.finished,
        };
        if on_token(token).is_break() {
            self.finished.get_or_insert(FinishReason::Stopped);
        }
        Ok(())
    }
}

/// The tokens that a constraint allows next.
fn allowed(
    constraint: &mut Option<(Box<dyn Constraint>, TokenMask)>,
) -> Result<Option<&TokenMask>> {
    let Some((constraint, mask)) = constraint else {
        return Ok(None);
    };
    mask.clear();
    constraint.allowed(mask)?;
    Ok(Some(mask))
}

/// The rows of a call, and which of them are still in the batch.
pub(crate) struct Rows<'a> {
    config: &'a GenerationConfig,
    pub(crate) rows: Vec<Row<'a>>,
    /// The row at each place of the batch.
    places: Vec<usize>,
    /// All logits of a step, on the host.
    scores: Vec<f32>,
    start: Instant,
}

/// Whether `max_time` has passed since `start`.
pub(crate) fn is_late(config: &GenerationConfig, start: Instant) -> bool {
    config
        .max_time
        .is_some_and(|limit| start.elapsed().as_secs_f64() > limit)
}

impl<'a> Rows<'a> {
    /// `num_return_sequences` rows for each prompt.
    pub(crate) fn new(
        model: &CausalLm,
        prompts: &[Vec<i64>],
        config: &'a GenerationConfig,
        options: &GenerateOptions<'a>,
    ) -> Result<Self> {
        // All rows of one call share a seed, and differ by their number.
        let seed = SplitMix64::entropy();
        let copies = config.num_return_sequences;
        let vocabulary = model.config().vocab_size().unsigned_abs() as usize;
        let mut rows = Vec::with_capacity(prompts.len() * copies);
        for (place, prompt) in prompts.iter().enumerate() {
            for copy in 0..copies {
                let number = rows.len();
                let sampler = match options.seeds.get(place) {
                    None => Sampler::new(config, seed, number)?,
                    // A request with a seed of its own is the same in any batch.
                    Some(&own) => {
                        let config = GenerationConfig {
                            seed: Some(own),
                            ..config.clone()
                        };
                        Sampler::new(&config, own, copy)?
                    }
                };
                let limit = limit(model, config, prompt.len());
                let constraint = options.constraints.get(place);
                rows.push(Row {
                    number,
                    ids: prompt.clone(),
                    prompt: prompt.len(),
                    limit,
                    sampler: sampler.for_row(number),
                    constraint: constraint.map(|c| (c.fork(), TokenMask::new(vocabulary))),
                    text: options
                        .tokenizer
                        .map(|tokenizer| RowText::new(tokenizer, prompt, &config.stop_strings)),
                    logprobs: Vec::new(),
                    finished: (prompt.len() >= limit.0).then_some(limit.1),
                });
            }
        }
        Ok(Rows {
            config,
            places: (0..rows.len()).collect(),
            rows,
            scores: Vec::new(),
            start: Instant::now(),
        })
    }

    pub(crate) fn start(&self) -> Instant {
        self.start
    }

    pub(crate) fn all_finished(&self) -> bool {
        self.rows.iter().all(|row| row.finished.is_some())
    }

    pub(crate) fn generated(&self) -> usize {
        self.rows.iter().map(Row::new_tokens).sum()
    }

    /// What goes into the next step; padding for rows that have ended.
    pub(crate) fn last_tokens(&self) -> Vec<i64> {
        let pad = self.config.pad();
        let last = |place: &usize| match &self.rows[*place] {
            row if row.finished.is_some() => pad,
            row => row.ids.last().copied().unwrap_or(pad),
        };
        self.places.iter().map(last).collect()
    }

    /// Ends all rows where `max_time` has passed.
    pub(crate) fn check_time(&mut self) {
        if is_late(self.config, self.start) {
            for row in &mut self.rows {
                row.finished.get_or_insert(FinishReason::TimeLimit);
            }
        }
    }

    /// Chooses the next token of every row that goes on. `logits (B, 1, V)`.
    pub(crate) fn choose(&mut self, logits: &Tensor, on_token: &mut OnToken<'_>) -> Result<()> {
        let vocabulary = to_host(logits, &mut self.scores)?;
        let chunks = self.scores.chunks_exact_mut(vocabulary);
        for (&place, scores) in self.places.iter().zip(chunks) {
            let row = &mut self.rows[place];
            if row.finished.is_none() {
                let choice = row.choose(scores)?;
                row.take(choice, self.config, on_token)?;
            }
        }
        Ok(())
    }

    /// The places that go on, which are the batch from now on, where some have ended: `freely` at once,
    /// else when they are half of the batch, for leaving copies the cache.
    pub(crate) fn leave(&mut self, freely: bool) -> Option<Vec<usize>> {
        let live: Vec<usize> = (0..self.places.len())
            .filter(|&place| self.rows[self.places[place]].finished.is_none())
            .collect();
        let all = self.places.len();
        let most = if freely { all - 1 } else { all / 2 };
        if live.is_empty() || live.len() > most {
            return None;
        }
        self.places = live.iter().map(|&place| self.places[place]).collect();
        Some(live)
    }

    pub(crate) fn into_output(self, timings: GenerateTimings) -> GenerateOutput {
        let mut output = GenerateOutput::empty(timings);
        let mut logprobs = Vec::new();
        for row in self.rows {
            output.prompt_lengths.push(row.prompt);
            output
                .finish_reasons
                .push(row.finished.unwrap_or(FinishReason::Length));
            output.sequences.push(row.ids);
            output.texts.extend(row.text.map(RowText::into_text));
            logprobs.push(row.logprobs);
        }
        output.logprobs = self.config.logprobs.map(|_| logprobs);
        output
    }
}

/// Checks what goes with the prompts.
pub(crate) fn check_options(
    prompts: usize,
    config: &GenerationConfig,
    options: &GenerateOptions<'_>,
) -> Result<()> {
    if !config.stop_strings.is_empty() && options.tokenizer.is_none() {
        return Err(Error::Missing {
            key: "stop_strings",
            what: "a tokenizer to know the text",
            option: "tokenizer",
        });
    }
    if config.num_beams > 1 && options.assistant_model.is_some() {
        return Err(Error::Incompatible {
            first: "assistant_model",
            second: "num_beams above 1",
            why: "a draft continues one text, not a search",
        });
    }
    for (what, given) in [
        ("seeds", options.seeds.len()),
        ("constraints", options.constraints.len()),
    ] {
        if given != 0 && given != prompts {
            return Err(Error::WrongCount {
                what,
                given,
                prompts,
            });
        }
    }
    Ok(())
}
