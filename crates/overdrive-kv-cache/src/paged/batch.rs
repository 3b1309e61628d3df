use overdrive_attention::{PagedLayout, PagedSlots, attention_paged};
use overdrive_sys::transfer::to_device;
use tch::Tensor;

use super::block_tables::{PreparedSequence, SequenceId};
use super::cache::{PagedCache, to_i64};
use crate::key_values::{KeyValues, Spec, check_truncation};
use crate::recurrent::{DeltaRuleStep, StateStep};
use crate::{AttendOptions, Error, KvCache, KvView, Result};

/// The name of this cache in errors.
const NAME: &str = "a batch of a paged cache";

/// A step of a model over new tokens of several sequences of a [`PagedCache`], concatenated in one row.
///
/// Run the model on [`input_ids`](PagedBatch::input_ids) and
/// [`position_ids`](PagedBatch::position_ids) `(1, N)` with this batch as its cache; each sequence sees only
/// its own tokens, without padding or a mask. The logits at
/// [`last_indices`](PagedBatch::last_indices) are those of the next tokens.
///
/// Each layer attends once; [`truncate(0)`](KvCache::truncate) restarts the step. The sequences do not
/// change before [`commit`](PagedBatch::commit): dropping the batch, because the model failed or was
/// interrupted, leaves the cache unchanged.
#[derive(Debug)]
pub struct PagedBatch<'a> {
    step: PagedStep<'a>,
    slots: PagedSlots,
    layout: PagedLayout,
    /// `true` for each layer that has received the new tokens.
    written: Vec<bool>,
}

impl<'a> PagedBatch<'a> {
    pub(super) fn new(
        step: PagedStep<'a>,
        slots: PagedSlots,
        layout: PagedLayout,
    ) -> PagedBatch<'a> {
        PagedBatch {
            layout,
            written: vec![false; step.cache.layers()],
            step,
            slots,
        }
    }

    /// Adds the new tokens to their sequences.
    ///
    /// # Errors
    /// [`Error::StepNotRun`] if a layer has not received them; the step is then undone.
    pub fn commit(self) -> Result<()> {
        if let Some(layer) = self.written.iter().position(|written| !written) {
            // Dropping the step on return cancels it.
            return Err(Error::StepNotRun { layer });
        }
        self.step.commit()
    }

    /// Returns the total number of new tokens.
    pub fn tokens(&self) -> usize {
        self.slots.len()
    }

    /// Returns the sequences, in order.
    pub fn sequences(&self) -> impl Iterator<Item = SequenceId> {
        self.step.prepared.iter().map(|new| new.id)
    }

    /// Returns the new tokens of all sequences in one row: i64 `(1, N)` on the device of the cache.
    ///
    /// # Errors
    /// An error of libtorch.
    pub fn input_ids(&self) -> Result<Tensor> {
        let tokens = self.step.prepared.iter().flat_map(|new| &new.tokens);
        self.row(tokens.copied().collect())
    }

    /// Returns the position of each new token in its sequence, with the sequence's
    /// [offset](PagedCache::set_position_offset): i64 `(1, N)`.
    ///
    /// # Errors
    /// An error of libtorch.
    pub fn position_ids(&self) -> Result<Tensor> {
        let positions =
            |new: &PreparedSequence| new.position..new.position + to_i64(new.tokens.len());
        self.row(self.step.prepared.iter().flat_map(positions).collect())
    }

    /// Returns the length of the longest sequence, including its new tokens: all positions are below it, unless an
    /// [offset](PagedCache::set_position_offset) is positive.
    pub fn longest(&self) -> i64 {
        let lengths = self
            .step
            .prepared
            .iter()
            .map(|new| new.past + new.tokens.len());
        to_i64(lengths.max().unwrap_or(0))
    }

    /// Returns the index in the row of the last new token of each sequence that has new
    /// tokens.
    pub fn last_indices(&self) -> Vec<i64> {
        let ends = self.step.prepared.iter().scan(0, |end, new| {
            let length = new.tokens.len();
            *end += length;
            Some((length, *end))
        });
        ends.filter(|(length, _)| *length > 0)
            .map(|(_, end)| to_i64(end - 1))
            .collect()
    }

    fn row(&self, numbers: Vec<i64>) -> Result<Tensor> {
        let row = Tensor::f_from_slice(&numbers)?.f_unsqueeze(0)?;
        Ok(to_device(row, self.step.cache.device())?)
    }

    /// Writes the new keys and values `(1, H_kv, N, D)` of a layer to their blocks.
    fn write(&mut self, layer: usize, keys: &Tensor, values: &Tensor) -> Result<()> {
        self.check_new(layer)?;
        self.check(layer, keys, values)?;
        // `check` comes first: a step with an error writes nothing.
        let pool = self.step.cache.pool_mut(layer)?;
        let rows = |new: &Tensor| new.f_squeeze_dim(0)?.f_transpose(0, 1);
        pool.write(&rows(keys)?, &rows(values)?, &self.slots)?;
        self.written[layer] = true;
        Ok(())
    }

    fn restart(&mut self) {
        self.written.fill(false);
        if let Some(states) = &mut self.step.states {
            states.restart();
        }
    }

    /// Checks that the layer exists and has not run in this step.
    fn check_new(&self, layer: usize) -> Result<()> {
        let layers = self.written.len();
        match self.written.get(layer) {
            None => Err(Error::NoSuchLayer { layer, layers }),
            Some(true) => Err(Error::LayerTwice { layer }),
            Some(false) => Ok(()),
        }
    }

    /// Attends to the tokens of a layer that has received the new ones.
    fn attend_written(
        &mut self,
        layer: usize,
        query: &Tensor,
        options: &AttendOptions<'_>,
    ) -> Result<Tensor> {
        let pool = self.step.cache.pool(layer)?;
        // The paged kernel reads tokens as rows, `(N, H, D)`.
        let rows = query.f_squeeze_dim(0)?.f_transpose(0, 1)?;
        let (keys, values) = (pool.keys.view(), pool.values.view());
        let options = options.causal();
        let (output, _) = attention_paged(&rows, keys, values, &self.layout, &options)?;
        Ok(output.f_transpose(0, 1)?.f_unsqueeze(0)?)
    }

    fn check(&mut self, layer: usize, keys: &Tensor, values: &Tensor) -> Result<()> {
        let new = KeyValues::new(layer, keys, values)?;
        let tokens = to_i64(self.tokens());
        if (new.spec.batch, new.tokens) != (1, tokens) {
            let expected = format!(
                "(1, H, {tokens}, D): the {tokens} new tokens of all sequences of the step"
            );
            return Err(overdrive_core::Error::shape("keys", keys.size(), expected).into());
        }
        let config = self.step.cache.config();
        let heads = config.heads(layer);
        let held = Spec {
            heads: heads.kv_heads,
            key_dim: heads.head_dim,
            value_dim: config.value_dim(layer),
            kind: config.kind,
            device: config.device,
            batch: 1,
        };
        held.check_fit(layer, &new.spec)
    }
}

