//! One step: the plans of all rows, the operators on the device, and the one copy that comes back.

use std::ops::Range;

use overdrive_sys::transfer;
use tch::{Kind, Tensor};

use super::changes::apply;
use super::expected::{Ahead, Expected, Found, believed};
use super::{RowChanges, upload};
use crate::host_copy::HostCopy;
use crate::row_scores::BestScores;
use crate::{Error, Result, TokenMask};

/// The number of scores that are requested beyond the needed ones: in bf16 many tokens have the same score as the
/// last one, and a cut keeps all of them.
pub(crate) const TIES: usize = 64;

/// The part of the work that the device does for a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Draw {
    /// The best token.
    Greedy,
    /// The given number of best tokens, from which the host draws.
    Candidates(usize),
    /// A token of the whole distribution, selected by this number in [0, 1).
    Whole(f64),
    /// Nothing: the host needs all scores.
    OnHost,
}

/// The plan for one row of a step.
#[derive(Debug)]
pub(crate) struct RowPlan {
    /// The row of the logits; several samples may draw from one.
    pub(crate) source: i64,
    pub(crate) changes: RowChanges,
    /// `true` if the options may change a score.
    pub(crate) changed: bool,
    pub(crate) draw: Draw,
    pub(crate) expected: Expected,
    pub(crate) temperature: f32,
    /// `true` if the sum over all tokens is needed.
    pub(crate) with_total: bool,
    /// The number of likeliest tokens before any change, if their log-probabilities are wanted.
    pub(crate) raw: Option<usize>,
}

impl RowPlan {
    /// Returns `true` if the row takes the token with the largest logit and no other result is requested.
    pub(crate) fn is_greedy(&self) -> bool {
        self.draw == Draw::Greedy && !self.changed && self.raw.is_none()
    }
}

/// A step whose results are on the host.
#[derive(Debug)]
pub(crate) struct DeviceStep {
    /// The logits `(B, V)` as the model gave them.
    logits: Tensor,
    vocabulary: usize,
    rows: Vec<Result<RowPlan>>,
    /// The results, 32 bits each, a row of them for each plan.
    words: Vec<i32>,
    columns: Columns,
}

/// The columns of each result.
#[derive(Debug, Clone, Default)]
struct Columns {
    width: usize,
    raw_max: Option<Range<usize>>,
    max: Option<Range<usize>>,
    best: Option<Range<usize>>,
    total: Option<Range<usize>>,
    scores: Option<Range<usize>>,
    ids: Option<Range<usize>>,
    drawn: Option<Range<usize>>,
    raw_total: Option<Range<usize>>,
    raw_scores: Option<Range<usize>>,
    raw_ids: Option<Range<usize>>,
    expected: Option<Range<usize>>,
}

/// The results of one row.
#[derive(Debug)]
pub(crate) struct RowResult {
    /// The largest logit before any change; NaN if one is.
    pub(crate) raw_max: f32,
    /// The largest score; NaN if one is.
    pub(crate) max: f32,
    /// The first token with that score.
    pub(crate) best: i64,
    /// The best scores, at the plan's temperature.
    pub(crate) top: BestScores,
    /// The token that was drawn from the whole distribution; the size of the vocabulary if rounding left none.
    pub(crate) drawn: i64,
    /// The best scores before any change.
    pub(crate) raw: BestScores,
}

impl DeviceStep {
    /// Computes a step over `logits (…, V)`. The plan of a row that has failed stays in its place.
    pub(crate) fn new(
        logits: &Tensor,
        vocabulary: usize,
        rows: Vec<Result<RowPlan>>,
    ) -> Result<DeviceStep> {
        DeviceStep::before_reading(logits, vocabulary, rows, None)
    }

    /// Computes a step like [`new`](DeviceStep::new). If the device finds the expected token of every row, `ahead` is called
    /// with them before the host waits for the results; it may overwrite the logits.
    pub(crate) fn before_reading(
        logits: &Tensor,
        vocabulary: usize,
        rows: Vec<Result<RowPlan>>,
        ahead: Option<Ahead<'_>>,
    ) -> Result<DeviceStep> {
        let logits = logits.f_reshape([-1, vocabulary as i64])?;
        let mut step = DeviceStep {
            logits,
            vocabulary,
            rows,
            words: Vec::new(),
            columns: Columns::default(),
        };
        if step.plans().next().is_some() {
            step.run(ahead)?;
        }
        Ok(step)
    }

