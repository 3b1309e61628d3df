//! A decoding step over a static cache, captured in a CUDA graph.

use overdrive_core::{Error as CommonError, check_option};
use overdrive_kv_cache::{KvCache, StaticCache, StaticCacheConfig};
use overdrive_transformer::{CausalLm, ForwardInput, Logits};
use tch::{Kind, Tensor};

use crate::error::cuda_index;
use crate::{BareGraph, CaptureOptions, Result};

/// Creates a static cache with the layers and heads of `model`, for `batch` rows of at most `max_len` tokens.
///
/// # Errors
/// If memory runs out.
pub fn static_cache_of(model: &CausalLm, batch: i64, max_len: i64) -> Result<StaticCache> {
    let config = model.config();
    Ok(StaticCache::new(StaticCacheConfig {
        layers: model.cache_layers(),
        batch,
        max_len,
        kv_heads: config.num_key_value_heads(),
        head_dim: config.head_dim(),
        layer_heads: model.cache_layer_heads(),
        value_dim: None,
        kind: model.kind(),
        device: model.device(),
    })?)
}

/// A decoding step over a [`StaticCache`]. Its tokens and position are in tensors at fixed addresses, so that it
/// can be captured. It runs on any device, captured ([`DecodeGraph`]) or not.
///
/// ```
/// use overdrive_graphs::{DecodeStep, static_cache_of};
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
    /// Creates a step for `batch` rows over a cache, empty or not.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) if the cache has fewer rows.
    pub fn new(cache: StaticCache, batch: i64) -> Result<DecodeStep> {
        let rows = cache.config().batch;
        let expected = format!("from 1 to {rows}, the rows of the cache");
        check_option((1..=rows).contains(&batch), "batch", batch, expected)?;
        let device = cache.config().device;
        Ok(DecodeStep {
            tokens: Tensor::f_zeros([batch, 1], (Kind::Int64, device))?,
            positions: Tensor::f_full([1], cache.len(), (Kind::Int64, device))?,
            cache,
        })
    }

    /// Returns the number of tokens that the cache holds of each row.
    pub fn position(&self) -> i64 {
        self.cache.len()
    }

    /// Returns the cache.
    pub fn cache(&self) -> &StaticCache {
        &self.cache
    }

    /// Appends prompts of one length, `(B, T)`, to the cache. Returns the logits of the last token, `(B, 1, V)`.
    ///
    /// # Errors
    /// When shapes do not fit or the cache is too short.
    pub fn prefill(&mut self, model: &CausalLm, tokens: &Tensor) -> Result<Tensor> {
        let rows = self.tokens.size()[0];
        if tokens.size().first() != Some(&rows) {
            let expected = format!("({rows}, T)");
            return Err(CommonError::shape("tokens", tokens.size(), expected).into());
        }
        let _no_grad = tch::no_grad_guard();
        let input = ForwardInput::new(tokens).with_logits(Logits::Last);
        Ok(model.forward(input.with_cache(&mut self.cache))?)
    }

    /// Appends one token for each row, `(B, 1)`, without a graph. Returns its logits, `(B, 1, V)`.
    ///
    /// # Errors
    /// As for [`prefill`](DecodeStep::prefill).
    pub fn step(&mut self, model: &CausalLm, tokens: &Tensor) -> Result<Tensor> {
        self.load(tokens)?;
        let logits = self.run(model, self.cache.len() + 1)?;
        self.cache.advance(1)?;
        Ok(logits)
    }

    /// Copies the next tokens and their position to the tensors that the step reads.
    fn load(&mut self, tokens: &Tensor) -> Result<()> {
        if tokens.size() != self.tokens.size() {
            let expected = format!("{:?}", self.tokens.size());
            return Err(CommonError::shape("tokens", tokens.size(), expected).into());
        }
        let kind = tokens.f_kind()?;
        if kind != Kind::Int64 {
            return Err(CommonError::dtype("tokens", kind, "Int64").into());
        }
        self.check_room()?;
        // In place: the captured step reads these addresses.
        let _same = self.positions.f_fill_(self.cache.len())?;
        Ok(self.tokens.f_copy_(tokens)?)
    }

    fn check_room(&self) -> Result<()> {
        // The captured step writes at the position on the device, and no kernel checks it against the capacity.
        let (held, capacity) = (self.cache.len(), self.cache.config().max_len);
        if held >= capacity {
            return Err(overdrive_kv_cache::Error::Full {
                capacity,
                held,
                new: 1,
            }
            .into());
        }
        Ok(())
    }

    /// Runs the step in the form that is captured, at a position below `position_bound`, the only host value that it
    /// depends on.
    fn run(&mut self, model: &CausalLm, position_bound: i64) -> Result<Tensor> {
        let _no_grad = tch::no_grad_guard();
        let position_ids = self.positions.f_unsqueeze(0)?;
        // Advances by a tensor on the device: a number would become a constant of the graph.
        let mut cache = self.cache.at(&self.positions)?;
        let input = ForwardInput::new(&self.tokens)
            .with_position_ids(&position_ids)
            .with_position_bound(position_bound)
            .with_logits(Logits::Last);
        Ok(model.forward(input.with_cache(&mut cache))?)
    }
}

