use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

use overdrive_core::random::entropy;
use tch::Tensor;

use crate::decoder::to_host;
use crate::device_sampling::{Ahead, DeviceStep, LookAhead, RowLogits, RowPlan, stays_on_device};
use crate::finish_reason::{end_after, is_late, limit};
use crate::row_text::RowText;
use crate::sampler::cuts::Candidates;
use crate::{
    Choice, Constraint, Error, FinishReason, GenerateOptions, GenerateOutput, GenerateTimings,
    GeneratedToken, GenerationConfig, GenerationModel, Result, Sampler, TokenLogprobs, TokenMask,
};

/// The callback of each new token.
pub(crate) type OnToken<'a> = dyn FnMut(GeneratedToken<'_>) -> ControlFlow<()> + 'a;

/// The state of a row apart from its tokens. It chooses the next token and decides whether the row ends with that
/// token.
#[derive(Debug)]
pub(crate) struct RowState<'t> {
    /// The number of tokens of the prompt.
    pub(crate) prompt: usize,
    /// The length at which the row ends, and the reason.
    pub(crate) limit: (usize, FinishReason),
    pub(crate) sampler: Sampler,
    pub(crate) constraint: Option<MaskedConstraint>,
    pub(crate) text: Option<RowText<'t>>,
    pub(crate) logprobs: Vec<TokenLogprobs>,
}

/// A token that a row has taken.
#[derive(Debug)]
pub(crate) struct ChosenToken {
    pub(crate) id: i64,
    /// The text that became certain with this token.
    pub(crate) text: String,
    pub(crate) logprobs: Option<TokenLogprobs>,
    /// The reason, if the row ends with this token.
    pub(crate) finished: Option<FinishReason>,
}

impl RowState<'_> {
    /// Returns the plan to choose the token after `ids` on a device, from row `source` of the logits.
    pub(crate) fn plan(
        &mut self,
        source: usize,
        vocabulary: usize,
        ids: &[i64],
    ) -> Result<RowPlan> {
        let allowed = allowed(&mut self.constraint)?;
        let history = (ids, ids.len() - self.prompt);
        Ok(self.sampler.plan(source, vocabulary, history, allowed))
    }

    /// Chooses the token after `ids`, prompt included, from its logits.
    pub(crate) fn choose(&mut self, logits: RowLogits<'_>, ids: &[i64]) -> Result<Choice> {
        let new = ids.len() - self.prompt;
        match logits {
            RowLogits::Host(scores) => {
                let allowed = allowed(&mut self.constraint)?;
                self.sampler.choose(scores, ids, new, allowed)
            }
            // The plan holds the allowed tokens.
            RowLogits::Device(step, row) => self.sampler.choose_on(step, row, (ids, new)),
        }
    }

    /// Verifies a token that was proposed to follow `ids` against its logits, which are changed; returns the token to
    /// take, and `true` if it is the proposed one.
    pub(crate) fn verify(
        &mut self,
        scores: &mut [f32],
        ids: &[i64],
        token: i64,
        proposal: Option<&Candidates>,
    ) -> Result<(Choice, bool)> {
        let new = ids.len() - self.prompt;
        let allowed = allowed(&mut self.constraint)?;
        self.sampler.prepare(scores, ids, new, allowed)?;
        self.sampler.verify(scores, new, token, proposal)
    }

    /// Records a chosen token, after which the row has `length` tokens, and checks whether the row ends with it. The
    /// row also ends if its time is over (`is_late`).
    pub(crate) fn push(
        &mut self,
        choice: Choice,
        length: usize,
        is_late: bool,
    ) -> Result<ChosenToken> {
        let (id, config) = (choice.id, self.sampler.config());
        let mut finished = end_after(id, length, self.limit, config, &mut self.constraint)?;
        if is_late {
            finished.get_or_insert(FinishReason::TimeLimit);
        }
        let mut text = String::new();
        if let Some(stream) = &mut self.text {
            // Checked last: a final token releases the text that was held back, and a stop string
            // in that text takes precedence over the other reasons.
            let (piece, stop) = stream.push(id, finished)?;
            text = piece;
            if let Some(number) = stop {
                finished = Some(FinishReason::StopString { number });
            }
        }
        self.logprobs.extend(choice.logprobs.clone());
        Ok(ChosenToken {
            id,
            text,
            logprobs: choice.logprobs,
            finished,
        })
    }
}

/// A row of the output.
pub(crate) struct Row<'a> {
    number: usize,
    pub(crate) ids: Vec<i64>,
    pub(crate) state: RowState<'a>,
    pub(crate) finished: Option<FinishReason>,
}

/// Returns the number of tokens of a row for which the model has room.
pub(crate) fn room<M: GenerationModel + ?Sized>(model: &M, config: &GenerationConfig) -> usize {
    // The last of n positions still gives logits, so n + 1 tokens are possible.
    model.max_positions(config).saturating_add(1)
}

