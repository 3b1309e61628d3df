//! One step of decoding over a static cache, captured.

use overdrive_kv_cache::{KvCache, StaticCache, StaticCacheConfig};
use overdrive_transformer::{CausalLm, ForwardInput, Logits};
use tch::{Kind, Tensor};

use crate::{CaptureOptions, CudaGraph, Error, Result};

/// A static cache of the sizes of `model`, for `batch` rows of at most `max_len` tokens.
///
/// # Errors
/// When memory runs out.
pub fn static_cache_of(model: &CausalLm, batch: i64, max_len: i64) -> Result<StaticCache> {
    let config = model.config();
    Ok(StaticCache::new(StaticCacheConfig {
        layers: model.num_layers(),
        batch,
        max_len,
        kv_heads: config.num_key_value_heads(),
        head_dim: config.head_dim(),
        value_dim: None,
        kind: model.kind(),
        device: model.device(),
    })?)
}

/// Decoding over a [`StaticCache`] with tokens and position in tensors that never move, so that a step
/// can be captured. It runs on any device, captured ([`DecodeGraph`]) or not.
///
/// ```
/// use overdrive_compiled::{DecodeStep, static_cache_of};
/// use overdrive_transformer::{CausalLm, InitOptions, LlamaConfig};
/// use tch::Tensor;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let config = LlamaConfig { vocab_size: 64, hidden_size: 32, intermediate_size: 64,
///     num_hidden_layers: 1, num_attention_heads: 2, ..LlamaConfig::default() };
/// let model = CausalLm::new(&config.into(), &InitOptions::default())?;
/// let mut step = DecodeStep::new(static_cache_of(&model, 1, 16)?, 1)?;
/// let mut logits = step.prefill(&model, &Tensor::from_slice(&[1i64, 2, 3]).view([1, 3]))?;
/// for _ in 0..4 {
///     let next = logits.argmax(-1, false);
///     logits = step.step(&model, &next)?;
/// }
/// assert_eq!((step.position(), logits.size()), (7, vec![1, 1, 64]));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct DecodeStep {
    cache: StaticCache,
    tokens: Tensor,
    positions: Tensor,
}

impl DecodeStep {
    /// For `batch` rows over an empty or a filled cache.
    ///
    /// # Errors
    /// When the cache has fewer rows.
    pub fn new(cache: StaticCache, batch: i64) -> Result<DecodeStep> {
        let rows = cache.config().batch;
        if batch < 1 || batch > rows {
            return Err(Error::BadArgument {
                what: "rows of a decode step".to_owned(),
                expected: format!("1 to {rows}, as the cache has"),
                got: batch.to_string(),
            });
        }
        let device = cache.config().device;
        Ok(DecodeStep {
            tokens: Tensor::f_zeros([batch, 1], (Kind::Int64, device))?,
            positions: Tensor::f_full([1], cache.len(), (Kind::Int64, device))?,
            cache,
        })
    }

    /// How many tokens of each row the cache holds.
    pub fn position(&self) -> i64 {
        self.cache.len()
    }

    /// The cache.
    pub fn cache(&self) -> &StaticCache {
        &self.cache
    }

    /// Reads prompts of one length, `(B, T)`; the logits of the last token, `(B, 1, V)`.
    ///
    /// # Errors
    /// When shapes do not fit or the cache is too short.
    pub fn prefill(&mut self, model: &CausalLm, tokens: &Tensor) -> Result<Tensor> {
        let rows = self.tokens.size()[0];
        if tokens.size().first() != Some(&rows) {
            return Err(Error::BadArgument {
                what: "prompts".to_owned(),
                expected: format!("{rows} rows"),
                got: format!("a tensor of shape {:?}", tokens.size()),
            });
        }
        let _no_grad = tch::no_grad_guard();
        let input = ForwardInput::new(tokens).with_logits(Logits::Last);
        Ok(model.forward(input.with_cache(&mut self.cache))?)
    }