    /// Returns a step in which each row takes the token with the largest logit. `words` holds the bits of that logit
    /// and the token for each row.
    pub(crate) fn greedy(
        logits: &Tensor,
        vocabulary: usize,
        rows: Vec<Result<RowPlan>>,
        words: Vec<i32>,
    ) -> DeviceStep {
        DeviceStep {
            logits: logits.shallow_clone(),
            vocabulary,
            rows,
            words,
            columns: Columns {
                width: 2,
                max: Some(0..1),
                best: Some(1..2),
                expected: Some(1..2),
                ..Columns::default()
            },
        }
    }

    /// Returns the expected token of each row, if `ahead` was called with them.
    pub(crate) fn expected(&self) -> Option<Vec<i64>> {
        let column = self.columns.expected.clone()?.start;
        let rows = self.words.chunks_exact(self.columns.width.max(1));
        Some(rows.map(|row| i64::from(row[column])).collect())
    }

    /// Returns the size of the vocabulary.
    pub(crate) fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// Returns the plan of row `row`.
    pub(crate) fn plan(&self, row: usize) -> Option<&RowPlan> {
        self.rows.get(row)?.as_ref().ok()
    }

    /// Returns the error with which the plan of row `row` failed.
    pub(crate) fn take_error(&mut self, row: usize) -> Option<Error> {
        let slot = self.rows.get_mut(row)?;
        if slot.is_ok() {
            return None;
        }
        std::mem::replace(slot, Err(Error::Scheduler("an error was taken twice"))).err()
    }

    /// Returns the tokens that the constraint of row `row` allows.
    pub(crate) fn allowed(&self, row: usize) -> Option<&TokenMask> {
        self.plan(row)?.changes.allowed()
    }

    fn plans(&self) -> impl Iterator<Item = &RowPlan> {
        self.rows.iter().filter_map(|plan| plan.as_ref().ok())
    }

    /// Returns the index of row `row` among the rows with a plan.
    fn index(&self, row: usize) -> usize {
        self.rows[..row].iter().filter(|plan| plan.is_ok()).count()
    }

    fn run(&mut self, ahead: Option<Ahead<'_>>) -> Result<()> {
        let device = self.logits.device();
        let plans: Vec<&RowPlan> = self.plans().collect();
        let sources: Vec<i64> = plans.iter().map(|plan| plan.source).collect();
        let in_order = sources.iter().copied().eq(0..self.logits.size()[0]);
        let raw = match in_order {
            true => self.logits.shallow_clone(),
            false => {
                let sources = upload(Tensor::f_from_slice(&sources)?, device)?;
                self.logits.f_index_select(0, &sources)?
            }
        };
        let is_copy = !in_order || raw.f_kind()? != Kind::Float;
        let raw = raw.f_to_kind(Kind::Float)?.f_contiguous()?;
        let mut packed = Packed::default();
        let mut columns = Columns::default();
        let changed = plans.iter().any(|plan| plan.changed);
        let top_raw = plans.iter().filter_map(|plan| plan.raw).max();
        if changed || top_raw.is_some() {
            let max = raw.f_amax(-1, true)?;
            columns.raw_max = Some(packed.push(&max)?);
            if let Some(wanted) = top_raw {
                let (best, ids) = self.best(&raw, wanted.saturating_add(TIES))?;
                columns.raw_scores = Some(packed.push(&best)?);
                columns.raw_ids = Some(packed.push(&ids)?);
                columns.raw_total = Some(packed.push(&total(&raw, &max, None)?)?);
            }
        }
        let scores = match changed && !is_copy {
            // The logits are the model's own.
            true => raw.f_to_dtype(Kind::Float, false, true)?,
            false => raw,
        };
        if changed {
            // A row of the host is processed there.
            let on_device = |plan: &&RowPlan| plan.draw != Draw::OnHost;
            let changes = plans
                .iter()
                .map(|plan| on_device(plan).then_some(&plan.changes));
            apply(&scores, changes)?;
        }
        let (max, best) = scores.f_max_dim(-1, true)?;
        columns.max = Some(packed.push(&max)?);
        columns.best = Some(packed.push(&best)?);
        let wanted = plans.iter().map(|plan| match plan.draw {
            Draw::Candidates(count) => count,
            _ => 0,
        });
        let mut found = Found {
            best,
            drawn: None,
            top: None,
            total: None,
        };
        if let Some(wanted) = wanted.max().filter(|count| *count > 0) {
            let (best, ids) = self.best(&scores, wanted)?;
            columns.scores = Some(packed.push(&best)?);
            columns.ids = Some(packed.push(&ids)?);
            found.top = Some((best, ids));
        }
        if plans.iter().any(|plan| plan.with_total) {
            let temperatures: Vec<f32> = plans.iter().map(|plan| plan.temperature).collect();
            let temperatures = upload(Tensor::f_from_slice(&temperatures)?, device)?;
            let temperatures = temperatures.f_unsqueeze(1)?;
            let total = total(&scores, &max, Some(&temperatures))?;
            columns.total = Some(packed.push(&total)?);
            found.total = Some(total);
        }
        if let Some(drawn) = draw(&scores, &max, &plans)? {
            columns.drawn = Some(packed.push(&drawn)?);
            found.drawn = Some(drawn);
        }
        let is_known = |plan: &&RowPlan| plan.expected != Expected::Unknown;
        let is_known = self.rows.len() == plans.len() && plans.iter().all(is_known);
        let ahead = match ahead.filter(|_| is_known) {
            None => None,
            Some(ahead) => {
                let expected = believed(found.expected(&plans, self.vocabulary)?);
                columns.expected = Some(packed.push(&expected)?);
                Some((ahead, expected))
            }
        };
        let all = Tensor::f_cat(&packed.tensors, 1)?;
        columns.width = packed.width;
        // The only copy to the host in this step. It begins before `ahead` launches more work, so
        // that the host does not wait for that work.
        let read = HostCopy::begin(all)?;
        if let Some((ahead, expected)) = ahead {
            if !plans.iter().all(|plan| plan.is_greedy()) {
                // The host may read single rows later, when the next step has overwritten the model's.
                let kind = self.logits.f_kind()?;
                self.logits = self.logits.f_to_dtype(kind, false, true)?;
            }
            ahead(&expected)?;
        }
        (self.words, self.columns) = (read.words()?, columns);
        Ok(())
    }

