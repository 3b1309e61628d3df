use std::sync::Arc;

use overdrive_kv_cache::{CacheShape, KvCache};
use overdrive_nn::AdapterRows;
use overdrive_transformer::{
    CausalLm, ForwardInput, ImageFeatures, ImageTokens, Logits, VisionConfig,
};
use tch::{Device, Tensor};

use super::scheduler::Chunk;
use crate::{Error, Result};

/// The model of an [`Engine`](crate::Engine): [`CausalLm`], or any decoder whose attention goes through
/// [`KvCache::attend`].
pub trait EngineModel {
    /// Returns the shape of the model's cache: `windows` (an entry for each layer), `recurrent`, `kv_heads`, `head_dim`,
    /// `kind` and `device`.
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

    /// Returns the vision tower and the tokens of images, if the model sees images. Default: `None`.
    fn vision(&self) -> Option<&VisionConfig> {
        None
    }

    /// Returns the image tokens of patches `pixels (N, W)`, which are those of `grids` of `[height, width]` patches one
    /// after another. Default: an error, for a model that sees no images.
    ///
    /// # Errors
    /// An error of the model.
    fn encode_images(&self, pixels: &Tensor, grids: &[[i64; 2]]) -> Result<ImageFeatures> {
        let _images = (pixels, grids);
        Err(overdrive_transformer::Error::NoVision.into())
    }

    /// Returns the logits `(N, V)` of one step.
    ///
    /// # Errors
    /// Any error of the model. The engine undoes the step.
    fn forward(&self, step: RaggedStep<'_, '_>) -> Result<Tensor>;

    /// Computes one step as [`forward`](EngineModel::forward) does, and calls `on_logits` with the number of each of
    /// the `blocks` of rows, in order, and its logits: block `i` has the next `blocks[i]` of the `N` rows. For the
    /// log-probabilities of prompts. By default the logits of all rows are in memory at once; a model that applies its
    /// head to a block at a time needs the memory of one block.
    ///
    /// # Errors
    /// As [`forward`](EngineModel::forward), and those of `on_logits`.
    fn forward_in_blocks(
        &self,
        step: RaggedStep<'_, '_>,
        blocks: &[usize],
        on_logits: &mut dyn FnMut(usize, Tensor) -> Result<()>,
    ) -> Result<()> {
        let logits = self.forward(step)?;
        let mut start = 0;
        for (number, &rows) in blocks.iter().enumerate() {
            let rows = rows as i64;
            on_logits(number, logits.f_narrow(0, start, rows)?)?;
            start += rows;
        }
        Ok(())
    }

    /// Returns the normalised hidden states `(B, T, C)` before the head, for embeddings of text.
    ///
    /// # Errors
    /// Any error of the model; [`Error::NoHiddenStates`] by default, for a model that does not give them.
    fn hidden_states(&self, input_ids: &Tensor) -> Result<Tensor> {
        let _ids = input_ids;
        Err(Error::NoHiddenStates)
    }
}

/// The new tokens of all sequences of a step, `T` in all, concatenated in one row. The cache knows
/// which token belongs to which sequence; the model need not.
#[derive(Debug)]
pub struct RaggedStep<'a, 'c> {
    /// The token ids `(1, T)`, i64.
    pub input_ids: &'a Tensor,
    /// The position of each token in its own sequence, `(1, T)`, i64. If a sequence of the step has images, the three
    /// positions of each token, `(3, 1, T)`.
    pub position_ids: &'a Tensor,
    /// A number that all positions are below.
    pub position_bound: i64,
    /// The keys and values of the sequences.
    pub cache: &'a mut (dyn KvCache + 'c),
    /// The indices of the `N` tokens of the row whose logits are wanted, i64 `(N,)`.
    pub logits_indices: &'a Tensor,
    /// The image tokens among the tokens of the row, if there are any. A model without
    /// [`vision`](EngineModel::vision) never gets any.
    pub images: Option<&'a ImageTokens>,
    /// The adapters of the tokens, if a sequence of the step has one. A model without
    /// [`adapters`](EngineModel::adapters) never gets any.
    pub adapters: Option<&'a StepAdapters>,
}

/// The adapters of a step: runs of tokens, or in a captured step of several adapters a
/// [`RowChoice`](overdrive_nn::RowChoice).
#[derive(Debug, Clone)]
pub struct StepAdapters {
    /// The adapter of each of the `T` tokens.
    pub tokens: AdapterRows,
    /// The adapter of each of the `N` tokens whose logits are wanted.
    pub logits: AdapterRows,
}

