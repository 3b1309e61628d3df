//! Data parallel training: one process for each GPU or group of cores, over libtorch's own c10d.
//!
//! The loop of one process becomes that of many by three lines: make the group, wrap the parameters, run
//! the forward inside. The processes are started by torchrun (`torchrun --no-python --nproc-per-node 2
//! target/release/train`), by a Kubernetes job that sets the same variables, by mpirun or srun, or by
//! [`Launch`]; without any of them it is a world of one, in which all of this costs nothing.
//!
//! | item | equals |
//! |---|---|
//! | [`init_process_group`], [`Rendezvous`] | `torch.distributed.init_process_group`, `env://` |
//! | [`ProcessGroup`], [`ReduceOp`] | `torch.distributed`'s collectives, over Gloo and NCCL |
//! | [`DistributedDataParallel`] | `torch.nn.parallel.DistributedDataParallel`, over the same `c10d::Reducer` |
//! | [`ZeroRedundancyOptimizer`] | `torch.distributed.optim.ZeroRedundancyOptimizer` (ZeRO stage 1) |
//! | [`ProcessGroup::new_group`], [`split`](ProcessGroup::split) | `new_group`, `new_subgroups`: groups of some of the ranks |
//! | [`ProcessGroup::mean`], [`any`](ProcessGroup::any), … | what all ranks must see alike |
//! | `&DistributedDataParallel` as [`GradientSync`](overdrive_accumulation::GradientSync) | `no_sync` in Accelerate's `accumulate`, weighted by tokens |
//! | [`ProcessGroup`] as [`Ranks`](overdrive_snapshot::Ranks) | a snapshot written by all ranks, resumed at one step |
//! | [`Launch`] | `torchrun` on one machine |
//!
//! A rank that is killed, hangs or goes another way does not leave the others waiting: within the timeout
//! of the collective plus a few heartbeats each of them ends with an [`Error::Collective`] that names the
//! collective, the rank at fault and what is known of it, also in the middle of backward.
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
//!     // Each rank takes its own part of the batch.
//!     let part = Tensor::ones([8, 4], (Kind::Float, group.device())) * (group.rank() as i64 + 1);
//!     let loss = ddp.forward(|| Ok::<_, Error>(model.forward(&part).square().mean(Kind::Float)))?;
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
//! The feature `nccl` adds groups over NCCL; it needs `nccl.h`, the CUDA headers and `libtorch_cuda` when
//! it is built.
#![deny(missing_docs)]
#![forbid(unsafe_code)]

mod agreement;
mod collectives;
mod ddp;
mod ddp_config;
mod error;
mod gradient_sync;
mod group;
mod group_config;
mod launch;
mod meeting;
mod monitor;
mod objects;
mod pending;
mod ranks;
mod rendezvous;
mod same_model;
mod subgroup;
mod verdict;
mod within;
mod zero;

pub use agreement::RankLog;
pub use collectives::ReduceOp;
pub use ddp::{DistributedDataParallel, NoSync};
pub use ddp_config::{DdpConfig, GradientCompression};
pub use error::{Error, Result};
pub use group::{ProcessGroup, Progress, init_process_group};
pub use group_config::{Backend, GroupConfig};
pub use launch::{Ended, Launch};
pub use pending::Pending;
pub use rendezvous::{Launcher, Rendezvous};
pub use verdict::Failure;
pub use within::Within;
pub use zero::ZeroRedundancyOptimizer;
