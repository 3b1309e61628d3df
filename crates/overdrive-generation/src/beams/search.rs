use super::scores::{Continuation, Scorer};
use crate::random::SplitMix64;
use crate::{Constraint, EarlyStopping, Error, FinishReason, GenerationConfig, Result, TokenMask};

/// What a beam has that cannot win: below any sum of log-probabilities, as in transformers.
const HOPELESS: f32 = -1e9;

/// A running beam.
#[derive(Debug)]
struct Beam {
    ids: Vec<i64>,
    score: f32,
    /// The beam of the step before that it continues.
    parent: usize,
    constraint: Option<Box<dyn Constraint>>,
}

/// A finished one.
#[derive(Debug)]
pub(super) struct Finished {
    pub(super) ids: Vec<i64>,
    pub(super) score: f32,
    pub(super) reason: FinishReason,
}

/// The beams of one prompt.
pub(super) struct Search<'a> {
    scorer: Scorer<'a>,
    random: SplitMix64,
    prompt: usize,
    limit: (usize, FinishReason),
    mask: TokenMask,
    running: Vec<Beam>,
    /// Best first, at most `num_beams`.
    finished: Vec<Finished>,
    /// Whether a running beam may still beat a finished one.
    improvable: bool,
    done: bool,
}

impl<'a> Search<'a> {
    pub(super) fn new(
        config: &'a GenerationConfig,
        prompt: &[i64],
        limit: (usize, FinishReason),
        (constraint, vocabulary): (Option<Box<dyn Constraint>>, usize),
        random: SplitMix64,
        row: usize,
    ) -> Self {
        let done = prompt.len() >= limit.0;
        // All begin alike: only the first counts, or all would find the same.
        let running = (0..config.num_beams).map(|number| Beam {
            ids: prompt.to_vec(),
            score: if number == 0 { 0.0 } else { HOPELESS },
            parent: number,
            constraint: constraint.as_ref().map(|c| c.fork()),
        });
        let mut search = Search {
            running: running.collect(),
            scorer: Scorer::new(config, row),
            random,
            prompt: prompt.len(),
            limit,
            mask: TokenMask::new(vocabulary),
            finished: Vec::new(),
            improvable: true,
            done,
        };
        if done {
            search.end();
        }
        search
    }

    pub(super) fn is_done(&self) -> bool {
        self.done
    }

    pub(super) fn prompt(&self) -> usize {
        self.prompt
    }

    /// The rows of the batch that the beams continue, where the first beam's is `first`.
    pub(super) fn parents(&self, first: usize) -> impl Iterator<Item = usize> {
        self.running.iter().map(move |beam| first + beam.parent)
    }

    /// The tokens to read next, one a beam; those of a search that is done do not matter.
    pub(super) fn last_tokens(&self) -> impl Iterator<Item = i64> {
        let pad = self.config().pad();
        let last = move |beam: &Beam| beam.ids.last().copied().unwrap_or(pad);
        self.running.iter().map(last)
    }

    /// Ends the search with what it has: the running beams count as finished where too few are.
    pub(super) fn end(&mut self) {
        let reason = if self.done {
            self.limit.1
        } else {
            FinishReason::TimeLimit
        };
        self.done = true;
        for beam in &self.running {
            if self.finished.len() < self.config().num_return_sequences {
                let length = (beam.ids.len() - self.prompt).max(1);
                self.finished.push(Finished {
                    ids: beam.ids.clone(),
                    score: self.penalized(beam.score, length),
                    reason,
                });
            }
        }
    }

    /// The best ones.
    pub(super) fn into_best(mut self, count: usize) -> Vec<Finished> {
        self.finished.truncate(count);
        self.finished
    }