    /// One token for each row, `(B, 1)`, without a graph; its logits `(B, 1, V)`.
    ///
    /// # Errors
    /// As [`prefill`](DecodeStep::prefill).
    pub fn step(&mut self, model: &CausalLm, tokens: &Tensor) -> Result<Tensor> {
        self.place(tokens)?;
        let logits = self.run(model)?;
        self.cache.advance(1)?;
        Ok(logits)
    }

    /// Writes the next tokens and their position where the step reads them.
    fn place(&mut self, tokens: &Tensor) -> Result<()> {
        if tokens.size() != self.tokens.size() || tokens.f_kind()? != Kind::Int64 {
            return Err(Error::BadArgument {
                what: "tokens of a decode step".to_owned(),
                expected: format!("Int64 of shape {:?}", self.tokens.size()),
                got: format!("{:?} of shape {:?}", tokens.kind(), tokens.size()),
            });
        }
        self.check_room()?;
        let _same = self.positions.f_fill_(self.cache.len())?;
        Ok(self.tokens.f_copy_(tokens)?)
    }

    fn check_room(&self) -> Result<()> {
        let (held, most) = (self.cache.len(), self.cache.config().max_len);
        if held >= most {
            return Err(overdrive_kv_cache::Error::Full {
                capacity: most,
                held,
                new: 1,
            }
            .into());
        }
        Ok(())
    }

    /// The step as it is captured: it depends on nothing that the host decides.
    fn run(&mut self, model: &CausalLm) -> Result<Tensor> {
        let _no_grad = tch::no_grad_guard();
        let places = self.positions.f_unsqueeze(0)?;
        let mut cache = self.cache.at(&self.positions)?;
        let input = ForwardInput::new(&self.tokens)
            .with_position_ids(&places)
            .with_logits(Logits::Last);
        Ok(model.forward(input.with_cache(&mut cache))?)
    }
}

/// A [`DecodeStep`] as one CUDA graph: a token costs one launch.
#[derive(Debug)]
pub struct DecodeGraph<'m> {
    // Before what it reads and writes.
    graph: CudaGraph<'static, Tensor>,
    step: DecodeStep,
    model: &'m CausalLm,
}

impl<'m> DecodeGraph<'m> {
    /// Captures the step of `model`, whose parameters must stay where they are (their values may
    /// change). The cache must have room for one token, whose place the warm-ups write to.
    ///
    /// # Errors
    /// [`Error::NeedsCuda`] where the model is not on a CUDA device; as [`CudaGraph::capture`].
    pub fn capture(
        model: &'m CausalLm,
        mut step: DecodeStep,
        options: CaptureOptions,
    ) -> Result<DecodeGraph<'m>> {
        crate::error::cuda_index(model.device())?;
        step.check_room()?;
        let _same = step.positions.f_fill_(step.cache.len())?;
        let graph = CudaGraph::capture_borrowed(model.device(), options, || step.run(model))?;
        Ok(DecodeGraph { graph, step, model })
    }

    /// One token for each row, `(B, 1)`; its logits `(B, 1, V)`, which the next step overwrites.
    ///
    /// # Errors
    /// When the tokens do not fit or the cache is full.
    pub fn step(&mut self, tokens: &Tensor) -> Result<&Tensor> {
        self.step.place(tokens)?;
        let logits = self.graph.replay()?;
        self.step.cache.advance(1)?;
        Ok(logits)
    }

    /// Reads other prompts into the emptied cache, without the graph.
    ///
    /// # Errors
    /// As [`DecodeStep::prefill`].
    pub fn restart(&mut self, tokens: &Tensor) -> Result<Tensor> {
        self.step.cache.reset();
        self.step.prefill(self.model, tokens)
    }

    /// How many tokens of each row the cache holds.
    pub fn position(&self) -> i64 {
        self.step.position()
    }

    /// Bytes of the graph's pool; the cache and the model are not in it.
    pub fn pool_bytes(&self) -> u64 {
        self.graph.pool_bytes()
    }
}