fn check_no_mask(options: &AttendOptions<'_>) -> Result<()> {
    if options.mask.is_none() {
        return Ok(());
    }
    Err(Error::Unsupported {
        cache: NAME,
        what: "take a mask",
        hint: "it separates its sequences without one; pass no attention mask to the model",
    })
}

impl KvCache for PagedBatch<'_> {
    /// Always fails with [`Error::NotDense`].
    fn append(&mut self, _: usize, _: &Tensor, _: &Tensor) -> Result<KvView> {
        Err(Error::NotDense { cache: NAME })
    }

    /// Attends with the query `(1, H, N, D)`, the keys and the values `(1, H_kv, N, D)` of the new
    /// tokens of all sequences; each sequence attends to its own tokens.
    fn attend(
        &mut self,
        layer: usize,
        query: &Tensor,
        keys: &Tensor,
        values: &Tensor,
        options: &AttendOptions<'_>,
    ) -> Result<Tensor> {
        check_no_mask(options)?;
        self.write(layer, keys, values)?;
        self.attend_written(layer, query, options)
    }

    fn attend_shared(
        &mut self,
        layer: usize,
        query: &Tensor,
        options: &AttendOptions<'_>,
    ) -> Result<Tensor> {
        check_no_mask(options)?;
        match self.written.get(layer) {
            Some(true) => self.attend_written(layer, query, options),
            _ => Err(Error::NotKept { layer }),
        }
    }

    /// Advances the states of all sequences by their new tokens `(1, N, …)`.
    fn delta_rule(&mut self, layer: usize, step: &DeltaRuleStep) -> Result<Tensor> {
        self.check_new(layer)?;
        step.check_no_gradient(layer)?;
        let PagedStep { cache, states, .. } = &mut self.step;
        let (Some(states), true) = (states, cache.config().is_recurrent(layer)) else {
            return Err(Error::Unsupported {
                cache: NAME,
                what: "hold the state of a recurrent layer",
                hint: "create the PagedCache with `PagedCacheConfig::recurrent`",
            });
        };
        let before = cache.config().recurrent[..layer].iter();
        let number = before.filter(|recurrent| **recurrent).count();
        let output = cache.states().pool.advance(states, number, step.flat()?)?;
        self.written[layer] = true;
        Ok(output.f_unsqueeze(0)?)
    }

    fn layers(&self) -> usize {
        self.written.len()
    }

    /// Returns 0: sequences differ in their number of past tokens. Positions are those of
    /// [`position_ids`](PagedBatch::position_ids).
    fn len(&self) -> i64 {
        0
    }

    /// Restarts the step for `len` 0, which is the only valid length.
    fn truncate(&mut self, len: i64) -> Result<()> {
        match len {
            0 => {
                self.restart();
                Ok(())
            }
            len => check_truncation(len, 0),
        }
    }

    /// Restarts the step; [`PagedCache::release`] removes a sequence.
    fn reset(&mut self) {
        self.restart();
    }

    fn reorder(&mut self, _: &Tensor) -> Result<()> {
        Err(Error::Unsupported {
            cache: NAME,
            what: "reorder rows",
            hint: "between steps, fork and release sequences of the PagedCache",
        })
    }

    fn fork(&self) -> Result<Box<dyn KvCache>> {
        Err(Error::Unsupported {
            cache: NAME,
            what: "be forked",
            hint: "between steps, fork sequences of the PagedCache",
        })
    }

    fn bytes(&self) -> u64 {
        self.step.cache.bytes()
    }

    fn bytes_per_token(&self) -> f64 {
        self.step.cache.bytes_per_token()
    }

    fn state(&self) -> Result<Vec<(String, Tensor)>> {
        Err(Error::Unsupported {
            cache: NAME,
            what: "be saved",
            hint: "keep the token ids and run them again, or save a cache of one sequence",
        })
    }

    fn load_state(&mut self, _: &[(String, Tensor)]) -> Result<()> {
        Err(Error::Unsupported {
            cache: NAME,
            what: "be loaded",
            hint: "keep the token ids and run them again, or load a cache of one sequence",
        })
    }
}

