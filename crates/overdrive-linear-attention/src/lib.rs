//! Linear attention for tch: the gated delta rule of Qwen3-Next, and its short causal convolution.
//!
//! A layer of linear attention keeps a state of fixed size for each head instead of the keys and values of all tokens.
//! The gated delta rule (Yang, Kautz & Hatamizadeh 2024, [arXiv:2412.06464](https://arxiv.org/abs/2412.06464)) lets the
//! state decay at each token and replaces, at the token's key, a part of the stored value by the token's own.
//!
//! | function | counterpart |
//! |---|---|
//! | [`gated_delta_rule`] | fla's `chunk_gated_delta_rule` and `fused_recurrent_gated_delta_rule`: batches, training |
//! | [`gated_delta_rule_varlen`] | the same with `cu_seqlens`: packed sequences, training |
//! | [`gated_delta_rule_update`] | packed sequences whose states are in a pool: inference |
//! | [`causal_conv1d`], [`causal_conv1d_varlen`] | `causal_conv1d_fn` |
//! | [`causal_conv1d_update`] | `causal_conv1d_update`, for packed sequences whose states are in a pool |
//!
//! ```
//! use overdrive_linear_attention::{DeltaRuleInputs, DeltaRuleOptions, gated_delta_rule};
//! use tch::{Device, Kind, Tensor};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let random = |shape: &[i64]| Tensor::randn(shape, (Kind::Float, Device::Cpu));
//! let (query, key, value) = (random(&[1, 100, 2, 64]), random(&[1, 100, 2, 64]), random(&[1, 100, 4, 64]));
//! let (decay, beta) = (random(&[1, 100, 4]).abs().neg(), random(&[1, 100, 4]).sigmoid());
//! let query = query.set_requires_grad(true);
//! let inputs = DeltaRuleInputs { query: &query, key: &key, value: &value, decay: &decay, beta: &beta };
//! let options = DeltaRuleOptions { qk_l2norm: true, ..Default::default() };
//! let (output, state) = gated_delta_rule(inputs, None, &options)?;
//! assert_eq!((output.size(), state.size()), (vec![1, 100, 4, 64], vec![1, 4, 64, 64]));
//! output.sum(Kind::Float).f_backward()?;
//! assert_eq!(query.grad().size(), query.size());
//! # Ok(())
//! # }
//! ```
//!
//! If the kernels of overdrive-gpu are on, each step over a pool is one launch on an NVIDIA GPU; batches and
//! training run by libtorch's operators.
//!
//! Reference implementations: [flash-linear-attention](https://github.com/fla-org/flash-linear-attention),
//! [causal-conv1d](https://github.com/Dao-AILab/causal-conv1d), and transformers' `modeling_qwen3_next.py`.
#![deny(missing_docs)]

mod causal_conv1d;
mod conv_fused;
mod conv_math;
mod delta_fused;
mod delta_math;
mod delta_rule;
mod error;
mod gpu;
mod kernel;
mod options;
mod sequences;
mod state_slot;

pub use causal_conv1d::{causal_conv1d, causal_conv1d_update, causal_conv1d_varlen};
pub use delta_rule::{
    DeltaRuleInputs, gated_delta_rule, gated_delta_rule_update, gated_delta_rule_varlen,
};
pub use error::{Error, Result};
pub use options::{Backend, CausalConv1dOptions, ConvActivation, DeltaRuleOptions};
pub use state_slot::StateSlot;