    /// Returns the best scores of each row, and their ids.
    fn best(&self, scores: &Tensor, count: usize) -> Result<(Tensor, Tensor)> {
        let count = count.clamp(1, self.vocabulary) as i64;
        Ok(scores.f_topk(count, -1, true, true)?)
    }

    /// Returns the results of row `row`, which has a plan.
    pub(crate) fn result(&self, row: usize) -> RowResult {
        let columns = &self.columns;
        let start = self.index(row) * columns.width;
        let words = |range: &Option<Range<usize>>| {
            let range = range.clone().unwrap_or(0..0);
            self.words
                .get(start + range.start..start + range.end)
                .unwrap_or(&[])
        };
        let float = |word: &i32| f32::from_bits(word.cast_unsigned());
        let one = |range: &Option<Range<usize>>| words(range).first().map(float);
        let id =
            |range: &Option<Range<usize>>| words(range).first().map_or(-1, |id| i64::from(*id));
        let double = |range: &Option<Range<usize>>| match *words(range) {
            // A double in two words, the lower one first.
            [low, high] => {
                let (low, high) = (low.cast_unsigned(), high.cast_unsigned());
                Some(f64::from_bits(u64::from(low) | u64::from(high) << 32))
            }
            _ => None,
        };
        let max = one(&columns.max).unwrap_or(f32::NAN);
        let best = |scores, ids, total| {
            let entries = words(ids).iter().zip(words(scores));
            let entries = entries.map(|(id, score)| (id.cast_unsigned(), float(score)));
            BestScores::new(entries, self.vocabulary, total)
        };
        let with_total = self.plan(row).is_some_and(|plan| plan.with_total);
        let total = double(&columns.total).filter(|_| with_total);
        RowResult {
            raw_max: one(&columns.raw_max).unwrap_or(max),
            max,
            best: id(&columns.best),
            top: best(&columns.scores, &columns.ids, total),
            drawn: id(&columns.drawn),
            raw: best(
                &columns.raw_scores,
                &columns.raw_ids,
                double(&columns.raw_total),
            ),
        }
    }

    /// Reads all logits of row `row`.
    pub(crate) fn whole(&self, row: usize) -> Result<Vec<f32>> {
        let mut scores = vec![0.0; self.vocabulary];
        let logits = self.logits_of(row)?.f_to_kind(Kind::Float)?;
        let host = transfer::to_host(&logits)?;
        host.f_copy_data(&mut scores, self.vocabulary)?;
        Ok(scores)
    }