    /// One more token for every beam, from their logits `(num_beams, V)`, which are changed.
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
        // Enough that as many beams as there are go on even where all the best end.
        let count = (1 + ends).max(2) * beams;
        self.score(logits)?;
        let sums: Vec<f32> = self.running.iter().map(|beam| beam.score).collect();
        let mut found = if self.config().is_greedy() {
            self.scorer.best(logits, &sums, count)
        } else {
            self.scorer.drawn(logits, &sums, count, &mut self.random)
        };
        if found.is_empty() {
            let new = self.length() - self.prompt;
            return Err(Error::NothingAllowed {
                row: self.scorer.row,
                new,
            });
        }
        let ending = found
            .iter()
            .map(|next| self.ending(next))
            .collect::<Result<Vec<_>>>()?;
        self.finish(&found[..beams.min(found.len())], &ending);
        let all_end = ending.iter().all(Option::is_some);
        // The best that go on; where they are too few, ended ones fill up without a chance.
        for (next, ending) in found.iter_mut().zip(&ending) {
            if ending.is_some() {
                next.score += HOPELESS;
            }
        }
        found.sort_by(|a, b| b.score.total_cmp(&a.score));
        self.go_on(&found)?;
        self.improvable &= self.can_improve();
        let first = self.config().early_stopping == EarlyStopping::FirstFinished;
        self.done = !self.improvable || all_end || (first && self.is_full());
        if self.done && self.finished.len() < self.config().num_return_sequences {
            self.finished.sort_by(|a, b| b.score.total_cmp(&a.score));
        }
        Ok(())
    }

    fn config(&self) -> &'a GenerationConfig {
        self.scorer.config
    }

    /// Tokens of every running beam.
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
            let allowed = match &mut beam.constraint {
                None => None,
                Some(constraint) => {
                    self.mask.clear();
                    constraint.allowed(&mut self.mask)?;
                    Some(&self.mask)
                }
            };
            let new = beam.ids.len() - self.prompt;
            if !self.scorer.score(scores, &beam.ids, new, allowed)? {
                scores.fill(f32::NEG_INFINITY);
            }
        }
        Ok(())
    }

    /// Why a beam ends with a continuation, where it does.
    fn ending(&self, next: &Continuation) -> Result<Option<FinishReason>> {
        let config = self.config();
        if config.eos_token_id.contains(&next.token) {
            return Ok(Some(FinishReason::EndOfText));
        }
        if config.stop_token_ids.contains(&next.token) {
            return Ok(Some(FinishReason::StopToken));
        }
        if let Some(constraint) = &self.running[next.beam].constraint {
            let mut constraint = constraint.fork();
            constraint.advance(next.token)?;
            if constraint.is_finished() {
                return Ok(Some(FinishReason::Constraint));
            }
        }
        Ok((self.length() + 1 >= self.limit.0).then_some(self.limit.1))
    }

    /// Keeps those of the best continuations that end, where they beat what has finished.
    fn finish(&mut self, best: &[Continuation], ending: &[Option<FinishReason>]) {
        let first = self.config().early_stopping == EarlyStopping::FirstFinished;
        if !self.improvable || (first && self.is_full()) {
            return;
        }
        for (next, ending) in best.iter().zip(ending) {
            // Continuations of hopeless beams are no results.
            if let Some(reason) = *ending
                && next.score > HOPELESS / 2.0
            {
                let beam = &self.running[next.beam];
                let length = beam.ids.len() + 1 - self.prompt;
                self.finished.push(Finished {
                    ids: extended(&beam.ids, next.token),
                    score: self.penalized(next.score, length),
                    reason,
                });
            }
        }
        self.finished.sort_by(|a, b| b.score.total_cmp(&a.score));
        self.finished.truncate(self.config().num_beams);
    }

    /// The best of `found` are the running beams from now on.
    fn go_on(&mut self, found: &[Continuation]) -> Result<()> {
        let beams = self.config().num_beams;
        let mut running = Vec::with_capacity(beams);
        for number in 0..beams {
            // A constraint may leave fewer continuations than beams: the others go on without a chance.
            let next = match found.get(number) {
                Some(next) => *next,
                None => Continuation {
                    score: HOPELESS * 2.0,
                    ..found[0]
                },
            };
            let beam = &self.running[next.beam];
            let mut constraint = beam.constraint.as_ref().map(|c| c.fork());
            if let Some(constraint) = &mut constraint {
                constraint.advance(next.token)?;
            }
            running.push(Beam {
                ids: extended(&beam.ids, next.token),
                score: next.score,
                parent: next.beam,
                constraint,
            });
        }
        self.running = running;
        Ok(())
    }

    /// Whether the best running beam may come to beat the worst finished one.
    fn can_improve(&self) -> bool {
        let config = self.config();
        let never = config.early_stopping == EarlyStopping::Never;
        let length = if never && config.length_penalty > 0.0 {
            self.limit.0 - self.prompt
        } else {
            self.length() - self.prompt
        };
        let best = self.penalized(self.running[0].score, length);
        let worst = match self.finished.last() {
            Some(worst) if self.is_full() => worst.score,
            _ => HOPELESS,
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
