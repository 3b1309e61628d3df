use overdrive_kv_cache::{PagedCache, PagedCacheConfig, SequenceId};
use overdrive_sys::transfer::to_device;
use overdrive_transformer::{CausalLm, ForwardInput, Logits};
use tch::Tensor;

use super::DecoderSize;
use crate::captured::CapturedSteps;
use crate::{GenerationConfig, Result};

/// The minimum number of new tokens for which a capture is worthwhile: it takes as long as several steps.
const WORTH_A_CAPTURE: usize = 8;

/// A batch of rows of any length over a paged cache: all new tokens of a step are concatenated in one
/// row of the model, without padding.
pub(super) struct Ragged<'a> {
    /// The captured steps; dropped before the fields that they use.
    captured: Option<CapturedSteps>,
    /// The logits `(B, V)` of the step that has been begun.
    ahead: Option<Tensor>,
    model: &'a CausalLm,
    cache: PagedCache,
    rows: Vec<SequenceId>,
    /// The prompts that have not been read.
    prompts: Vec<Vec<i64>>,
    chunk: Option<usize>,
}

impl<'a> Ragged<'a> {
    pub(super) fn new(
        model: &'a CausalLm,
        prompts: &[Vec<i64>],
        config: &GenerationConfig,
        size: DecoderSize,
    ) -> Result<Self> {
        let mut paged = PagedCacheConfig {
            // All prompts are added before any has been read: there is no prefix to find.
            enable_prefix_caching: false,
            slack: size.slack as i64,
            ..PagedCacheConfig::of(&model.cache_shape())
        };
        // A reordering holds two generations of beams at once, whose last blocks differ.
        let blocks = size
            .positions
            .div_ceil(paged.block_size.unsigned_abs() as usize)
            + 1;
        paged.num_blocks = size.rows * (blocks + 1);
        let mut cache = PagedCache::new(paged)?;
        let captured = (size.new_tokens >= WORTH_A_CAPTURE)
            .then(|| CapturedSteps::new(model, &cache, size.rows, size.positions))
            .flatten();
        let rows = prompts
            .iter()
            .map(|prompt| Ok(cache.add(prompt)?.0))
            .collect::<Result<_>>()?;
        Ok(Ragged {
            captured,
            ahead: None,
            model,
            cache,
            rows,
            prompts: prompts.to_vec(),
            chunk: config.prefill_chunk_size,
        })
    }

    pub(super) fn prefill(&mut self) -> Result<Tensor> {
        let prompts = std::mem::take(&mut self.prompts);
        let chunk = self.chunk.unwrap_or(usize::MAX);
        let mut logits: Vec<Option<Tensor>> = prompts.iter().map(|_| None).collect();
        let mut read = 0usize;
        while logits.iter().any(Option::is_none) {
            let unread: Vec<usize> = (0..prompts.len())
                .filter(|&row| logits[row].is_none())
                .collect();
            let upto = |row: usize| prompts[row].len().min(read.saturating_add(chunk));
            let new_tokens: Vec<(SequenceId, &[i64])> = unread
                .iter()
                .map(|&row| (self.rows[row], &prompts[row][read..upto(row)]))
                .collect();
            let last = self.forward(&new_tokens, false)?;
            for (index, row) in unread.into_iter().enumerate() {
                if upto(row) == prompts[row].len() {
                    logits[row] = Some(last.f_narrow(1, index as i64, 1)?);
                }
            }
            read = read.saturating_add(chunk);
        }
        let logits: Vec<Tensor> = logits.into_iter().flatten().collect();
        Ok(Tensor::f_cat(&logits, 0)?)
    }

