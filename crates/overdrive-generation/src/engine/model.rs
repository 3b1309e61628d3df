use overdrive_kv_cache::KvCache;
use overdrive_transformer::{CausalLm, ForwardInput, Logits, ModelConfig, RopeScaling};
use tch::{Device, Kind, Tensor};

use crate::Result;

/// What an [`Engine`](crate::Engine) asks of a model: [`CausalLm`] gives it, and so can any decoder
/// whose attention goes through [`KvCache::attend`].
pub trait EngineModel {
    /// What its cache holds for each token.
    ///
    /// # Errors
    /// When the model is of a kind whose cache is not known.
    fn cache_shape(&self) -> Result<CacheShape>;

    /// Size of the vocabulary.
    fn vocab_size(&self) -> usize;

    /// The most positions it takes in a batch with other texts.
    fn context(&self) -> usize;

    /// Logits `(N, V)` of one step.
    ///
    /// # Errors
    /// Whatever fails. The engine undoes the step.
    fn forward(&self, step: RaggedStep<'_, '_>) -> Result<Tensor>;
}

/// The cache of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheShape {
    /// How many layers.
    pub layers: usize,
    /// Key and value heads of a layer.
    pub kv_heads: i64,
    /// Channels of a head.
    pub head_dim: i64,
    /// Kind of keys and values.
    pub kind: Kind,
    /// Where they are.
    pub device: Device,
}

/// The new tokens of all texts of a step, `T` in all, one text after the other in one row. The cache
/// knows which token belongs to which text; the model need not.
#[derive(Debug)]
pub struct RaggedStep<'a, 'c> {
    /// Token ids `(1, T)`, i64.
    pub input_ids: &'a Tensor,
    /// The place of each token in its own text, `(1, T)`, i64.
    pub position_ids: &'a Tensor,
    /// Keys and values of the texts.
    pub cache: &'a mut (dyn KvCache + 'c),
    /// Of which of the `T` tokens logits are wanted, i64 `(N,)`.
    pub places: &'a Tensor,
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
        let mut context = self.config().max_position_embeddings();
        if let ModelConfig::Llama(config) = self.config()
            && let RopeScaling::LongRope(long) = &config.rope_scaling
        {
            // Beyond it the frequencies of all texts of a batch are those of the longest.
            context = context.min(long.original_max_position_embeddings);
        }
        context.unsigned_abs() as usize
    }

    fn forward(&self, step: RaggedStep<'_, '_>) -> Result<Tensor> {
        let input = ForwardInput::new(step.input_ids)
            .with_position_ids(step.position_ids)
            .with_cache(step.cache)
            .with_logits(Logits::At(step.places));
        Ok(CausalLm::forward(self, input)?.f_squeeze_dim(0)?)
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

    fn forward(&self, step: RaggedStep<'_, '_>) -> Result<Tensor> {
        (**self).forward(step)
    }
}