impl Row<'_> {
    /// Returns the number of new tokens.
    pub(crate) fn new_tokens(&self) -> usize {
        self.ids.len() - self.state.prompt
    }

    /// Appends a chosen token, checks whether the row ends with it, and hands it out.
    pub(crate) fn push(&mut self, choice: Choice, on_token: &mut OnToken<'_>) -> Result<()> {
        self.ids.push(choice.id);
        let chosen = self.state.push(choice, self.ids.len(), false)?;
        self.finished = chosen.finished;
        let token = GeneratedToken {
            row: self.number,
            id: chosen.id,
            text: &chosen.text,
            logprobs: chosen.logprobs.as_ref(),
            finished: self.finished,
        };
        if on_token(token).is_break() {
            self.finished.get_or_insert(FinishReason::Stopped);
        }
        Ok(())
    }
}

/// A constraint, and the tokens that it [`allowed`] last.
pub(crate) type MaskedConstraint = (Box<dyn Constraint>, TokenMask);

/// Returns an independent copy of a constraint.
pub(crate) fn fork((constraint, mask): &MaskedConstraint) -> MaskedConstraint {
    (constraint.fork(), mask.clone())
}

/// Advances a constraint by the token `id`. Returns `false`, and leaves the constraint unchanged, if it does not
/// allow the token: a token that `config` forces is chosen nevertheless.
pub(crate) fn advance(
    (constraint, mask): &mut MaskedConstraint,
    id: i64,
    config: &GenerationConfig,
) -> Result<bool> {
    let may_be_forced =
        config.forced_bos_token_id == Some(id) || config.forced_eos_token_id.contains(&id);
    if may_be_forced && !mask.is_allowed(id) {
        return Ok(false);
    }
    constraint.advance(id)?;
    Ok(true)
}

/// Returns the tokens that a constraint allows next.
pub(crate) fn allowed(constraint: &mut Option<MaskedConstraint>) -> Result<Option<&TokenMask>> {
    let Some((constraint, mask)) = constraint else {
        return Ok(None);
    };
    mask.clear();
    constraint.allowed(mask)?;
    Ok(Some(mask))
}

/// The rows of a call, and the indices of those that are still in the batch.
pub(crate) struct Rows<'a> {
    config: &'a GenerationConfig,
    pub(crate) rows: Vec<Row<'a>>,
    /// The row at each index of the batch.
    batch: Vec<usize>,
    /// The logits of a step, on the host.
    scores: Vec<f32>,
    /// The token that finished rows read.
    pad: i64,
    look_ahead: LookAhead,
    start: Instant,
}

