//! Activation checkpointing: train deeper or with longer sequences in the same memory, by keeping less
//! of the forward pass and recomputing, or fetching back, the rest in backward.
//!
//! | item | what it does | equals |
//! |---|---|---|
//! | [`checkpoint`](fn@checkpoint) | recomputes what a closure saved | `torch.utils.checkpoint.checkpoint(use_reentrant=False)` |
//! | [`scope`] | the same for closures that borrow layers | |
//! | [`checkpoint_sequential`], [`checkpoint_every_nth`], [`Schedule`] | chains of blocks: segments, every n-th, √n | `checkpoint_sequential` |
//! | [`SavePolicy`] | keeps the results of some operators (products, attention), recomputes the rest | `create_selective_checkpoint_contexts` |
//! | [`offload_saved_tensors`] | moves what is saved to host memory or to a file | `torch.autograd.graph.save_on_cpu` |
//! | [`measure_blocks`], [`Plan`] | picks the blocks to recompute for a memory budget | `torch._functorch`'s memory budget |
//!
//! The gradients are those of the plain run, bit for bit: the random state and the autocast state of the
//! first pass are put back for the recomputation, and a difference between the passes is an error that
//! names the operator.
//!
//! ```
//! use overdrive_checkpointing::{CheckpointOptions, SavePolicy, Schedule, scope};
//! use tch::{Device, Kind, Tensor, nn, nn::Module};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let store = nn::VarStore::new(Device::Cpu);
//! let blocks: Vec<nn::Linear> =
//!     (0..4).map(|i| nn::linear(store.root() / i, 16, 16, Default::default())).collect();
//! let x = Tensor::randn([8, 16], (Kind::Float, Device::Cpu));
//!
//! // Recompute activations and dropout, keep the products.
//! let options = CheckpointOptions::keeping(SavePolicy::Matmuls);
//! scope(|scope| {
//!     let y = scope.scheduled(&blocks, &Schedule::EveryBlock, &x, &options, |layer, x| {
//!         Ok(layer.forward(x).f_gelu("none")?.f_dropout(0.1, true)?)
//!     })?;
//!     scope.backward(&[&y.f_square()?.f_mean(Kind::Float)?])
//! })?;
//! assert!(blocks[0].ws.grad().defined());
//! # Ok(())
//! # }
//! ```
//!
//! How it works: hooks on what the graph saves ([`overdrive_sys::saved_tensors`]) leave placeholders in
//! it, and the first placeholder that backward asks runs the closure again. The originals:
//! [torch.utils.checkpoint](https://docs.pytorch.org/docs/2.11/checkpoint.html); Chen et al. 2016,
//! [arXiv:1604.06174](https://arxiv.org/abs/1604.06174); selective: Korthikanti et al. 2022,
//! [arXiv:2205.05198](https://arxiv.org/abs/2205.05198).
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod ambient;
mod checkpoint;
mod determinism;
mod early_stop;
mod error;
mod frame;
mod measure;
mod offload;
mod options;
mod plan;
mod policy;
mod schedule;
mod sequential;
mod shared;
mod spill_file;
mod versioned;

pub use checkpoint::{RegionResult, Scope, checkpoint, scope};
pub use error::{Error, Result};
pub use measure::{BlockCost, measure_blocks};
pub use offload::{OffloadGuard, OffloadOptions, OffloadStats, SavedTo, offload_saved_tensors};
pub use options::{CheckpointOptions, DeterminismCheck};
pub use plan::Plan;
pub use policy::{PolicyCall, PolicyFn, SavePolicy};
pub use schedule::{Group, Schedule};
pub use sequential::{checkpoint_every_nth, checkpoint_scheduled, checkpoint_sequential};
pub use shared::Shared;
