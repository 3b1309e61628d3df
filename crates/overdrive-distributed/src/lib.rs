//! Data parallel training with one process per GPU or group of cores, over libtorch's own c10d.
//!
//! Three additions turn the loop of one process into that of many: create the group, wrap the parameters,
//! and run the forward pass inside the wrapper. The processes are started by torchrun (`torchrun
//! --no-python --nproc-per-node 2 target/release/train`), by a Kubernetes job that sets the same variables,
//! by mpirun or srun, or by [`Launch`]. Without a launcher it is a world of one, in which every call returns
//! at once.
//!
//! | item | equivalent |
//! |---|---|
//! | [`init_process_group`], [`Rendezvous`] | `torch.distributed.init_process_group`, `env://` |
//! | [`ProcessGroup`], [`ReduceOp`] | `torch.distributed`'s collectives, over Gloo and NCCL |
//! | [`DistributedDataParallel`] | `torch.nn.parallel.DistributedDataParallel`, over the same `c10d::Reducer` |
//! | [`ZeroRedundancyOptimizer`] | `torch.distributed.optim.ZeroRedundancyOptimizer` (ZeRO stage 1) |
//! | [`ProcessGroup::new_group`], [`split`](ProcessGroup::split) | `new_group`, `new_subgroups` |
//! | [`ProcessGroup::mean`], [`any`](ProcessGroup::any), … | `all_reduce` of a scalar |
//! | `&DistributedDataParallel` as [`GradientSync`](overdrive_accumulation::GradientSync) | `no_sync` in Accelerate's `accumulate`, weighted by tokens |
//! | [`ProcessGroup`] as [`Ranks`](overdrive_snapshot::Ranks) | a snapshot that all ranks write and resume from the same step |
//! | [`Launch`] | `torchrun` on one machine |
//!
//! A rank that is killed, hangs, or calls another collective does not leave the others waiting. Within the
//! timeout of the collective plus a few heartbeats, each rank gets an [`Error::Collective`] that names the
//! collective, the rank at fault and the cause, also in the middle of backward.
//!
//! ```
//! use overdrive_distributed::{
//!     DdpConfig, DistributedDataParallel, Error, GroupConfig, init_process_group,
//! };
//! use overdrive_optim::{AdamW, AdamWConfig, Optimizer, decay_groups};
//! use tch::{Kind, Tensor, nn, nn::Module};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let group = init_process_group(GroupConfig::default())?;
//! let store = nn::VarStore::new(group.device());
//! let model = nn::linear(store.root(), 4, 1, Default::default());
//! let ddp = DistributedDataParallel::from_var_store(&group, &store, DdpConfig::default())?;
//! let mut optimizer = AdamW::new(decay_groups(store.variables(), 0.01), AdamWConfig::default())?;
//! for step in 0..3 {
//!     // Each rank takes its own shard of the batch.
//!     let shard = Tensor::ones([8, 4], (Kind::Float, group.device())) * (group.rank() as i64 + 1);
//!     let loss = ddp.forward(|| Ok::<_, Error>(model.forward(&shard).square().mean(Kind::Float)))?;
//!     ddp.backward(&loss)?;
//!     optimizer.step()?;
//!     optimizer.zero_grad()?;
//!     let loss = group.mean(loss.double_value(&[]))?;
//!     if group.is_main() {
//!         println!("step {step}: loss {loss:.3}");
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! The feature `nccl` adds groups over NCCL; building it needs `nccl.h`, the CUDA headers and
//! `libtorch_cuda`.
#![deny(missing_docs)]
#![forbid(unsafe_code)]

mod collectives;
mod connection;
mod ddp;
mod ddp_config;
mod error;
mod failure;
mod gradient_sync;
mod group;
mod group_config;
mod group_methods;
mod launch;
mod launcher_watch;
mod model_check;
mod monitor;
mod objects;
mod pending;
mod rank_log;
mod ranks;
mod rendezvous;
mod scalar_reductions;
mod store_thread;
mod subgroup;
mod zero;

pub use collectives::{GroupCalls, ReduceOp};
pub use ddp::{DistributedDataParallel, NoSync};
pub use ddp_config::{DdpConfig, GradientCompression};
pub use error::{Error, Result};
pub use failure::Failure;
pub use group::{ProcessGroup, Progress, init_process_group};
pub use group_config::{Backend, GroupConfig};
pub use launch::Launch;
pub use overdrive_core::RunEnd;
pub use pending::Pending;
pub use rank_log::RankLog;
pub use rendezvous::{Launcher, Rendezvous};
pub use zero::ZeroRedundancyOptimizer;