impl<'a> Rows<'a> {
    /// Returns `num_return_sequences` rows for each prompt.
    pub(crate) fn new<M: GenerationModel + ?Sized>(
        model: &M,
        prompts: &[Vec<i64>],
        config: &'a GenerationConfig,
        options: &GenerateOptions<'a>,
    ) -> Result<Self> {
        // All rows of one call share a seed, and differ by their random streams.
        let seed = entropy();
        let copies = config.num_return_sequences;
        let vocabulary = model.num_logits().unsigned_abs() as usize;
        let shared = Arc::new(config.clone());
        let mut rows = Vec::with_capacity(prompts.len() * copies);
        for (index, prompt) in prompts.iter().enumerate() {
            for copy in 0..copies {
                let number = rows.len();
                let sampler = match options.seeds.get(index) {
                    None => Sampler::shared(Arc::clone(&shared), seed, number)?,
                    // A prompt with its own seed draws the same numbers in any batch.
                    Some(&own) => {
                        let config = GenerationConfig {
                            seed: Some(own),
                            ..config.clone()
                        };
                        Sampler::new(&config, own, copy)?
                    }
                };
                let limit = limit(config, prompt.len(), room(model, config));
                let constraint = options.constraints.get(index);
                rows.push(Row {
                    number,
                    ids: prompt.clone(),
                    state: RowState {
                        prompt: prompt.len(),
                        limit,
                        sampler: sampler.for_row(number),
                        constraint: constraint.map(|c| (c.fork(), TokenMask::new(vocabulary))),
                        text: options
                            .tokenizer
                            .map(|tokenizer| RowText::new(tokenizer, prompt, config)),
                        logprobs: Vec::new(),
                    },
                    finished: (prompt.len() >= limit.0).then_some(limit.1),
                });
            }
        }
        Ok(Rows {
            config,
            batch: (0..rows.len()).collect(),
            rows,
            scores: Vec::new(),
            pad: config.pad(model.num_logits()),
            look_ahead: LookAhead::default(),
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

    /// Returns the indices of the batch.
    pub(crate) fn in_order(&self) -> Vec<usize> {
        (0..self.batch.len()).collect()
    }

    /// Returns the input of the next step; padding for rows that have ended.
    pub(crate) fn last_tokens(&self) -> Vec<i64> {
        let pad = self.pad;
        let last = |index: &usize| match &self.rows[*index] {
            row if row.finished.is_some() => pad,
            row => row.ids.last().copied().unwrap_or(pad),
        };
        self.batch.iter().map(last).collect()
    }

    /// Ends all rows if `max_time` has passed.
    pub(crate) fn check_time(&mut self) {
        if is_late(self.config, self.start) {
            for row in &mut self.rows {
                row.finished.get_or_insert(FinishReason::TimeLimit);
            }
        }
    }

    /// Chooses the next token of every unfinished row. `logits (B, 1, V)`.
    pub(crate) fn choose(&mut self, logits: &Tensor, on_token: &mut OnToken<'_>) -> Result<()> {
        if stays_on_device(logits) {
            return self.choose_on_device(logits, on_token, None).map(|_| ());
        }
        let vocabulary = to_host(logits, &mut self.scores)?;
        let chunks = self.scores.chunks_exact_mut(vocabulary);
        for (&index, scores) in self.batch.iter().zip(chunks) {
            let row = &mut self.rows[index];
            if row.finished.is_none() {
                let choice = row.state.choose(RowLogits::Host(scores), &row.ids)?;
                row.push(choice, on_token)?;
            }
        }
        Ok(())
    }

    /// Chooses tokens as [`choose`](Rows::choose) does. If the logits are on a device, which finds the expected token of
    /// every row of the batch, `ahead` is called with these tokens, i64 `(B, 1)`, before the host waits. Returns `false` if
    /// the rows chose other tokens.
    pub(crate) fn choose_ahead(
        &mut self,
        logits: &Tensor,
        on_token: &mut OnToken<'_>,
        ahead: Option<Ahead<'_>>,
    ) -> Result<bool> {
        if !stays_on_device(logits) {
            return self.choose(logits, on_token).map(|()| true);
        }
        let ahead = ahead.filter(|_| self.look_ahead.is_wanted());
        let as_expected = self.choose_on_device(logits, on_token, ahead)?;
        if !as_expected {
            self.look_ahead.missed();
        }
        Ok(as_expected)
    }

    fn choose_on_device(
        &mut self,
        logits: &Tensor,
        on_token: &mut OnToken<'_>,
        ahead: Option<Ahead<'_>>,
    ) -> Result<bool> {
        let vocabulary = logits.size().last().copied().unwrap_or(0);
        let vocabulary = vocabulary.unsigned_abs() as usize;
        let rows = self.batch.iter().copied().enumerate();
        let live: Vec<(usize, usize)> = rows
            .filter(|(_, index)| self.rows[*index].finished.is_none())
            .collect();
        let mut plans = Vec::with_capacity(live.len());
        for &(source, index) in &live {
            let row = &mut self.rows[index];
            plans.push(Ok(row.state.plan(source, vocabulary, &row.ids)?));
        }
        let ahead = ahead.filter(|_| live.len() == self.batch.len());
        let step = DeviceStep::before_reading(logits, vocabulary, plans, ahead)?;
        let expected = step.expected();
        let mut as_expected = true;
        for (planned, (_, index)) in live.into_iter().enumerate() {
            let row = &mut self.rows[index];
            let logits = RowLogits::Device(&step, planned);
            let choice = row.state.choose(logits, &row.ids)?;
            as_expected &= (expected.as_ref()).is_none_or(|tokens| tokens[planned] == choice.id);
            row.push(choice, on_token)?;
        }
        Ok(as_expected)
    }

    /// Removes finished rows from the batch: at once if that is free, else when at least half of the
    /// rows are finished, because removing rows copies the cache. Returns the indices of the
    /// remaining rows if some were removed.
    pub(crate) fn drop_finished(&mut self, free: bool) -> Option<Vec<usize>> {
        let live: Vec<usize> = (0..self.batch.len())
            .filter(|&index| self.rows[self.batch[index]].finished.is_none())
            .collect();
        let all = self.batch.len();
        let most = if free { all - 1 } else { all / 2 };
        // An empty batch is not a shape that every kernel supports; the caller stops before it.
        if live.is_empty() || live.len() > most {
            return None;
        }
        self.batch = live.iter().map(|&index| self.batch[index]).collect();
        Some(live)
    }

    pub(crate) fn into_output(self, timings: GenerateTimings) -> GenerateOutput {
        let mut output = GenerateOutput::empty(timings);
        let mut logprobs = Vec::new();
        for row in self.rows {
            output.prompt_lengths.push(row.state.prompt);
            output
                .finish_reasons
                .push(row.finished.unwrap_or(FinishReason::Length));
            output.sequences.push(row.ids);
            output.texts.extend(row.state.text.map(RowText::into_text));
            logprobs.push(row.state.logprobs);
        }
        output.logprobs = self.config.logprobs.map(|_| logprobs);
        output
    }
}

/// Checks the options against the prompts.
pub(crate) fn check_options(
    prompts: usize,
    config: &GenerationConfig,
    options: &GenerateOptions<'_>,
) -> Result<()> {
    if !config.stop_strings.is_empty() && options.tokenizer.is_none() {
        return Err(Error::Missing {
            key: "stop_strings",
            what: "a tokenizer to decode the tokens",
            option: "tokenizer",
        });
    }
    if config.num_beams > 1 && options.assistant_model.is_some() {
        return Err(Error::Incompatible {
            first: "assistant_model",
            second: "num_beams above 1",
            why: "a draft model continues one sequence per row",
        });
    }
    for (what, given) in [
        ("seeds", options.seeds.len()),
        ("constraints", options.constraints.len()),
        ("images", options.images.len()),
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