    /// Reads the logit of token `id` of row `row`, and the number of better ones.
    pub(crate) fn standing(&self, row: usize, id: i64) -> Result<(f32, usize)> {
        let logits = self.logits_of(row)?.f_to_kind(Kind::Float)?;
        let one = logits.f_narrow(0, id, 1)?;
        let better = logits
            .f_gt_tensor(&one)?
            .f_sum(Kind::Double)?
            .f_unsqueeze(0)?;
        let both = Tensor::f_cat(&[one.f_to_kind(Kind::Double)?, better], 0)?;
        let mut found = [0.0_f64; 2];
        transfer::to_host(&both)?.f_copy_data(&mut found, 2)?;
        Ok((found[0] as f32, found[1] as usize))
    }

    fn logits_of(&self, row: usize) -> Result<Tensor> {
        let source = self.plan(row).map_or(0, |plan| plan.source);
        Ok(self.logits.f_select(0, source)?)
    }
}

/// Results side by side, as 32-bit integers: copying them changes no bit.
#[derive(Default)]
struct Packed {
    tensors: Vec<Tensor>,
    width: usize,
}

impl Packed {
    /// Adds the columns of `tensor (B, N)`; returns their range.
    fn push(&mut self, tensor: &Tensor) -> Result<Range<usize>> {
        let words = match tensor.f_kind()? {
            // Ids, which fit 32 bits.
            Kind::Int64 => tensor.f_to_kind(Kind::Int)?,
            Kind::Int => tensor.shallow_clone(),
            _ => tensor.f_contiguous()?.f_view_dtype(Kind::Int)?,
        };
        let start = self.width;
        self.width += usize::try_from(words.size()[1]).unwrap_or(0);
        self.tensors.push(words);
        Ok(start..self.width)
    }
}

/// Returns `Σ e^((score - max) / temperature)` of each row, f64.
fn total(scores: &Tensor, max: &Tensor, temperatures: Option<&Tensor>) -> Result<Tensor> {
    let mut shifted = scores.f_sub(max)?;
    if let Some(temperatures) = temperatures {
        shifted = shifted.f_div(temperatures)?;
    }
    Ok(shifted
        .f_exp()?
        .f_sum_dim_intlist(&[-1_i64][..], true, Kind::Double)?)
}

/// Draws from the whole distribution for the rows whose plan requests it: inverts the cumulative distribution, in
/// the order of ids, at the number of the row. The other rows get a meaningless token.
fn draw(scores: &Tensor, max: &Tensor, plans: &[&RowPlan]) -> Result<Option<Tensor>> {
    let device = scores.device();
    let number = |plan: &&RowPlan| match plan.draw {
        Draw::Whole(number) => Some(number),
        _ => None,
    };
    let wanted: Vec<i64> = (0..plans.len() as i64)
        .zip(plans)
        .filter_map(|(row, plan)| number(plan).map(|_| row))
        .collect();
    if wanted.is_empty() {
        return Ok(None);
    }
    let chosen = || plans.iter().filter(|plan| number(plan).is_some());
    let temperatures: Vec<f64> = chosen().map(|plan| f64::from(plan.temperature)).collect();
    let numbers: Vec<f64> = chosen().filter_map(number).collect();
    let given = [temperatures, numbers].concat();
    let given = upload(Tensor::f_from_slice(&given)?, device)?.f_view([2, -1, 1])?;
    let temperatures = given.f_select(0, 0)?.f_to_kind(Kind::Float)?;
    let all = wanted.len() == plans.len();
    let (scores, max, rows) = match all {
        true => (scores.shallow_clone(), max.shallow_clone(), None),
        false => {
            let rows = upload(Tensor::f_from_slice(&wanted)?, device)?;
            let of = |tensor: &Tensor| tensor.f_index_select(0, &rows);
            (of(scores)?, of(max)?, Some(rows))
        }
    };
    let shift = max.f_div(&temperatures)?;
    let weights = scores.f_div(&temperatures)?.f_sub(&shift)?.f_exp()?;
    // In f64: the error does not grow with the vocabulary.
    let sums = weights.f_cumsum(-1, Kind::Double)?;
    let last = sums.f_narrow(-1, sums.size()[1] - 1, 1)?;
    let target = last.f_mul(&given.f_select(0, 1)?)?;
    let drawn = target.f_searchsorted(&sums, true, true, "right", None::<&Tensor>)?;
    let Some(rows) = rows else {
        return Ok(Some(drawn));
    };
    let mut spread = Tensor::f_zeros([plans.len() as i64, 1], (Kind::Int, device))?;
    let _same = spread.f_index_copy_(0, &rows, &drawn)?;
    Ok(Some(spread))
}
