use overdrive_core::random::Generator;

use super::token_scores::{Continuation, Scorer};
use crate::finish_reason::end_after;
use crate::rows::{MaskedConstraint, advance, allowed, fork};
use crate::{EarlyStopping, Error, FinishReason, GenerationConfig, Result};

/// The score of a beam that cannot win: below any sum of log-probabilities, as in transformers.
const IMPOSSIBLE: f32 = -1e9;

/// A running beam.
#[derive(Debug)]
struct Beam {
    ids: Vec<i64>,
    score: f32,
    /// The beam of the previous step that it continues.
    parent: usize,
    constraint: Option<MaskedConstraint>,
    /// The reason why it ended. An ended beam continues, without a chance to win, only if there are too few
    /// other beams.
    ended: Option<FinishReason>,
}

impl Beam {
    /// Returns `true` if the beam can be a result, rather than a filler.
    fn has_chance(&self) -> bool {
        self.score > IMPOSSIBLE / 2.0
    }
}

/// A finished beam.
#[derive(Debug)]
pub(super) struct FinishedBeam {
    pub(super) ids: Vec<i64>,
    pub(super) score: f32,
    pub(super) reason: FinishReason,
}

/// The beam search of one prompt.
pub(super) struct BeamSearch<'a> {
    scorer: Scorer<'a>,
    random: Generator,
    prompt: usize,
    limit: (usize, FinishReason),
    running: Vec<Beam>,
    /// The finished beams, best first, at most `num_beams`.
    finished: Vec<FinishedBeam>,
    /// `true` while a running beam may still beat a finished one.
    improvable: bool,
    done: bool,
}

impl<'a> BeamSearch<'a> {
    pub(super) fn new(
        config: &'a GenerationConfig,
        prompt: &[i64],
        limit: (usize, FinishReason),
        constraint: Option<MaskedConstraint>,
        random: Generator,
        row: usize,
    ) -> Self {
        // All beams are equal at the start, so only the first has a chance: otherwise all of them would
        // find the same continuations.
        let running = (0..config.num_beams).map(|number| Beam {
            ids: prompt.to_vec(),
            score: if number == 0 { 0.0 } else { IMPOSSIBLE },
            parent: number,
            constraint: constraint.as_ref().map(fork),
            ended: None,
        });
        let mut search = BeamSearch {
            running: running.collect(),
            scorer: Scorer::new(config, row),
            random,
            prompt: prompt.len(),
            limit,
            finished: Vec::new(),
            improvable: true,
            done: false,
        };
        if prompt.len() >= limit.0 {
            search.end_with(limit.1);
        }
        search
    }

    pub(super) fn is_done(&self) -> bool {
        self.done
    }

    pub(super) fn prompt(&self) -> usize {
        self.prompt
    }

    /// Returns the rows of the batch that the beams continue; the row of the first beam is `first`.
    pub(super) fn parents(&self, first: usize) -> impl Iterator<Item = usize> {
        self.running.iter().map(move |beam| first + beam.parent)
    }

    /// Returns the tokens to read next, one a beam; those of a finished search do not matter.
    pub(super) fn last_tokens(&self) -> impl Iterator<Item = i64> {
        // A beam begins with its prompt, which is not empty.
        let last = |beam: &Beam| beam.ids.last().copied().unwrap_or(0);
        self.running.iter().map(last)
    }

    /// Ends a search that is not done, because the time is over.
    pub(super) fn end(&mut self) {
        if !self.done {
            self.end_with(FinishReason::TimeLimit);
        }
    }

    /// Ends the search with its running beams. Those with a chance compete with the finished ones, as when a
    /// stopping criterion of transformers ends them; if there are too few, others fill up.
    fn end_with(&mut self, reason: FinishReason) {
        self.done = true;
        for beam in &self.running {
            if beam.has_chance() || self.finished.len() < self.config().num_return_sequences {
                let length = (beam.ids.len() - self.prompt).max(1);
                self.finished.push(FinishedBeam {
                    ids: beam.ids.clone(),
                    score: self.penalized(beam.score, length),
                    reason: beam.ended.unwrap_or(reason),
                });
            }
        }
        self.rank();
    }

    /// Keeps the best finished beams, best first.
    fn rank(&mut self) {
        self.finished.sort_by(|a, b| b.score.total_cmp(&a.score));
        self.finished.truncate(self.config().num_beams);
    }

    /// Returns the best beams.
    pub(super) fn into_best(mut self, count: usize) -> Vec<FinishedBeam> {
        self.finished.truncate(count);
        self.finished
    }

