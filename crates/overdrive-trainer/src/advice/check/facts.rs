//! The facts about the machine that the checks compare a run with.

use std::path::Path;

use overdrive_precision::{Precision, Recommendation};
use overdrive_profiling::{GpuMonitor, GpuProcess, free_memory};
use overdrive_sys::threads;
use tch::Device;

use super::Sizes;
use crate::Result;
use crate::arguments::TrainingArguments;
use crate::memory_estimate::MemoryPlan;

/// The facts about the machine that a run depends on.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct MachineFacts {
    /// The device that trains.
    pub device: Device,
    /// The precision of the run.
    pub precision: Precision,
    /// The recommended precision of the device, with the reason.
    pub recommended: Recommendation,
    /// The reason why the precision of the run is slow or unsafe on the device.
    pub precision_warning: Option<String>,
    /// The bytes that new tensors can take on the device.
    pub free_memory: Option<u64>,
    /// The bytes that a user may write on the disk of the run's folder.
    pub free_disk: Option<u64>,
    /// The number of processors that this process may use, by its affinity and its control group.
    pub processors: usize,
    /// The number of threads inside one operator.
    pub threads: usize,
    /// The other processes on the GPU.
    pub gpu_processes: Vec<GpuProcess>,
}

impl MachineFacts {
    /// Finds the facts for a run with these arguments on `device`.
    ///
    /// # Errors
    /// An error of setting the number of threads.
    pub fn detect(arguments: &TrainingArguments, device: Device) -> Result<Self> {
        arguments.set_threads()?;
        let precision = arguments.precision();
        // Counted before anything is allocated: inside a container, the driver may list this process under a
        // different id.
        let gpu_processes = match device {
            Device::Cuda(index) => {
                GpuMonitor::open(index).map_or_else(|_| Vec::new(), |gpu| gpu.other_processes())
            }
            _ => Vec::new(),
        };
        let folder = arguments.output_dir.as_deref();
        Ok(Self {
            device,
            precision,
            recommended: Precision::recommend(device),
            precision_warning: precision.warning(device),
            free_memory: free_memory(device),
            free_disk: free_disk(folder.unwrap_or(Path::new("."))),
            processors: std::thread::available_parallelism().map_or(1, Into::into),
            threads: threads::intra_op(),
            gpu_processes,
        })
    }

    /// Returns the memory plan of the run on this machine.
    pub(super) fn memory_plan(&self, arguments: &TrainingArguments, sizes: &Sizes) -> MemoryPlan {
        MemoryPlan {
            gpu_memory: self.free_memory.filter(|_| self.device.is_cuda()),
            ..arguments.memory_plan(sizes.vocabulary, self.precision)
        }
    }
}

/// Returns the bytes that a user may write on the disk of `path`, whose folder need not exist yet.
#[cfg(unix)]
fn free_disk(path: &Path) -> Option<u64> {
    let absolute = std::path::absolute(path).ok()?;
    let there = absolute.ancestors().find(|path| path.exists())?;
    let disk = rustix::fs::statvfs(there).ok()?;
    disk.f_bavail.checked_mul(disk.f_frsize)
}

#[cfg(not(unix))]
fn free_disk(_: &Path) -> Option<u64> {
    None
}
