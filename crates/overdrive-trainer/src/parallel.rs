//! Runs of several processes.

use std::time::Duration;

use overdrive_datasets::{LastShare, Shard};
use overdrive_distributed::{
    Backend, DdpConfig, DistributedDataParallel, GroupConfig, ProcessGroup, init_process_group,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tch::{Device, Tensor};

use crate::{Error, Result, RunFolder, TrainingArguments};

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

impl RunFolder {
    /// As [`open_or_create`](Self::open_or_create), on rank 0; the others learn from it which folder it is,
    /// or what went wrong.
    ///
    /// # Errors
    /// As [`open_or_create`](Self::open_or_create).
    pub fn open_or_create_in(group: &ProcessGroup, arguments: &TrainingArguments) -> Result<Self> {
        made_on_main(group, "open the run's folder", || {
            Self::open_or_create(arguments)
        })
    }
}

/// What `make` makes on rank 0, for all; its own error in a world of one.
pub(crate) fn made_on_main<T: Serialize + DeserializeOwned>(
    group: &ProcessGroup,
    what: &str,
    make: impl FnOnce() -> Result<T>,
) -> Result<T> {
    match group.world_size() {
        1 => make(),
        _ => Ok(group.on_main(what, make)?),
    }
}

/// The error of a run in which a process was lost names that process, wherever this one noticed.
pub(crate) fn naming_the_lost(group: &ProcessGroup, error: Error) -> Error {
    match error {
        Error::Distributed(_) => error,
        other => match group.explain(&other) {
            Some(explained) => explained.into(),
            None => other,
        },
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

    /// Wraps what learns, so that gradients are averaged over the processes while backward runs. In a
    /// world of one it does nothing.
    ///
    /// # Errors
    /// Where the processes have other models.
    pub fn data_parallel(
        &self,
        group: &ProcessGroup,
        weights: Vec<(String, Tensor)>,
    ) -> Result<DistributedDataParallel> {
        let defaults = DdpConfig::default();
        let config = DdpConfig {
            bucket_cap_mb: self.ddp_bucket_cap_mb.unwrap_or(defaults.bucket_cap_mb),
            find_unused_parameters: self.ddp_find_unused_parameters.unwrap_or(false),
            broadcast_buffers: self.ddp_broadcast_buffers.unwrap_or(true),
            ..defaults
        };
        let none: [(String, Tensor); 0] = [];
        Ok(DistributedDataParallel::new(group, weights, none, config)?)
    }

    /// The first GPU, or the CPU where there is none or `use_cpu` says so.
    pub fn device(&self) -> Device {
        if self.use_cpu {
            Device::Cpu
        } else {
            Device::cuda_if_available()
        }
    }

    /// The device of this process among those of `group`: the GPU of its local rank over NCCL, and the CPU
    /// over Gloo. In a world of one, [`device`](Self::device).
    pub fn device_in(&self, group: &ProcessGroup) -> Device {
        match (group.world_size(), self.backend()) {
            (1, _) => self.device(),
            (_, Backend::Nccl) if !self.use_cpu => group.device(),
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