/// A [`DecodeStep`] as one CUDA graph: a token costs one launch from the host.
#[derive(Debug)]
pub struct DecodeGraph<'m> {
    // Fields are dropped in order: the graph before the tensors that it reads and writes.
    graph: BareGraph<Tensor>,
    step: DecodeStep,
    model: &'m CausalLm,
    /// The number of positions that the graph was captured for.
    positions: i64,
}

impl<'m> DecodeGraph<'m> {
    /// Captures the step of `model`, whose parameters must keep their memory (their values may
    /// change). The cache must have room for one token; the warm-ups write to its slot.
    ///
    /// The graph serves every position of the cache. With dynamic or LongRoPE scaling, it serves those within the
    /// original context ([`ModelConfig::ragged_context`](overdrive_transformer::ModelConfig::ragged_context)) only:
    /// beyond it the frequencies depend on the length, and captured frequencies are constants.
    ///
    /// # Errors
    /// [`Error::NeedsCuda`](crate::Error::NeedsCuda) if the model is not on a CUDA device; else as for
    /// [`CudaGraph::capture`](crate::CudaGraph::capture).
    pub fn capture(
        model: &'m CausalLm,
        mut step: DecodeStep,
        options: CaptureOptions,
    ) -> Result<DecodeGraph<'m>> {
        cuda_index(model.device())?;
        step.check_room()?;
        let positions = positions_of(model, &step);
        check_position(step.position(), positions)?;
        let _same = step.positions.f_fill_(step.cache.len())?;
        // The first run creates the rotary tables for all positions, which a capture cannot do.
        let options = CaptureOptions {
            warm_ups: options.warm_ups.max(1),
        };
        let run = || step.run(model, positions);
        let graph = BareGraph::capture(model.device(), options, None, run)?;
        Ok(DecodeGraph {
            graph,
            step,
            model,
            positions,
        })
    }

    /// Appends one token for each row, `(B, 1)`. Returns its logits, `(B, 1, V)`, which the next step overwrites.
    ///
    /// # Errors
    /// If the tokens have the wrong shape or the cache is full.
    pub fn step(&mut self, tokens: &Tensor) -> Result<&Tensor> {
        check_position(self.step.position(), self.positions)?;
        self.step.load(tokens)?;
        let logits = self.graph.replay()?;
        self.step.cache.advance(1)?;
        Ok(logits)
    }

    /// Empties the cache and appends other prompts, without the graph. Returns the logits of their last token.
    ///
    /// # Errors
    /// As for [`DecodeStep::prefill`].
    pub fn restart(&mut self, tokens: &Tensor) -> Result<Tensor> {
        self.step.cache.reset();
        self.step.prefill(self.model, tokens)
    }

    /// Returns the number of tokens that the cache holds of each row.
    pub fn position(&self) -> i64 {
        self.step.position()
    }

    /// Returns the bytes of the graph's memory pool, which holds neither the cache nor the model.
    pub fn pool_bytes(&self) -> u64 {
        self.graph.pool_bytes()
    }
}

/// Returns the number of positions that one graph of the step serves.
fn positions_of(model: &CausalLm, step: &DecodeStep) -> i64 {
    let held = step.cache.config().max_len;
    held.min(model.config().ragged_context())
}

fn check_position(position: i64, positions: i64) -> Result<()> {
    let expected = format!(
        "below {positions}, the positions that the graph serves: those of the cache within the model's context (with \
         dynamic or LongRoPE scaling, its original context); use `DecodeStep`, which has no such bound"
    );
    Ok(check_option(
        position < positions,
        "position",
        position,
        expected,
    )?)
}