    /// Adds one token to every beam, from their logits `(num_beams, V)`, which are changed.
    pub(super) fn advance(&mut self, logits: &mut [f32]) -> Result<()> {
        if self.done {
            self.running
                .iter_mut()
                .enumerate()
                .for_each(|(number, beam)| beam.parent = number);
            return Ok(());
        }
        let beams = self.config().num_beams;
        let ends = self.config().eos_token_id.len() + self.config().stop_token_ids.len();
        // Enough that all beams can continue even if the best continuations all end.
        let count = (1 + ends).max(2) * beams;
        self.score(logits)?;
        let sums: Vec<f32> = self.running.iter().map(|beam| beam.score).collect();
        let found = if self.config().is_greedy() {
            self.scorer.best(logits, &sums, count)
        } else {
            self.scorer.sample(logits, &sums, count, &mut self.random)
        };
        if found.is_empty() {
            let new = self.length() - self.prompt;
            return Err(Error::NothingAllowed {
                row: self.scorer.row,
                new,
            });
        }
        let mut found = found
            .into_iter()
            .map(|next| Ok((next, self.ending(&next)?)))
            .collect::<Result<Vec<_>>>()?;
        self.finish(&found[..beams.min(found.len())]);
        let all_end = found.iter().all(|(_, ending)| ending.is_some());
        // The best continuations that do not end; if there are too few, ended ones fill up the
        // beams without a chance.
        for (next, ending) in &mut found {
            if ending.is_some() {
                next.score += IMPOSSIBLE;
            }
        }
        found.sort_by(|(a, _), (b, _)| b.score.total_cmp(&a.score));
        self.continue_with(&found)?;
        self.improvable &= self.can_improve();
        let first = self.config().early_stopping == EarlyStopping::FirstFinished;
        self.done = !self.improvable || all_end || (first && self.is_full());
        if self.done && !self.is_full() {
            self.end_with(self.limit.1);
        }
        Ok(())
    }

    fn config(&self) -> &'a GenerationConfig {
        self.scorer.config
    }

    /// Returns the number of tokens of every running beam.
    fn length(&self) -> usize {
        self.running[0].ids.len()
    }

    fn is_full(&self) -> bool {
        self.finished.len() == self.config().num_beams
    }

    fn penalized(&self, score: f32, length: usize) -> f32 {
        score / (length as f64).powf(self.config().length_penalty) as f32
    }

    fn score(&mut self, logits: &mut [f32]) -> Result<()> {
        let vocabulary = logits.len() / self.running.len();
        let rows = logits.chunks_exact_mut(vocabulary);
        for (beam, scores) in self.running.iter_mut().zip(rows) {
            let allowed = allowed(&mut beam.constraint)?;
            let new = beam.ids.len() - self.prompt;
            if !self.scorer.score(scores, &beam.ids, new, allowed)? {
                scores.fill(f32::NEG_INFINITY);
            }
        }
        Ok(())
    }

    /// Returns the reason if a beam ends with a continuation.
    fn ending(&self, next: &Continuation) -> Result<Option<FinishReason>> {
        let mut constraint = self.running[next.beam].constraint.as_ref().map(fork);
        let length = self.length() + 1;
        end_after(
            next.token,
            length,
            self.limit,
            self.config(),
            &mut constraint,
        )
    }

    /// Adds the best continuations that end to the finished beams, if they are better.
    fn finish(&mut self, best: &[(Continuation, Option<FinishReason>)]) {
        let first = self.config().early_stopping == EarlyStopping::FirstFinished;
        if !self.improvable || (first && self.is_full()) {
            return;
        }
        for (next, ending) in best {
            // Continuations of beams without a chance are no results.
            if let Some(reason) = *ending
                && next.score > IMPOSSIBLE / 2.0
            {
                let beam = &self.running[next.beam];
                let length = beam.ids.len() + 1 - self.prompt;
                self.finished.push(FinishedBeam {
                    ids: extended(&beam.ids, next.token),
                    score: self.penalized(next.score, length),
                    reason,
                });
            }
        }
        self.rank();
    }

    /// Makes the best of `found` the running beams.
    fn continue_with(&mut self, found: &[(Continuation, Option<FinishReason>)]) -> Result<()> {
        let config = self.config();
        let beams = config.num_beams;
        let mut running = Vec::with_capacity(beams);
        for number in 0..beams {
            // A constraint may leave fewer continuations than beams; the others continue without a
            // chance.
            let (mut next, ended) = *found.get(number).unwrap_or(&found[0]);
            if number >= found.len() {
                next.score = IMPOSSIBLE * 2.0;
            }
            let beam = &self.running[next.beam];
            let mut constraint = beam.constraint.as_ref().map(fork);
            if let Some(constraint) = &mut constraint {
                advance(constraint, next.token, config)?;
            }
            running.push(Beam {
                ids: extended(&beam.ids, next.token),
                score: next.score,
                parent: next.beam,
                constraint,
                ended,
            });
        }
        self.running = running;
        Ok(())
    }

    /// Returns `true` if the best running beam may still beat the worst finished one.
    fn can_improve(&self) -> bool {
        let config = self.config();
        let never = config.early_stopping == EarlyStopping::Never;
        // A positive penalty divides long beams by more, so that a (negative) score is best at the full
        // length.
        let length = if never && config.length_penalty > 0.0 {
            self.limit.0 - self.prompt
        } else {
            self.length() - self.prompt
        };
        let best = self.penalized(self.running[0].score, length);
        let worst = match self.finished.last() {
            Some(worst) if self.is_full() => worst.score,
            _ => IMPOSSIBLE,
        };
        best > worst
    }
}

fn extended(ids: &[i64], token: i64) -> Vec<i64> {
    let mut longer = Vec::with_capacity(ids.len() + 1);
    longer.extend_from_slice(ids);
    longer.push(token);
    longer
}