impl StepAdapters {
    /// Returns the adapters of a step, if any of its sequences has one; `rows` are the sequences of the tokens whose
    /// logits are wanted.
    pub(super) fn of(
        chunks: &[Chunk],
        rows: &[usize],
        adapter: impl Fn(usize) -> Option<Arc<str>>,
    ) -> Option<StepAdapters> {
        // Most steps have none.
        chunks.iter().find_map(|chunk| adapter(chunk.sequence))?;
        let tokens = chunks.iter();
        let tokens = tokens.map(|chunk| (chunk.len(), adapter(chunk.sequence)));
        // If none are wanted, the logits of the last token are computed and not used.
        let last = chunks.last().map(|chunk| chunk.sequence);
        let rows = if rows.is_empty() {
            last.as_slice()
        } else {
            rows
        };
        Some(StepAdapters {
            tokens: AdapterRows::new(tokens),
            logits: AdapterRows::new(rows.iter().map(|sequence| (1, adapter(*sequence)))),
        })
    }
}

impl EngineModel for CausalLm {
    fn cache_shape(&self) -> Result<CacheShape> {
        Ok(CausalLm::cache_shape(self))
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

    fn vision(&self) -> Option<&VisionConfig> {
        self.config().vision()
    }

    fn encode_images(&self, pixels: &Tensor, grids: &[[i64; 2]]) -> Result<ImageFeatures> {
        Ok(CausalLm::encode_images(self, pixels, grids)?)
    }

    fn forward(&self, step: RaggedStep<'_, '_>) -> Result<Tensor> {
        let adapters = step.adapters;
        let hidden = wanted_states(self, step)?;
        // The head sees fewer rows than the blocks.
        let _logits = adapters.map(|adapters| adapters.logits.clone().scope());
        Ok(self.logits(&hidden)?.f_squeeze_dim(0)?)
    }

    fn forward_in_blocks(
        &self,
        step: RaggedStep<'_, '_>,
        blocks: &[usize],
        on_logits: &mut dyn FnMut(usize, Tensor) -> Result<()>,
    ) -> Result<()> {
        let adapters = step.adapters;
        let hidden = wanted_states(self, step)?;
        let mut start = 0;
        for (number, &rows) in blocks.iter().enumerate() {
            let narrowed = adapters.map(|adapters| adapters.logits.narrow(start, rows));
            let scope = narrowed.transpose()?.map(AdapterRows::scope);
            let block = hidden.f_narrow(1, start as i64, rows as i64)?;
            let logits = self.logits(&block)?.f_squeeze_dim(0)?;
            drop(scope);
            on_logits(number, logits)?;
            start += rows;
        }
        Ok(())
    }

    fn hidden_states(&self, input_ids: &Tensor) -> Result<Tensor> {
        Ok(CausalLm::hidden_states(self, ForwardInput::new(input_ids))?)
    }
}

/// Returns the hidden states `(1, N, C)` of the tokens whose logits are wanted.
fn wanted_states(model: &CausalLm, step: RaggedStep<'_, '_>) -> Result<Tensor> {
    let mut input = ForwardInput::new(step.input_ids)
        .with_position_ids(step.position_ids)
        .with_position_bound(step.position_bound)
        .with_cache(step.cache)
        .with_logits(Logits::At(step.logits_indices));
    input.images = step.images;
    let _tokens = step
        .adapters
        .map(|adapters| adapters.tokens.clone().scope());
    Ok(CausalLm::hidden_states(model, input)?)
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

    fn vision(&self) -> Option<&VisionConfig> {
        (**self).vision()
    }

    fn encode_images(&self, pixels: &Tensor, grids: &[[i64; 2]]) -> Result<ImageFeatures> {
        (**self).encode_images(pixels, grids)
    }

    fn forward(&self, step: RaggedStep<'_, '_>) -> Result<Tensor> {
        (**self).forward(step)
    }

    fn forward_in_blocks(
        &self,
        step: RaggedStep<'_, '_>,
        blocks: &[usize],
        on_logits: &mut dyn FnMut(usize, Tensor) -> Result<()>,
    ) -> Result<()> {
        (**self).forward_in_blocks(step, blocks, on_logits)
    }

    fn hidden_states(&self, input_ids: &Tensor) -> Result<Tensor> {
        (**self).hidden_states(input_ids)
    }
}
