//! Optimizers for tch: fused AdamW, clipping, learning-rate schedules, early stopping.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod adamw;
mod clip;
mod error;
mod optimizer;
mod param_group;
mod state_dict;
mod tch_optimizer;

pub use adamw::{AdamW, AdamWConfig, Implementation};
pub use clip::{ClipOptions, clip_grad_norm, clip_grad_value, grad_norm, scale_grads};
pub use error::{Error, Result};
pub use optimizer::{GradScaling, Optimizer, OptimizerId};
pub use param_group::{DecayRule, ParamGroup, decay_groups};
pub use state_dict::StateDict;
pub use tch_optimizer::TchOptimizer;
