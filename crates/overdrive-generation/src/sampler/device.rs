//! Choosing a token from logits that stay on their device.

use super::cuts::{NoCandidates, TOP_H_TOKENS};
use super::{Choice, Sampler};
use crate::config::Cuts;
use crate::device_sampling::{
    DeviceCut, DeviceStep, Draw, Expected, RowChanges, RowPlan, RowResult, TIES,
};
use crate::logprobs::{Logprobs, TokenLogprobs};
use crate::processors::{History, changes, process};
use crate::{Error, LogprobsMode, Result, TokenMask};

/// The number of candidates for a cut whose size is not known in advance.
const MANY: usize = 512;

impl Sampler {
    /// Returns the plan to choose the next token from row `source` of the logits. The arguments are as in
    /// [`Sampler::choose`]. Random numbers are drawn by [`choose_on`](Sampler::choose_on): a step that fails leaves
    /// them as they were.
    pub(crate) fn plan(
        &mut self,
        source: usize,
        vocabulary: usize,
        (ids, new): (&[i64], usize),
        allowed: Option<&TokenMask>,
    ) -> RowPlan {
        let history = History { ids, new };
        let changed = allowed.is_some() || changes(&self.config, history);
        let mut recorded = RowChanges::new(vocabulary);
        if changed {
            process(
                &mut recorded,
                history,
                allowed,
                &self.config,
                &mut self.counts,
            );
        }
        let draw = match recorded.is_for_device() {
            true => self.draw_on_device(vocabulary),
            false => Draw::OnHost,
        };
        let config = &self.config;
        let mode = config.logprobs_mode;
        let first = config.top_h.is_some() || (config.top_k > 0 && config.top_k < vocabulary);
        let nucleus = config.top_p < 1.0 && !first;
        RowPlan {
            source: source as i64,
            changes: recorded,
            changed,
            draw,
            expected: self.expected(draw),
            temperature: match config.is_greedy() {
                true => 1.0,
                false => config.temperature as f32,
            },
            with_total: matches!(draw, Draw::Candidates(_)) && (config.is_greedy() || nucleus),
            raw: (config.logprobs)
                .filter(|_| mode == LogprobsMode::RawLogprobs && draw != Draw::OnHost),
        }
    }

    /// Returns the way in which a device finds the token of a row.
    fn expected(&self, draw: Draw) -> Expected {
        let cuts = self.config.cuts();
        let is_simple = cuts.top_h.is_none()
            && cuts.typical_p >= 1.0
            && cuts.epsilon_cutoff <= 0.0
            && cuts.eta_cutoff <= 0.0;
        match draw {
            Draw::OnHost => Expected::Unknown,
            _ if self.config.is_greedy() => Expected::Best,
            Draw::Whole(_) => Expected::Drawn,
            Draw::Candidates(_) if is_simple => Expected::Cut(DeviceCut {
                top_k: cuts.top_k,
                top_p: cuts.top_p,
                min_p: cuts.min_p.unwrap_or(0.0),
                uniform: self.random.clone().uniform(),
            }),
            _ => Expected::Unknown,
        }
    }

    /// Returns the part of the choice that a device makes.
    fn draw_on_device(&self, vocabulary: usize) -> Draw {
        let config = &self.config;
        let processed = config.logprobs_mode == LogprobsMode::ProcessedLogprobs;
        let logprobs = config.logprobs.filter(|_| processed);
        if config.is_greedy() {
            return match logprobs {
                Some(top) => Draw::Candidates(top.saturating_add(TIES)),
                None => Draw::Greedy,
            };
        }
        let Cuts {
            top_k,
            top_p,
            min_p,
            top_h,
            typical_p,
            epsilon_cutoff,
            eta_cutoff,
        } = config.cuts();
        if top_h.is_some() {
            Draw::Candidates(TOP_H_TOKENS + TIES)
        } else if top_k > 0 && top_k < vocabulary {
            Draw::Candidates(top_k.saturating_add(top_k.max(TIES)))
        } else if top_p < 1.0 || min_p.is_some_and(|p| p > 0.0) {
            Draw::Candidates(MANY)
        } else if typical_p < 1.0 || epsilon_cutoff > 0.0 || eta_cutoff > 0.0 || logprobs.is_some()
        {
            Draw::OnHost
        } else {
            Draw::Whole(self.random.clone().uniform())
        }
    }

    /// Chooses the next token of row `row` of a step, as [`Sampler::choose`] does.
    pub(crate) fn choose_on(
        &mut self,
        step: &DeviceStep,
        row: usize,
        (ids, new): (&[i64], usize),
    ) -> Result<Choice> {
        let Some(plan) = step.plan(row) else {
            return Err(Error::Scheduler("a row of the step has no plan"));
        };
        if plan.draw == Draw::OnHost {
            return self.choose(&mut step.whole(row)?, ids, new, step.allowed(row));
        }
        let result = step.result(row);
        self.changed = plan.changed;
        if !result.raw_max.is_finite() {
            return Err(Error::BadLogits { row: self.row });
        }
        if !result.max.is_finite() {
            return Err(self.no_token(result.max != f32::NEG_INFINITY, new));
        }
        let id = if self.config.is_greedy() {
            result.best
        } else if let Draw::Whole(_) = plan.draw {
            // The number that the plan was made with.
            let _drawn = self.random.uniform();
            match usize::try_from(result.drawn) {
                Ok(id) if id < step.vocabulary() => result.drawn,
                // Rounding left a remainder, which belongs to the likeliest token.
                _ => result.best,
            }
        } else {
            match self.candidates.select(&result.top, &self.config, 1) {
                Ok(()) => {}
                Err(NoCandidates::Incomplete) => {
                    return self.choose(&mut step.whole(row)?, ids, new, step.allowed(row));
                }
                Err(NoCandidates::Unusable) => return Err(self.no_token(true, new)),
            }
            let uniform = self.random.uniform();
            let drawn = self.candidates.draw(uniform);
            drawn.ok_or(Error::NothingAllowed { row: self.row, new })?
        };
        let logprobs = self.logprobs_on(step, row, &result, (ids, new), id)?;
        Ok(Choice { id, logprobs })
    }

    fn logprobs_on(
        &mut self,
        step: &DeviceStep,
        row: usize,
        result: &RowResult,
        (ids, new): (&[i64], usize),
        id: i64,
    ) -> Result<Option<TokenLogprobs>> {
        let Some(top) = self.config.logprobs else {
            return Ok(None);
        };
        let found = match self.config.logprobs_mode {
            LogprobsMode::RawLogprobs => {
                let raw = Logprobs::of(&result.raw, top);
                match raw.of_token(id) {
                    None if !raw.has(id) => {
                        let (score, better) = step.standing(row, id)?;
                        raw.beside(score, better)
                    }
                    found => found,
                }
            }
            LogprobsMode::ProcessedLogprobs if self.config.is_greedy() => {
                Logprobs::of(&result.top, top).of_token(id)
            }
            LogprobsMode::ProcessedLogprobs => self.logprobs_of_candidates(id, top),
        };
        if found.is_some() {
            return Ok(found);
        }
        // More tokens have the score of the last requested one than were returned.
        let mut scores = step.whole(row)?;
        self.prepare(&mut scores, ids, new, step.allowed(row))?;
        Ok(self.logprobs_of(&scores, id))
    }
}
