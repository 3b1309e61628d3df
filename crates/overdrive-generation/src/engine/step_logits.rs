//! The logits of a step of the engine, on the host or on a device.

use overdrive_kv_cache::SequenceId;
use tch::Tensor;

use super::sample::Sample;
use super::scheduler::Scheduler;
use crate::Result;
use crate::decoder::to_host;
use crate::device_sampling::{DeviceStep, RowLogits, RowPlan, stays_on_device};
use crate::rows::ChosenToken;

/// A sequence that gets tokens in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StepEnd {
    /// The index among the running sequences.
    pub(super) sequence: usize,
    /// The number of proposed tokens that the step has read; there is a row of logits for each, after that of the last
    /// token.
    pub(super) proposed: usize,
}

impl StepEnd {
    /// Returns a sequence without proposals.
    pub(super) fn of(sequence: usize) -> StepEnd {
        StepEnd {
            sequence,
            proposed: 0,
        }
    }

    /// Returns the number of rows of logits.
    pub(super) fn rows(&self) -> usize {
        1 + self.proposed
    }
}

/// The logits of the sequences that get a token in a step.
#[derive(Debug, Default)]
pub(super) enum StepLogits {
    /// No sequence gets a token.
    #[default]
    None,
    /// The scores of each row, one after another.
    Host(Vec<f32>),
    /// The results of a device, and the row of the first sample of each sequence among them.
    Device(Box<DeviceStep>, Vec<usize>),
}

/// The logits of one sequence, from which its samples choose one after another.
pub(super) enum SequenceLogits<'a> {
    Host(&'a mut [f32]),
    /// The step, and the row of the next sample.
    Device(&'a mut DeviceStep, usize),
}

impl StepLogits {
    /// Returns the logits `(N, V)`, on a device with one row for each of the running sequences `ends`; the buffer of the
    /// last step is reused.
    pub(super) fn read(
        self,
        logits: &Tensor,
        vocabulary: usize,
        ends: &[usize],
        scheduler: &mut Scheduler<SequenceId, Sample>,
    ) -> Result<StepLogits> {
        if !stays_on_device(logits) {
            let mut scores = match self {
                StepLogits::Host(scores) => scores,
                _ => Vec::new(),
            };
            to_host(logits, &mut scores)?;
            return Ok(StepLogits::Host(scores));
        }
        let plans = StepPlans::new(vocabulary, ends, scheduler);
        let step = DeviceStep::new(logits, vocabulary, plans.rows)?;
        Ok(StepLogits::Device(Box::new(step), plans.first))
    }

    /// Returns the buffer for the next step, and drops tensors on a device.
    pub(super) fn reusable(self) -> StepLogits {
        match self {
            StepLogits::Host(scores) => StepLogits::Host(scores),
            _ => StepLogits::None,
        }
    }

    /// Returns row `number` of the logits of the step.
    pub(super) fn of(&mut self, number: usize, vocabulary: usize) -> Option<SequenceLogits<'_>> {
        match self {
            StepLogits::None => None,
            StepLogits::Host(scores) => {
                let start = number * vocabulary;
                let scores = scores.get_mut(start..start + vocabulary)?;
                Some(SequenceLogits::Host(scores))
            }
            StepLogits::Device(step, first) => {
                Some(SequenceLogits::Device(step.as_mut(), *first.get(number)?))
            }
        }
    }
}

/// The plans of the samples that choose in a step.
pub(super) struct StepPlans {
    pub(super) rows: Vec<Result<RowPlan>>,
    /// The row of the first sample of each sequence.
    pub(super) first: Vec<usize>,
}

impl StepPlans {
    /// Returns the plans of the running sequences `ends`, whose logits are rows in this order.
    pub(super) fn new(
        vocabulary: usize,
        ends: &[usize],
        scheduler: &mut Scheduler<SequenceId, Sample>,
    ) -> StepPlans {
        let (mut rows, mut first) = (Vec::new(), Vec::new());
        for (source, &index) in ends.iter().enumerate() {
            first.push(rows.len());
            let Some(sequence) = scheduler.sequence(index) else {
                continue;
            };
            let (data, tokens) = (&mut sequence.data, sequence.tokens.as_slice());
            // In the order in which the samples choose. An error ends the request alone.
            for sibling in &mut data.siblings {
                rows.push(sibling.row.plan(source, vocabulary, tokens));
            }
            rows.push(data.row.plan(source, vocabulary, tokens));
        }
        StepPlans { rows, first }
    }

    /// Returns `true` if each sequence has one sample.
    pub(super) fn has_one_each(&self) -> bool {
        self.rows.len() == self.first.len()
    }

    /// Returns `true` if each sequence takes the token with the largest logit.
    pub(super) fn are_greedy(&self) -> bool {
        self.has_one_each()
            && (self.rows.iter()).all(|plan| plan.as_ref().is_ok_and(RowPlan::is_greedy))
    }
}

impl SequenceLogits<'_> {
    /// Chooses the token of the next sample after `tokens`; `is_last` says that no other sample follows.
    pub(super) fn choose(
        &mut self,
        sample: &mut Sample,
        tokens: &[i64],
        is_last: bool,
    ) -> Result<ChosenToken> {
        match self {
            SequenceLogits::Host(scores) if is_last => {
                sample.choose(RowLogits::Host(scores), tokens)
            }
            // Choosing changes the scores, and each sample needs its own.
            SequenceLogits::Host(scores) => {
                sample.choose(RowLogits::Host(&mut scores.to_vec()), tokens)
            }
            SequenceLogits::Device(step, row) => {
                let own = *row;
                *row += 1;
                match step.take_error(own) {
                    Some(error) => Err(error),
                    None => sample.choose(RowLogits::Device(step, own), tokens),
                }
            }
        }
    }
}
