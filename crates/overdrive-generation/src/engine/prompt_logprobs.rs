//! The log-probabilities of a prompt's tokens, computed while the prompt is read.

use std::sync::Arc;

use overdrive_sys::transfer::to_device;
use tch::{Kind, Tensor};

use super::model::{EngineModel, RaggedStep};
use super::request::{PromptLogprobs, RequestLimits};
use super::scheduler::Chunk;
use crate::decoder::to_host;
use crate::device_sampling::stays_on_device;
use crate::logprobs::Logprobs;
use crate::{Error, Result, TokenLogprobs};

/// The largest size of the logits that are scored together, in f32. A whole prompt of 8,192 tokens would have 4.9 GB of
/// them with a vocabulary of 150,000.
const BLOCK_BYTES: usize = 64 << 20;

/// The log-probabilities of a prompt as far as it has been read.
#[derive(Debug, Clone)]
pub(super) struct PromptScores {
    top: usize,
    /// The log-probabilities of the tokens so far; the first token has `None`.
    tokens: Vec<Option<TokenLogprobs>>,
}

impl PromptScores {
    /// Returns the scores of a prompt of which nothing has been read, with the `top` likeliest tokens at each position.
    pub(super) fn new(top: usize) -> PromptScores {
        PromptScores {
            top,
            tokens: vec![None],
        }
    }

    /// Returns the number of tokens that have a value.
    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Returns the number of positions whose logits have been scored, and that need not be read again.
    pub(super) fn read(&self) -> usize {
        self.tokens.len() - 1
    }

    pub(super) fn extend(&mut self, new: Vec<TokenLogprobs>) {
        self.tokens.extend(new.into_iter().map(Some));
    }

    /// Returns the positions of a chunk that must be scored: the logits of each predict the next token of the
    /// `prompt`. A preempted sequence reads its tokens again, and positions that have been scored are skipped.
    pub(super) fn positions(
        &self,
        chunk: &Chunk,
        prompt: &[i64],
    ) -> impl Iterator<Item = ScoredPosition> {
        let end = chunk.end.min(prompt.len() - 1);
        let start = self.read().max(chunk.start);
        let (sequence, top) = (chunk.sequence, self.top);
        (start..end).map(move |position| ScoredPosition {
            sequence,
            position,
            next: prompt[position + 1],
            top,
        })
    }
}

impl From<PromptScores> for PromptLogprobs {
    fn from(scores: PromptScores) -> PromptLogprobs {
        Arc::from(scores.tokens)
    }
}

/// A position of a prompt that is scored in a step.
#[derive(Debug, Clone, Copy)]
pub(super) struct ScoredPosition {
    /// The index among the running sequences.
    pub(super) sequence: usize,
    pub(super) position: usize,
    /// The token at the next position.
    next: i64,
    top: usize,
}

/// Computes a step. Its first `ends` rows of logits belong to sequences that get a token, the other rows to the
/// `scored` positions. Returns the logits of the former, if there are any, and the log-probabilities at the latter.
pub(super) fn score_in_blocks<M: EngineModel>(
    model: &M,
    step: RaggedStep<'_, '_>,
    ends: usize,
    scored: &[ScoredPosition],
    limits: &RequestLimits,
) -> Result<(Option<Tensor>, Vec<TokenLogprobs>)> {
    let vocabulary = limits.vocab_size;
    let rows = (BLOCK_BYTES / size_of::<f32>() / vocabulary.max(1)).max(1);
    let parts: Vec<&[ScoredPosition]> = scored.chunks(rows).collect();
    let own = usize::from(ends > 0);
    let mut blocks = Vec::with_capacity(parts.len() + own);
    blocks.extend((ends > 0).then_some(ends));
    blocks.extend(parts.iter().map(|part| part.len()));
    let mut end_logits = None;
    let (mut scores, mut buffer) = (Vec::with_capacity(scored.len()), Vec::new());
    model.forward_in_blocks(step, &blocks, &mut |number, logits| {
        let rows = blocks.get(number).map_or(0, |rows| *rows as i64);
        limits.check_logits(&logits.size(), rows)?;
        match number.checked_sub(own).and_then(|part| parts.get(part)) {
            None => end_logits = Some(logits),
            Some(part) => scores.extend(score(&logits, part, &mut buffer)?),
        }
        Ok(())
    })?;
    if scores.len() != scored.len() || end_logits.is_some() != (ends > 0) {
        return Err(Error::Scheduler(
            "a step has fewer logits than were asked for",
        ));
    }
    Ok((end_logits, scores))
}

