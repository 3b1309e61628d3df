//! Gradient accumulation: token-weighted micro-batches, batch plans, batch-size search.
//!
//! Use this crate when the batch does not fit into memory, or when several processes share it.
//! [`GradientAccumulator`] makes the gradients of many micro-batches equal to those of one large batch,
//! with clipping, loss scaling and synchronization in the right order. [`BatchPlan`] keeps the effective
//! batch constant while the micro-batch changes. [`find_executable_batch_size`] reduces a batch until it
//! fits into memory.
//!
//! | item | counterpart |
//! |---|---|
//! | [`GradientAccumulator`], [`Window`] | Accelerate's `accumulate` with the token normalisation of transformers' Trainer |
//! | [`DeviceAccumulator`] | [`GradientAccumulator`] with counts on the device, for CUDA graphs |
//! | [`GradientSync`] | the synchronization of DistributedDataParallel, with `no_sync` |
//! | [`windows`] | `Trainer.get_batch_samples`, `sync_with_dataloader` |
//! | [`find_executable_batch_size`] | Accelerate's function of that name |
//!
//! ```
//! use std::num::NonZeroUsize;
//!
//! use overdrive_accumulation::{
//!     AccumulationConfig, GradientAccumulator, Window, count_tokens, windows,
//! };
//! use overdrive_optim::{AdamW, AdamWConfig, decay_groups};
//! use tch::{Device, Kind, Reduction, Tensor, nn, nn::Module};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let store = nn::VarStore::new(Device::Cpu);
//! let model = nn::linear(store.root() / "head", 8, 5, Default::default());
//! let mut optimizer = AdamW::new(decay_groups(store.variables(), 0.1), AdamWConfig::default())?;
//! let config = AccumulationConfig { gradient_accumulation_steps: 4, max_grad_norm: Some(1.0) };
//! let mut accumulator = GradientAccumulator::new(config)?;
//!
//! // Ten micro-batches: two windows of four, and one of two.
//! let data = (0..10).map(|_| {
//!     (Tensor::randn([6, 8], (Kind::Float, Device::Cpu)), Tensor::randint(5, [6], (Kind::Int64, Device::Cpu)))
//! });
//! let steps = NonZeroUsize::new(config.gradient_accumulation_steps).ok_or("no steps")?;
//! for window in windows(data, steps) {
//!     let counts = window.iter().map(|(_, labels)| count_tokens(labels, -100));
//!     accumulator.open(Window::new(counts.collect::<Result<Vec<_>, _>>()?))?;
//!     for (inputs, labels) in &window {
//!         let logits = model.forward(inputs);
//!         let loss_sum = logits.cross_entropy_loss::<Tensor>(labels, None, Reduction::Sum, -100, 0.0);
//!         accumulator.backward(&loss_sum)?;
//!     }
//!     let step = accumulator.step(&mut optimizer)?;
//!     println!("loss {:.3}, gradient norm {:.3?}", step.loss()?, step.grad_norm()?);
//! }
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]
#![deny(missing_docs)]

// The loss of a micro-batch is weighted in accumulator.rs, by the counts of window.rs.
mod accumulator;
mod batch_plan;
mod batch_size_search;
mod config;
mod device_accumulator;
mod error;
mod sync;
mod window;

pub use accumulator::{AccumulatedStep, GradientAccumulator};
pub use batch_plan::BatchPlan;
pub use batch_size_search::{
    ExecutableBatch, SearchError, attempt, find_executable_batch_plan, find_executable_batch_size,
    find_executable_batch_size_with,
};
pub use config::AccumulationConfig;
pub use device_accumulator::{DeviceAccumulator, DeviceLoss, DeviceStep};
pub use error::{Error, Result};
pub use sync::{GradientSync, SingleProcess, SyncError};
pub use window::{Window, Windows, count_tokens, windows};
