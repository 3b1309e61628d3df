//! The shard of the data that a process loads.

use overdrive_datasets::{LastShare, Shard};
use overdrive_distributed::ProcessGroup;
use tch::Device;

use crate::Result;

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

    /// Returns the number of this process.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of processes.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    pub(crate) fn shard(&self, last: LastShare) -> Result<Shard> {
        Ok(Shard::new(self.rank, self.world_size, last)?)
    }
}
