//! The facts about a device on which settings depend.

use overdrive_core::gpu_peaks::GpuGeneration;
use overdrive_precision::Precision;
use overdrive_profiling::{Machine, free_memory};
use tch::Device;

/// The kind of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceKind {
    /// A GPU of NVIDIA.
    Gpu {
        /// The compute capability, such as (8, 6).
        capability: (u32, u32),
    },
    /// A CPU.
    Cpu {
        /// The number of cores.
        cores: usize,
        /// If `true`, it multiplies bf16 faster than fp32.
        fast_bf16: bool,
    },
}

/// The facts about a device on which settings depend.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceFacts {
    /// The name.
    pub name: std::borrow::Cow<'static, str>,
    /// The memory in MiB.
    pub memory_mib: u64,
    /// The kind.
    pub kind: DeviceKind,
}

impl DeviceFacts {
    /// Returns the facts about a device of this machine, with the memory that is free now.
    pub fn detect(device: Device) -> Self {
        let memory_mib = free_memory(device).unwrap_or(0) >> 20;
        match device {
            Device::Cuda(index) => Self {
                name: overdrive_sys::profiler::cuda_identity(index)
                    .map_or_else(|_| "unknown GPU".into(), |identity| identity.name.into()),
                memory_mib,
                kind: DeviceKind::Gpu {
                    capability: overdrive_sys::cuda::compute_capability(index).unwrap_or((0, 0)),
                },
            },
            _ => {
                let machine = Machine::detect();
                Self {
                    name: machine.cpu.into(),
                    memory_mib,
                    kind: DeviceKind::Cpu {
                        cores: machine.logical_cores,
                        fast_bf16: Precision::recommend(device).precision == Precision::Bf16,
                    },
                }
            }
        }
    }

    /// Returns the precision: bf16 from compute capability 8.0 on, fp16 on the tensor cores before, fp32 without any.
    /// GTX cards have no tensor cores, also those of the capability 7.5 (GTX 16).
    pub fn precision(&self) -> Precision {
        match self.kind {
            DeviceKind::Gpu { .. } if self.name.to_ascii_lowercase().contains("gtx") => {
                Precision::Fp32
            }
            DeviceKind::Gpu { capability } => {
                Precision::of_generation(&GpuGeneration::of(capability))
            }
            DeviceKind::Cpu { fast_bf16, .. } => match fast_bf16 {
                true => Precision::Bf16,
                false => Precision::Fp32,
            },
        }
    }

    /// Returns the attention kernel that `flash_attention_2` runs. None of them stores the scores.
    pub fn attention(&self) -> &'static str {
        match self.kind {
            // libtorch's FlashAttention 2 (or cuDNN's), which needs half precision.
            DeviceKind::Gpu { capability } if capability >= (8, 0) => "flash",
            // libtorch's, for older GPUs and fp32.
            DeviceKind::Gpu { .. } => "memory-efficient",
            // Overdrive's.
            DeviceKind::Cpu { .. } => "blockwise",
        }
    }

    /// Returns the number of threads that prepare batches. They are threads and not processes, so one suffices for
    /// a CPU that trains, and two keep a GPU supplied.
    pub fn workers(&self) -> usize {
        match self.kind {
            DeviceKind::Cpu { cores, .. } if cores <= 8 => 1,
            _ => 2,
        }
    }

    /// Returns the bytes that tensors may take: nine tenths of a GPU without the half GiB of CUDA's context, and three
    /// quarters of main memory, which other programs and the page cache share.
    pub fn usable_memory(&self) -> u64 {
        let mib = match self.kind {
            DeviceKind::Gpu { .. } => self.memory_mib.saturating_sub(512) * 9 / 10,
            DeviceKind::Cpu { .. } => self.memory_mib * 3 / 4,
        };
        mib << 20
    }
}
