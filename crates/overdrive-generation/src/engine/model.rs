use std::sync::Arc;

use overdrive_kv_cache::KvCache;
use overdrive_nn::AdapterRows;
use overdrive_transformer::{CausalLm, ForwardInput, Logits};
use tch::{Device, Kind, Tensor};

use super::scheduler::Chunk;
use crate::{Error, Result};

/// The model of an [`Engine`](crate::Engine): [`CausalLm`], or any decoder whose attention goes through
/// [`KvCache::attend`].
pub trait EngineModel {
    /// Returns the shape of the model's cache.
    ///
    /// # Errors
    /// When the shape is not known.
    fn cache_shape(&self) -> Result<CacheShape>;

    /// Returns the size of the vocabulary.
    fn vocab_size(&self) -> usize;

    /// Returns the largest number of positions of a sequence in a batch with others.
    fn context(&self) -> usize;

    /// Returns the names of the adapters that requests can choose. Default: none.
    fn adapters(&self) -> Vec<String> {
        Vec::new()
    }

    /// Returns `true` if a sequence has the same bits whatever else is in a step. Default: on a CPU with
    /// [`set_batch_invariant`](crate::set_batch_invariant).
    fn is_batch_invariant(&self) -> bool {
        let on_cpu = |shape: CacheShape| shape.device == Device::Cpu;
        overdrive_kernels::is_batch_invariant() && self.cache_shape().is_ok_and(on_cpu)
    }

    /// Returns `true` if the first pass loads what later ones use, such as the kernels of a GPU, so that
    /// [`Engine::warm_up`](crate::Engine::warm_up) makes one. Default: `true` unless the cache lies on the CPU.
    fn loads_on_first_use(&self) -> bool {
        self.cache_shape()
            .is_ok_and(|shape| shape.device != Device::Cpu)
    }

    /// Returns the logits `(N, V)` of one step.
    ///
    /// # Errors
    /// Any error of the model. The engine undoes the step.
    fn forward(&self, step: RaggedStep<'_, '_>) -> Result<Tensor>;

    /// Returns the normalised hidden states `(B, T, C)` before the head, for embeddings of text.
    ///
    /// # Errors
    /// Any error of the model; [`Error::NoHiddenStates`] by default, for a model that does not give them.
    fn hidden_states(&self, input_ids: &Tensor) -> Result<Tensor> {
        let _ids = input_ids;
        Err(Error::NoHiddenStates)
    }
}

/// The shape of a model's cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheShape {
    /// The number of layers.
    pub layers: usize,
    /// The key/value heads of a layer.
    pub kv_heads: i64,
    /// The channels of a head.
    pub head_dim: i64,
    /// The dtype of keys and values.
    pub kind: Kind,
    /// The device of keys and values.
    pub device: Device,
}

/// The new tokens of all sequences of a step, `T` in all, concatenated in one row. The cache knows
/// which token belongs to which sequence; the model need not.
#[derive(Debug)]
pub struct RaggedStep<'a, 'c> {
    /// The token ids `(1, T)`, i64.
    pub input_ids: &'a Tensor,
    /// The position of each token in its own sequence, `(1, T)`, i64.
    pub position_ids: &'a Tensor,
    /// A number that all positions are below.
    pub position_bound: i64,
    /// The keys and values of the sequences.
    pub cache: &'a mut (dyn KvCache + 'c),
    /// The indices of the `N` tokens of the row whose logits are wanted, i64 `(N,)`.
    pub logits_indices: &'a Tensor,
    /// The adapters of the tokens, if a sequence of the step has one. A model without
    /// [`adapters`](EngineModel::adapters) never gets any.
    pub adapters: Option<&'a StepAdapters>,
}

/// The adapters of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepAdapters {
    /// The adapter of each of the `T` tokens.
    pub tokens: AdapterRows,
    /// The adapter of each of the `N` tokens whose logits are wanted.
    pub logits: AdapterRows,
}

impl StepAdapters {
    /// Returns the adapters of a step whose sequences `ends` get a token, if any of its sequences has one.
    pub(super) fn of(
        chunks: &[Chunk],
        ends: &[usize],
        adapter: impl Fn(usize) -> Option<Arc<str>>,
    ) -> Option<StepAdapters> {
        // Most steps have none.
        chunks.iter().find_map(|chunk| adapter(chunk.sequence))?;
        let tokens = chunks.iter();
        let tokens = tokens.map(|chunk| (chunk.end - chunk.start, adapter(chunk.sequence)));
        // Without a sequence that gets a token, the logits of the last one are computed and not used.
        let last = chunks.last().map(|chunk| chunk.sequence);
        let ends = if ends.is_empty() {
            last.as_slice()
        } else {
            ends
        };
        Some(StepAdapters {
            tokens: AdapterRows::new(tokens),
            logits: AdapterRows::new(ends.iter().map(|sequence| (1, adapter(*sequence)))),
        })
    }
}

impl EngineModel for CausalLm {
    fn cache_shape(&self) -> Result<CacheShape> {
        Ok(CacheShape {
            layers: self.num_layers(),
            kv_heads: self.config().num_key_value_heads(),
            head_dim: self.config().head_dim(),
            kind: self.kind(),
            device: self.device(),
        })
    }

    fn vocab_size(&self) -> usize {
        self.config().vocab_size().unsigned_abs() as usize
    }

    fn context(&self) -> usize {
        // Beyond it, all requests of a step would share the frequencies of the longest one.
        let context = self.config().ragged_context();
        context.unsigned_abs() as usize
    }

    fn adapters(&self) -> Vec<String> {
        self.adapter_names()
    }

    fn is_batch_invariant(&self) -> bool {
        CausalLm::is_batch_invariant(self)
    }

    fn forward(&self, step: RaggedStep<'_, '_>) -> Result<Tensor> {
        let input = ForwardInput::new(step.input_ids)
            .with_position_ids(step.position_ids)
            .with_position_bound(step.position_bound)
            .with_cache(step.cache)
            .with_logits(Logits::At(step.logits_indices));
        let scope = |rows: fn(&StepAdapters) -> &AdapterRows| {
            let rows = step.adapters.map(|adapters| rows(adapters).clone());
            rows.map(AdapterRows::scope)
        };
        let tokens = scope(|adapters| &adapters.tokens);
        let hidden = CausalLm::hidden_states(self, input)?;
        drop(tokens);
        // The head sees fewer rows than the blocks.
        let _logits = scope(|adapters| &adapters.logits);
        Ok(self.logits(&hidden)?.f_squeeze_dim(0)?)
    }

    fn hidden_states(&self, input_ids: &Tensor) -> Result<Tensor> {
        Ok(CausalLm::hidden_states(self, ForwardInput::new(input_ids))?)
    }
}

impl<M: EngineModel + ?Sized> EngineModel for &M {
    fn cache_shape(&self) -> Result<CacheShape> {
        (**self).cache_shape()
    }

    fn vocab_size(&self) -> usize {
        (**self).vocab_size()
    }

    fn context(&self) -> usize {
        (**self).context()
    }

    fn adapters(&self) -> Vec<String> {
        (**self).adapters()
    }

    fn is_batch_invariant(&self) -> bool {
        (**self).is_batch_invariant()
    }

    fn loads_on_first_use(&self) -> bool {
        (**self).loads_on_first_use()
    }

    fn forward(&self, step: RaggedStep<'_, '_>) -> Result<Tensor> {
        (**self).forward(step)
    }

    fn hidden_states(&self, input_ids: &Tensor) -> Result<Tensor> {
        (**self).hidden_states(input_ids)
    }
}
