//! Runs of several processes.

use std::time::Duration;

use overdrive_datasets::{LastShare, Shard};
use overdrive_distributed::{
    Backend, DdpConfig, DistributedDataParallel, GroupConfig, ProcessGroup, init_process_group,
};
use serde::{Deserialize, Serialize};
use tch::{Device, Tensor};

use crate::{Result, TrainingArguments};

/// What carries gradients between processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum DdpBackend {
    /// TCP, between CPUs.
    Gloo,
    /// NVIDIA's library, between GPUs. Needs the feature `nccl`.
    Nccl,
}

/// The part of the data that this process takes, and the device that it takes it to: all of it
/// (`Device::Cpu.into()`), or every `world_size`-th batch ([`Part::of`]).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Part {
    device: Device,
    rank: usize,
    world_size: usize,
}

impl From<Device> for Part {
    fn from(device: Device) -> Self {
        Self {
            device,
            rank: 0,
            world_size: 1,
        }
    }
}

impl Part {
    /// The part of this process in `group`.
    pub fn of(group: &ProcessGroup, device: Device) -> Self {
        Self {
            device,
            rank: group.rank(),
            world_size: group.world_size(),
        }
    }

    /// Where batches go.
    pub fn device(&self) -> Device {
        self.device
    }

    pub(crate) fn shard(&self, last: LastShare) -> Result<Shard> {
        Ok(Shard::new(self.rank, self.world_size, last)?)
    }
}

impl TrainingArguments {
    /// Meets the other processes that torchrun, a Kubernetes job, mpirun, srun or
    /// [`overdrive_distributed::Launch`] has started; without any of them it is a world of one.
    ///
    /// # Errors
    /// Where the launcher's variables are wrong, or the others do not come within `ddp_timeout`.
    pub fn init_process_group(&self) -> Result<ProcessGroup> {
        let config = GroupConfig::default()
            .with_timeout(Duration::from_secs_f64(self.ddp_timeout))
            .with_backend(self.backend());
        Ok(init_process_group(config)?)
    }

    /// Wraps the trainable parameters, so that gradients are averaged over the processes while backward runs.
    /// In a world of one it does nothing.
    ///
    /// # Errors
    /// Where the processes have other models.
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
        let none: [(String, Tensor); 0] = [];
        Ok(DistributedDataParallel::new(
            group, parameters, none, config,
        )?)
    }

    /// Returns the device of this process. In a world of one it is the first GPU, or the CPU where there is
    /// none or `use_cpu` says so; among several the GPU of its local rank over NCCL, and the CPU over Gloo.
    pub fn device(&self, group: &ProcessGroup) -> Device {
        match (group.world_size(), self.backend()) {
            _ if self.use_cpu => Device::Cpu,
            (1, _) => Device::cuda_if_available(),
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
