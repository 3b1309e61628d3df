//! Data parallel runs.

use std::time::Duration;

use overdrive_datasets::{LastShare, Shard};
use overdrive_distributed::{
    Backend, DdpConfig, DistributedDataParallel, GroupConfig, ProcessGroup, init_process_group,
};
use serde::{Deserialize, Serialize};
use tch::{Device, Tensor};

use crate::{Result, TrainingArguments};

/// The backend that reduces gradients between processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum DdpBackend {
    /// Gloo: TCP, between CPUs.
    Gloo,
    /// NVIDIA's NCCL, between GPUs. Needs the feature `nccl`.
    Nccl,
}

/// The shard of the data that this process loads, and the device of its batches: all of the data
/// (`Device::Cpu.into()`), or every `world_size`-th batch ([`DataShard::of`]).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DataShard {
    device: Device,
    rank: usize,
    world_size: usize,
}

impl From<Device> for DataShard {
    fn from(device: Device) -> Self {
        Self {
            device,
            rank: 0,
            world_size: 1,
        }
    }
}

impl DataShard {
    /// Returns the shard of this process in `group`.
    pub fn of(group: &ProcessGroup, device: Device) -> Self {
        Self {
            device,
            rank: group.rank(),
            world_size: group.world_size(),
        }
    }

    /// Returns the device to which batches are copied.
    pub fn device(&self) -> Device {
        self.device
    }

    pub(crate) fn world_size(&self) -> usize {
        self.world_size
    }

    pub(crate) fn shard(&self, last: LastShare) -> Result<Shard> {
        Ok(Shard::new(self.rank, self.world_size, last)?)
    }
}

impl TrainingArguments {
    /// Joins the process group that torchrun, a Kubernetes job, mpirun, srun or
    /// [`overdrive_distributed::Launch`] has started; without any of them it is a world of one.
    ///
    /// # Errors
    /// Errors about invalid variables of the launcher, or processes that do not join within `ddp_timeout`.
    pub fn init_process_group(&self) -> Result<ProcessGroup> {
        let config = GroupConfig::default()
            .with_timeout(Duration::from_secs_f64(self.ddp_timeout))
            // GroupConfig's own default is Gloo, which cannot reduce CUDA tensors.
            .with_backend(self.backend());
        Ok(init_process_group(config)?)
    }

    /// Wraps the trainable parameters, so that gradients are averaged over the processes during backward. In a
    /// world of one it does nothing.
    ///
    /// # Errors
    /// An error if the models of the processes differ.
    pub fn data_parallel(
        &self,
        group: &ProcessGroup,
        parameters: Vec<(String, Tensor)>,
    ) -> Result<DistributedDataParallel> {
        let defaults = DdpConfig::default();
        let config = DdpConfig {
            bucket_cap_mb: self.ddp_bucket_cap_mb.unwrap_or(defaults.bucket_cap_mb),
            find_unused_parameters: self.ddp_find_unused_parameters.unwrap_or(false),
            broadcast_buffers: self.ddp_broadcast_buffers.unwrap_or(true),
            ..defaults
        };
        // Transformer models have no buffers that change during training.
        let none: [(String, Tensor); 0] = [];
        Ok(DistributedDataParallel::new(
            group, parameters, none, config,
        )?)
    }

    /// Returns the device of this process. In a world of one it is the first GPU, or the CPU if there is none
    /// or `use_cpu` is set. In a larger world it is the GPU of the local rank with NCCL, and the CPU with Gloo.
    pub fn device(&self, group: &ProcessGroup) -> Device {
        match (group.world_size(), self.backend()) {
            _ if self.use_cpu => Device::Cpu,
            (1, _) => Device::cuda_if_available(),
            // Gloo reduces CPU tensors only, so with it all processes stay on the CPU.
            (_, Backend::Nccl) => group.device(),
            _ => Device::Cpu,
        }
    }

    fn backend(&self) -> Backend {
        match self.ddp_backend {
            Some(DdpBackend::Gloo) => Backend::Gloo,
            Some(DdpBackend::Nccl) => Backend::Nccl,
            None if self.use_cpu => Backend::Gloo,
            None => Backend::for_this_machine(),
        }
    }
}
