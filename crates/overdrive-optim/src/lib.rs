//! Optimizers for tch: AdamW (fused, 8-bit, paged), SGD, Lion, Adafactor and Muon; gradient clipping,
//! averages of weights, learning-rate schedules and early stopping.
//!
//! tch's `nn::AdamW` updates one parameter after another with a dozen operations each, hides its state
//! and cannot be resumed. [`AdamW`] updates all parameters of a group with libtorch's fused kernel in one
//! pass over memory, equals `torch.optim.AdamW(fused=True)`, stores its state by parameter name, and
//! works with a gradient scaler without synchronizing with the device.
//!
//! | item | counterpart |
//! |---|---|
//! | [`AdamW`], [`ParamGroup`], [`decay_groups`] | [`torch.optim.AdamW`] with `fused=True` |
//! | [`AdamW8bit`] | bitsandbytes' `AdamW8bit`: a quarter of the state |
//! | [`PagedAdamW`] | bitsandbytes' `PagedAdamW`: the state in a mapped file or in host memory |
//! | [`Sgd`], [`Muon`] | [`torch.optim.SGD`], [`torch.optim.Muon`] |
//! | [`Lion`] | the paper's, as in bitsandbytes |
//! | [`Adafactor`] | `transformers.optimization.Adafactor` |
//! | [`Ema`] | `torch.optim.swa_utils`' and diffusers' averages of weights |
//! | [`OptimizerState`], [`StateDict`] | states by parameter name in safetensors files |
//! | [`clip_grad_norm`], [`clip_grad_value`] | `torch.nn.utils.clip_grad_norm_`, `clip_grad_value_` |
//! | [`clip_grad_norm_by_group`] | `clip_grad_norm_` with a limit for each parameter group |
//! | [`Schedule`], [`LrScheduler`], [`Warmup`] | `transformers.get_scheduler`, `lr_scheduler_type` |
//! | [`CombinedOptimizer`] | several optimizers that step together, such as Muon and AdamW |
//! | [`EarlyStopping`] | transformers' `EarlyStoppingCallback`, and the step of the best evaluation |
//! | [`Stateful`] | `torch.distributed.checkpoint.stateful.Stateful` |
//! | [`TchOptimizer`] | tch's own optimizers, behind the [`Optimizer`] trait |
//!
//! On a CPU, the kernels of [`AdamW8bit`], [`Lion`] and [`Adafactor`] treat [numbers below 2⁻¹²⁶ as
//! zero](overdrive_kernels#subnormal-numbers). libtorch's kernels, which the other optimizers use, keep such numbers
//! unless [`set_flush_denormals`](overdrive_sys::denormals::set_flush_denormals) is called; the second moments of
//! parameters that get no gradient decay to them.
//!
//! ```
//! use overdrive_optim::{
//!     AdamW, AdamWConfig, ClipOptions, LrScheduler, LrSchedulerType, Optimizer, Schedule,
//!     ScheduleLength, Warmup, clip_grad_norm, decay_groups,
//! };
//! use tch::{Device, Kind, Tensor, nn, nn::Module};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let store = nn::VarStore::new(Device::Cpu);
//! let zeros = nn::LinearConfig { ws_init: nn::Init::Const(0.0), bs_init: Some(nn::Init::Const(0.0)), bias: true };
//! let model = nn::linear(store.root() / "proj", 4, 1, zeros);
//! let config = AdamWConfig { learning_rate: 0.1, ..Default::default() };
//! let mut optimizer = AdamW::new(decay_groups(store.variables(), 0.01), config)?;
//!
//! let total_steps = 20;
//! let length = ScheduleLength { warmup_steps: Warmup::ratio(0.1).resolve(total_steps)?, total_steps };
//! let cosine = Schedule::new(LrSchedulerType::Cosine, length, 0.1, &Default::default())?;
//! let mut scheduler = LrScheduler::new(cosine, &mut optimizer)?;
//!
//! let inputs = Tensor::ones([8, 4], (Kind::Float, Device::Cpu));
//! let mut losses = Vec::new();
//! for _ in 0..total_steps {
//!     let loss = (model.forward(&inputs) - 3.0).square().mean(Kind::Float);
//!     loss.f_backward()?;
//!     clip_grad_norm(&optimizer.parameters(), 1.0, ClipOptions::default())?;
//!     optimizer.step()?;
//!     scheduler.step(&mut optimizer)?;
//!     optimizer.zero_grad()?;
//!     losses.push(loss.double_value(&[]));
//! }
//! assert!(losses[total_steps as usize - 1] < losses[0] / 2.0);
//! # Ok(())
//! # }
//! ```
//!
//! [`torch.optim.SGD`]: https://docs.pytorch.org/docs/stable/generated/torch.optim.SGD.html
//! [`torch.optim.Muon`]: https://docs.pytorch.org/docs/stable/generated/torch.optim.Muon.html
//! [`torch.optim.AdamW`]: https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html
#![deny(missing_docs)]

// A new optimizer is a file with a `Rule` (update_rule.rs), as lion.rs is.
mod adafactor;
mod adamw;
mod adamw8bit;
mod checks;
mod clip;
mod code_book;
mod combined;
mod device_books;
mod early_stopping;
mod ema;
mod error;
mod joint_update;
mod kernels;
mod lion;
mod muon;
mod operators;
mod optimizer;
mod page_advice;
mod paged_adamw;
mod paging;
mod parameter_groups;
mod parameter_states;
mod schedule;
mod sgd;
#[cfg(test)]
#[path = "../../overdrive-gpu/tests/stand_in/mod.rs"]
mod stand_in;
mod state_dict;
mod state_file;
mod state_metadata;
mod state_shards;
mod stateful;
mod tch_optimizer;
mod update_rule;
mod weight_decay;

pub use adafactor::{Adafactor, AdafactorConfig};
pub use adamw::{AdamW, AdamWConfig, Implementation};
pub use adamw8bit::{AdamW8bit, AdamW8bitConfig};
pub use clip::{
    ClipOptions, clip_grad_norm, clip_grad_norm_by_group, clip_grad_value, grad_norm, scale_grads,
};
pub use combined::CombinedOptimizer;
pub use early_stopping::{
    EarlyStopping, EarlyStoppingConfig, EarlyStoppingState, EvaluationOutcome,
};
pub use ema::{Ema, EmaConfig, EmaGuard, EmaWarmup};
pub use error::{Error, Result};
pub use lion::{Lion, LionConfig};
pub use muon::{Muon, MuonConfig, MuonPrecision, MuonRate};
pub use optimizer::{GradScaling, Optimizer, OptimizerId, OptimizerState};
pub use paged_adamw::{PagedAdamW, PagedAdamWConfig, StateBits};
pub use paging::PagingConfig;
pub use parameter_groups::{ParamGroup, decay_groups};
pub use schedule::{
    LrScheduler, LrSchedulerState, LrSchedulerType, RampType, Schedule, ScheduleLength,
    ScheduleOptions, Warmup,
};
pub use sgd::{Sgd, SgdConfig};
pub use state_dict::StateDict;
pub use stateful::{StateError, Stateful};
pub use tch_optimizer::TchOptimizer;
pub use weight_decay::{DecayRule, EMBEDDING_NAMES};