/// Returns the log-probabilities of the next tokens of some positions, whose logits are the rows of `logits (N, V)`.
/// `buffer` is reused from call to call.
fn score(
    logits: &Tensor,
    positions: &[ScoredPosition],
    buffer: &mut Vec<f32>,
) -> Result<Vec<TokenLogprobs>> {
    if stays_on_device(logits) {
        return score_on_device(logits, positions);
    }
    let vocabulary = to_host(logits, buffer)?;
    let rows = buffer.chunks_exact(vocabulary);
    let one = |(row, position): (&[f32], &ScoredPosition)| {
        // The ids of prompts are checked when a request is submitted.
        Logprobs::of(row, position.top).of_token(position.next)
    };
    Ok(rows.zip(positions).filter_map(one).collect())
}

/// Scores the rows on their device, so that only the requested values are copied and not the logits.
fn score_on_device(logits: &Tensor, positions: &[ScoredPosition]) -> Result<Vec<TokenLogprobs>> {
    let logits = logits.f_to_kind(Kind::Float)?;
    let vocabulary = logits.size().last().copied().unwrap_or(0);
    let next: Vec<i64> = positions.iter().map(|position| position.next).collect();
    let next = to_device(Tensor::f_from_slice(&next)?, logits.device())?.f_unsqueeze(1)?;
    let own = logits.f_gather(1, &next, false)?;
    let normalizer = logits.f_logsumexp(&[1i64][..], true)?;
    let better = logits
        .f_gt_tensor(&own)?
        .f_sum_dim_intlist(&[1i64][..], true, Kind::Int64)?;
    let most = positions.iter().map(|position| position.top).max();
    let most = i64::try_from(most.unwrap_or(0)).map_or(vocabulary, |most| most.min(vocabulary));
    let (values, ids) = logits.f_topk(most, 1, true, true)?;
    // One copy of each dtype.
    let values = Tensor::f_cat(&[own, values], 1)?.f_sub(&normalizer)?;
    let numbers = Tensor::f_cat(&[better, ids], 1)?;
    let values =
        Vec::<f32>::try_from(overdrive_sys::transfer::to_host(&values)?.f_flatten(0, -1)?)?;
    let numbers =
        Vec::<i64>::try_from(overdrive_sys::transfer::to_host(&numbers)?.f_flatten(0, -1)?)?;
    let width = most.unsigned_abs() as usize + 1;
    let rows = values.chunks_exact(width).zip(numbers.chunks_exact(width));
    let one = |((values, numbers), position): ((&[f32], &[i64]), &ScoredPosition)| {
        let best = numbers.iter().copied().zip(values.iter().copied());
        let mut top: Vec<(i64, f32)> = best.skip(1).take(position.top).collect();
        top.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        TokenLogprobs {
            logprob: values[0],
            rank: numbers[0].unsigned_abs() as usize + 1,
            top,
        }
    };
    Ok(rows.zip(positions).map(one).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_scores_as_the_host_does() {
        tch::manual_seed(3);
        let logits = Tensor::randn([4, 50], (Kind::Float, tch::Device::Cpu)) * 3.0;
        let position = |(position, (next, top)): (usize, (i64, usize))| ScoredPosition {
            sequence: 0,
            position,
            next,
            top,
        };
        let wanted = [(0, 3), (49, 0), (7, 1), (20, 60)].into_iter();
        let positions: Vec<_> = wanted.enumerate().map(position).collect();
        let host = score(&logits, &positions, &mut Vec::new()).unwrap();
        let device = score_on_device(&logits, &positions).unwrap();
        for (own, other) in device.iter().zip(&host) {
            assert!((own.logprob - other.logprob).abs() < 1e-5);
            assert_eq!(own.rank, other.rank);
            let ids = |one: &TokenLogprobs| one.top.iter().map(|x| x.0).collect::<Vec<_>>();
            assert_eq!(ids(own), ids(other));
            for (a, b) in own.top.iter().zip(&other.top) {
                assert!((a.1 - b.1).abs() < 1e-5);
            }
        }
        let lengths: Vec<usize> = device.iter().map(|one| one.top.len()).collect();
        assert_eq!(lengths, [3, 0, 1, 50]);
    }
}