    pub(super) fn step(&mut self, tokens: &[i64]) -> Result<Tensor> {
        if let Some(logits) = self.ahead.take() {
            let rows = &self.rows;
            let row = |id| rows.iter().position(|row| *row == id);
            self.cache.land(|id| tokens.get(row(id)?).copied());
            return Ok(logits.f_unsqueeze(1)?);
        }
        if let Some(captured) = &mut self.captured {
            let rows = self.rows.iter().copied();
            let new_tokens: Vec<_> = rows.zip(tokens.iter().copied()).collect();
            let none = vec![None; new_tokens.len()];
            let run = captured.run(self.model, &mut self.cache, &new_tokens, None, &none)?;
            if let Some(replayed) = run {
                replayed.step.commit();
                return Ok(replayed.logits.f_unsqueeze(1)?);
            }
        }
        let rows = self.rows.clone();
        let new_tokens: Vec<(SequenceId, &[i64])> =
            rows.iter().copied().zip(tokens.chunks(1)).collect();
        Ok(self.forward(&new_tokens, false)?.f_transpose(0, 1)?)
    }

    /// Returns `true` if the next step can be replayed before its tokens are known.
    pub(super) fn looks_ahead(&self) -> bool {
        let needed = self.rows.iter().map(|id| self.cache.blocks_needed(*id, 1));
        let none = vec![None; self.rows.len()];
        (self.captured.as_ref()).is_some_and(|captured| captured.knows(&none))
            && needed.sum::<usize>() <= self.cache.free_blocks()
    }

    /// Begins the next step, if it can be replayed.
    pub(super) fn look_ahead(&mut self, tokens: &Tensor) -> Result<()> {
        if !self.looks_ahead() {
            return Ok(());
        }
        let Some(captured) = &mut self.captured else {
            return Ok(());
        };
        let none = vec![None; self.rows.len()];
        let new_tokens: Vec<_> = self.rows.iter().map(|id| (*id, 0)).collect();
        let ids = tokens.f_flatten(0, -1)?;
        let (model, cache) = (self.model, &mut self.cache);
        if let Some(replayed) = captured.run(model, cache, &new_tokens, Some(&ids), &none)? {
            replayed.step.launch();
            self.ahead = Some(replayed.logits);
        }
        Ok(())
    }

    /// Discards the step that has been begun, because a different one follows.
    fn turn_back(&mut self) {
        if self.ahead.take().is_some() {
            self.cache.land(|_| None);
        }
    }

    pub(super) fn extend(&mut self, tokens: &[i64]) -> Result<Tensor> {
        self.turn_back();
        let row = self.rows[0];
        self.forward(&[(row, tokens)], true)
    }

    pub(super) fn truncate(&mut self, len: usize) -> Result<()> {
        self.turn_back();
        Ok(self.cache.truncate(self.rows[0], len)?)
    }

    pub(super) fn reorder(&mut self, order: &[usize]) -> Result<()> {
        self.turn_back();
        let mut taken = vec![false; self.rows.len()];
        let mut rows = Vec::with_capacity(order.len());
        for &old in order {
            // The first copy of a row keeps its sequence; others share its blocks.
            rows.push(if std::mem::replace(&mut taken[old], true) {
                self.cache.fork(self.rows[old])?
            } else {
                self.rows[old]
            });
        }
        for (row, taken) in self.rows.iter().zip(taken) {
            if !taken {
                self.cache.release(*row)?;
            }
        }
        self.rows = rows;
        Ok(())
    }

    /// Returns the logits `(1, N, V)` of the last new token of each sequence, or of all new tokens.
    fn forward(&mut self, new_tokens: &[(SequenceId, &[i64])], all: bool) -> Result<Tensor> {
        let mut batch = self.cache.batch(new_tokens)?;
        let (ids, positions) = (batch.input_ids()?, batch.position_ids()?);
        let indices = Tensor::f_from_slice(&batch.last_indices())?;
        let indices = to_device(indices, ids.device())?;
        let wanted = if all {
            Logits::All
        } else {
            Logits::At(&indices)
        };
        let input = ForwardInput::new(&ids)
            .with_position_ids(&positions)
            .with_position_bound(batch.longest())
            .with_cache(&mut batch)
            .with_logits(wanted);
        let logits = self.model.forward(input)?;
        batch.commit()?;
        Ok(logits)
    }
}
