//! How much memory tensors take, and took at most, on every device.
//!
//! On accelerators these are the statistics of libtorch's caching allocator
//! (`torch.cuda.memory_allocated` and its kin). On a CPU they are those of Overdrive's own, which is
//! put in libtorch's place at start-up: it counts every tensor's bytes, keeps freed blocks for the
//! next tensor of their size, and can be given a limit.
//!
//! The numbers are of the process, not of the thread.

use tch::Device;

use crate::device::{device_index, device_type};
use crate::error::{Result, check};
use crate::ffi;

/// What an allocator has given out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryStats {
    /// Bytes in live allocations.
    pub allocated_bytes: u64,
    /// The most there were since the start or the last [`reset_peak`].
    pub peak_allocated_bytes: u64,
    /// Bytes taken from the system: live ones and cached ones.
    pub reserved_bytes: u64,
    /// The most there were since the start or the last [`reset_peak`].
    pub peak_reserved_bytes: u64,
    /// Allocations since the start.
    pub allocations: u64,
}

/// The statistics of `device`.
///
/// # Errors
/// [`crate::Error::Torch`] if the device's back end is not loaded or nothing was put on it yet, or if
/// `OVERDRIVE_CPU_ALLOCATOR=libtorch` left the CPU uncounted.
pub fn stats(device: Device) -> Result<MemoryStats> {
    let mut raw = ffi::RawMemoryStats::default();
    // SAFETY: `raw` is written only on success.
    let status = unsafe {
        match device {
            Device::Cpu => ffi::od_cpu_memory_stats(&raw mut raw),
            _ => {
                ffi::od_device_memory_stats(device_type(device), device_index(device), &raw mut raw)
            }
        }
    };
    check(status, "reading memory statistics")?;
    Ok(MemoryStats {
        allocated_bytes: raw.allocated,
        peak_allocated_bytes: raw.peak_allocated,
        reserved_bytes: raw.reserved,
        peak_reserved_bytes: raw.peak_reserved,
        allocations: raw.allocations,
    })
}

/// Starts the peaks anew at what is allocated now.
///
/// # Errors
/// As [`stats`].
pub fn reset_peak(device: Device) -> Result<()> {
    // SAFETY: plain values.
    let status = unsafe {
        match device {
            Device::Cpu => ffi::od_cpu_memory_reset_peak(),
            _ => ffi::od_device_memory_reset_peak(device_type(device), device_index(device)),
        }
    };
    check(status, "resetting peak memory")
}

/// Gives cached, unused blocks back to the system (`torch.cuda.empty_cache`).
///
/// # Errors
/// As [`stats`].
pub fn empty_cache(device: Device) -> Result<()> {
    // SAFETY: plain values.
    let status = unsafe {
        match device {
            Device::Cpu => ffi::od_cpu_memory_empty_cache(),
            _ => ffi::od_device_memory_empty_cache(device_type(device)),
        }
    };
    check(status, "emptying the memory cache")
}

/// Bounds the bytes that tensors may take on a CPU together: what would go over fails with
/// [`crate::Error::OutOfMemory`] (through tch: an error whose text says `out of memory`), and nothing
/// is lost. `None` lifts it. For trying on a large machine what a small one would do.
///
/// # Errors
/// [`crate::Error::BadArgument`] for a device other than the CPU: there, use the device's own means.
pub fn set_limit(device: Device, bytes: Option<u64>) -> Result<()> {
    if device != Device::Cpu {
        return Err(crate::Error::BadArgument {
            operation: "setting a memory limit".to_owned(),
            message: format!("only the CPU's memory can be limited, not that of {device:?}"),
        });
    }
    // SAFETY: a plain value.
    let status = unsafe { ffi::od_cpu_memory_set_limit(bytes.unwrap_or(u64::MAX)) };
    check(status, "setting a memory limit")
}

/// Switches the CPU cache of freed blocks (it is on). Off, each tensor is a malloc and a free.
///
/// # Errors
/// Only if libtorch throws.
pub fn set_cpu_caching(enabled: bool) -> Result<()> {
    // SAFETY: a plain value.
    let status = unsafe { ffi::od_cpu_memory_set_caching(i32::from(enabled)) };
    check(status, "switching the CPU cache")
}
