//! Activation checkpointing: trains deeper models or longer sequences in the same memory, by keeping
//! fewer tensors of the forward pass and recomputing, or fetching back, the others in backward.
//!
//! | item | effect | counterpart |
//! |---|---|---|
//! | [`checkpoint`](fn@checkpoint), [`checkpoint_with`] | recomputes the tensors that a closure saved | `torch.utils.checkpoint.checkpoint(use_reentrant=False)` |
//! | [`scope`] | as `checkpoint`, for closures that borrow layers | |
//! | [`Shared`] | a layer that a model shares with the graph: `block.checkpoint(&x, \|block, x\| …)` | |
//! | [`checkpoint_sequential`], [`checkpoint_every_nth`], [`Schedule`] | chains of blocks: segments, every n-th, √n | `checkpoint_sequential` |
//! | [`SavePolicy`] | keeps the results of some operators (matmuls, attention), recomputes the others | `create_selective_checkpoint_contexts` |
//! | [`offload_saved_tensors`] | moves saved tensors to host memory or to a file | `torch.autograd.graph.save_on_cpu` |
//! | [`measure_blocks`], [`Plan`] | chooses the blocks to recompute for a memory budget | `torch._functorch`'s memory budget |
//!
//! The gradients equal those without checkpointing bit for bit: the random states and the autocast state
//! of the first pass are restored for the recomputation, and a difference between the passes is an error
//! that names the operator.
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
//! scope(|scope| {
//!     let mut hidden = x.shallow_clone();
//!     for block in &blocks {
//!         hidden = scope.checkpoint(&hidden, |x| block.forward(x).f_gelu("none")?.f_dropout(0.1, true))?;
//!     }
//!     scope.backward(&[&hidden.f_square()?.f_mean(Kind::Float)?])
//! })?;
//! assert!(blocks[0].ws.grad().defined());
//!
//! // A schedule over a chain of blocks. Recompute activations and dropout, keep the matmuls.
//! let options = CheckpointOptions::keeping(SavePolicy::Matmuls);
//! scope(|scope| {
//!     let y = scope.scheduled(&blocks, &Schedule::EveryBlock, &x, &options, |layer, x| {
//!         Ok(layer.forward(x).f_gelu("none")?.f_dropout(0.1, true)?)
//!     })?;
//!     scope.backward(&[&y.f_square()?.f_mean(Kind::Float)?])
//! })?;
//! # Ok(())
//! # }
//! ```
//!
//! Implementation: hooks on saved tensors ([`overdrive_sys::saved_tensors`]) put placeholders into the
//! graph, and the first placeholder that backward unpacks runs the closure again. The originals:
//! [torch.utils.checkpoint](https://docs.pytorch.org/docs/2.11/checkpoint.html); Chen et al. 2016,
//! [arXiv:1604.06174](https://arxiv.org/abs/1604.06174); selective: Korthikanti et al. 2022,
//! [arXiv:2205.05198](https://arxiv.org/abs/2205.05198).
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod block_cost;
mod checkpoint;
mod context;
mod determinism;
mod early_stop;
mod error;
mod frame;
mod offload;
mod options;
mod plan;
mod policy;
mod schedule;
mod sequential;
mod shared;
mod spill_file;
mod versioned;

pub use block_cost::{BlockCost, measure_blocks};
pub use checkpoint::{RegionResult, RegionValue, Scope, checkpoint, checkpoint_with, scope};
pub use error::{Error, Result};
pub use offload::{OffloadGuard, OffloadOptions, OffloadStats, SavedTo, offload_saved_tensors};
pub use options::{CheckpointOptions, DeterminismCheck};
pub use plan::Plan;
pub use policy::{PolicyCall, PolicyFn, SavePolicy};
pub use schedule::{Group, Schedule};
pub use sequential::{checkpoint_every_nth, checkpoint_scheduled, checkpoint_sequential};
pub use shared::Shared;
