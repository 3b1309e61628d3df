//! The states of layers that keep a state of fixed size in place of keys and values.

mod hybrid_cache;
mod state_pool;

use overdrive_linear_attention::DeltaRuleOptions;
use tch::Tensor;

use crate::{Error, Result};

pub use hybrid_cache::HybridCache;
pub(crate) use state_pool::{SequenceState, StatePool, StateStep};

/// The inputs of a layer of the gated delta rule in a step: `T` new tokens of each of `B` rows.
///
/// The layer convolves the projections, and splits the result into queries, keys and values; queries and keys are
/// normalised (Yang et al. 2024, [arXiv:2412.06464](https://arxiv.org/abs/2412.06464)).
#[derive(Debug)]
pub struct DeltaRuleStep {
    /// The projections to queries, keys and values side by side, before the convolution:
    /// `(B, T, 2 · H_k · D_k + H · D_v)`.
    pub mixed: Tensor,
    /// The weight of the convolution `(2 · H_k · D_k + H · D_v, K)`.
    pub convolution: Tensor,
    /// The logarithm of the factor by which the state decays, at most 0: f32 `(B, T, H)`.
    pub decay: Tensor,
    /// The share of a value that is written to the state, in 0..1: `(B, T, H)`.
    pub beta: Tensor,
    /// The sizes of the heads.
    pub heads: DeltaRuleHeads,
    /// The options of the recurrence.
    pub options: DeltaRuleOptions,
}

/// The sizes of the heads of a layer of the gated delta rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaRuleHeads {
    /// The number of heads of queries and keys, `H_k`.
    pub keys: i64,
    /// The number of channels of a query or key, `D_k`.
    pub key_dim: i64,
    /// The number of heads of values, `H`, a multiple of `H_k`.
    pub values: i64,
    /// The number of channels of a value, `D_v`.
    pub value_dim: i64,
}

impl DeltaRuleHeads {
    /// Returns the width of queries, keys and values side by side.
    pub fn width(&self) -> i64 {
        2 * self.keys * self.key_dim + self.values * self.value_dim
    }

    /// Splits `convolved (…, 2 · H_k · D_k + H · D_v)` into queries, keys `(…, H_k, D_k)` and values `(…, H, D_v)`.
    ///
    /// # Errors
    /// An error of libtorch if the width is another.
    pub fn split(&self, convolved: &Tensor) -> Result<[Tensor; 3]> {
        let keys = self.keys * self.key_dim;
        let part = |start, heads: i64, dim: i64| {
            convolved
                .f_narrow(-1, start, heads * dim)?
                .f_unflatten(-1, [heads, dim])
        };
        Ok([
            part(0, self.keys, self.key_dim)?,
            part(keys, self.keys, self.key_dim)?,
            part(2 * keys, self.values, self.value_dim)?,
        ])
    }
}

impl DeltaRuleStep {
    /// Returns the step with all tokens in one dimension, `(B · T, …)`.
    pub(crate) fn flat(&self) -> Result<DeltaRuleStep> {
        self.map(|tensor| Ok(tensor.f_flatten(0, 1)?))
    }

    /// Returns `tokens` of a flat step, from `start` on.
    fn narrow(&self, start: i64, tokens: i64) -> Result<DeltaRuleStep> {
        self.map(|tensor| Ok(tensor.f_narrow(0, start, tokens)?))
    }

    fn map(&self, of: impl Fn(&Tensor) -> Result<Tensor>) -> Result<DeltaRuleStep> {
        Ok(DeltaRuleStep {
            mixed: of(&self.mixed)?,
            convolution: self.convolution.shallow_clone(),
            decay: of(&self.decay)?,
            beta: of(&self.beta)?,
            heads: self.heads,
            options: self.options,
        })
    }

    pub(crate) fn check_no_gradient(&self, layer: usize) -> Result<()> {
        let tensors = [&self.mixed, &self.decay, &self.beta];
        match tensors.iter().any(|tensor| tensor.requires_grad()) {
            true => Err(Error::RequiresGrad { layer }),
            false => Ok(()),
        }
    }
}