/// The new tokens of some sequences, and the blocks that were allocated for them. Dropping it frees the blocks.
#[derive(Debug)]
pub(super) struct PagedStep<'a> {
    cache: &'a mut PagedCache,
    prepared: Vec<PreparedSequence>,
    /// The next states of the sequences with new tokens, if the model has recurrent layers.
    states: Option<StateStep>,
}

impl<'a> PagedStep<'a> {
    pub(super) fn new(
        cache: &'a mut PagedCache,
        prepared: Vec<PreparedSequence>,
        states: Option<StateStep>,
    ) -> Self {
        PagedStep {
            cache,
            prepared,
            states,
        }
    }

    pub(super) fn prepared(&self) -> &[PreparedSequence] {
        &self.prepared
    }

    pub(super) fn cache(&self) -> &PagedCache {
        self.cache
    }

    /// Returns a step over the same cache that adds nothing.
    pub(super) fn without_tokens(&mut self) -> PagedStep<'_> {
        PagedStep::new(self.cache, Vec::new(), None)
    }

    /// Adds the new tokens to their sequences.
    pub(super) fn commit(mut self) -> Result<()> {
        if let Some(states) = self.states.take() {
            let cache = &mut *self.cache;
            cache.states().commit(states, &self.prepared)?;
        }
        let prepared = std::mem::take(&mut self.prepared);
        // The step is emptied above, so `drop` has nothing left to cancel.
        self.cache.block_tables().commit(prepared);
        Ok(())
    }

    /// Passes the new tokens to the cache without adding them to their sequences.
    pub(super) fn launch(mut self) {
        let prepared = std::mem::take(&mut self.prepared);
        self.cache.block_tables().launch(prepared);
    }
}

impl Drop for PagedStep<'_> {
    fn drop(&mut self) {
        let prepared = std::mem::take(&mut self.prepared);
        self.cache.block_tables().cancel(prepared);
        if let Some(states) = self.states.take() {
            self.cache.states().pool.cancel(states);
        }
    }
}
