//! The current and the peak memory of tensors on every device.
//!
//! On accelerators these are the statistics of libtorch's caching allocator (`torch.cuda.memory_allocated` and its
//! relatives). On a CPU they are those of Overdrive's allocator, which replaces libtorch's at start-up: it counts the
//! bytes of every tensor, caches freed blocks for later tensors of their size, and accepts a limit. Live and cached
//! blocks together are at most a quarter more than the recent peak of live blocks (or 64 MiB more than the live
//! blocks); all other freed blocks are returned to the system. The recent peak decays by a quarter after each 65,536
//! allocations that did not reach it.
//!
//! All values are for the process, not for the thread.

use tch::Device;

use crate::device::{device_index, device_type};
use crate::error::{Result, check};
use crate::ffi;

/// The statistics of an allocator.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryStats {
    /// The bytes in live allocations.
    pub allocated_bytes: u64,
    /// The maximum of `allocated_bytes` since the start or the last [`reset_peak`].
    pub peak_allocated_bytes: u64,
    /// The bytes taken from the system: live blocks, cached blocks and the scratch of kernels.
    pub reserved_bytes: u64,
    /// The maximum of `reserved_bytes` since the start or the last [`reset_peak`].
    pub peak_reserved_bytes: u64,
    /// The number of allocations since the start.
    pub allocations: u64,
    /// The number of blocks taken from the system since the start. A loop in a steady state takes none.
    pub system_allocations: u64,
    /// The number of blocks returned to the system since the start.
    pub system_releases: u64,
    /// The bytes of the buffers that kernels keep for each thread ([`Scratch`]). 0 on accelerators.
    pub scratch_bytes: u64,
}

/// Returns the statistics of `device`.
///
/// # Errors
/// [`crate::Error::Torch`] if the device's back end is not loaded or no tensor was created on it yet, or for
/// the CPU if `OVERDRIVE_CPU_ALLOCATOR=libtorch` left libtorch's allocator in place.
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
        system_allocations: raw.system_allocations,
        system_releases: raw.system_releases,
        scratch_bytes: raw.scratch,
    })
}

/// Returns the bytes that new tensors can take on an accelerator: those that are free on the device
/// (`torch.cuda.mem_get_info`), and those that the allocator keeps unused.
///
/// # Errors
/// As [`stats`]; [`crate::Error::Torch`] for the CPU, whose memory other programs share.
pub fn free_bytes(device: Device) -> Result<u64> {
    let mut bytes = 0;
    // SAFETY: written only on success.
    let status = unsafe {
        ffi::od_device_memory_free(device_type(device), device_index(device), &raw mut bytes)
    };
    check(status, "reading the free memory of a device")?;
    Ok(bytes)
}

/// Resets the peaks to the current values.
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

/// Returns cached, unused blocks to the system (`torch.cuda.empty_cache`).
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

/// Limits the bytes of all tensors on the CPU and of the scratch of kernels together. An allocation over the limit
/// fails with [`crate::Error::OutOfMemory`] (through tch, with an error whose text contains `out of memory`) and
/// leaves the other tensors unchanged. Cached blocks count too: as many as necessary are returned to the system, now
/// and before an allocation is refused. `None` removes the limit. Use it to test the behaviour of a small machine on
/// a large one.
///
/// # Errors
/// [`crate::Error::Common`] for a device other than the CPU.
pub fn set_limit(device: Device, bytes: Option<u64>) -> Result<()> {
    if device != Device::Cpu {
        let given = format!("{device:?}");
        return Err(overdrive_core::Error::option(
            "device",
            given,
            "Cpu, the only device whose memory can be limited",
        )
        .into());
    }
    // The shim's value for "no limit" is UINT64_MAX.
    // SAFETY: a plain value.
    let status = unsafe { ffi::od_cpu_memory_set_limit(bytes.unwrap_or(u64::MAX)) };
    check(status, "setting a memory limit")
}

/// Enables (the default) or disables the CPU cache of freed blocks. Without it each tensor costs a malloc and
/// a free.
///
/// # Errors
/// [`crate::Error::Torch`] if libtorch throws.
pub fn set_cpu_caching(enabled: bool) -> Result<()> {
    // SAFETY: a plain value.
    let status = unsafe { ffi::od_cpu_memory_set_caching(i32::from(enabled)) };
    check(status, "switching the CPU cache")
}

/// The bytes of a buffer that a kernel keeps for its thread outside of the allocator. They are counted as
/// [`MemoryStats::scratch_bytes`] until this is dropped.
#[derive(Debug, Default)]
pub struct Scratch {
    bytes: u64,
}

impl Scratch {
    /// Returns a count of 0 bytes.
    #[must_use]
    pub const fn new() -> Self {
        Self { bytes: 0 }
    }

    /// Returns the bytes that it counts.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Counts `bytes` from here on.
    pub fn set(&mut self, bytes: u64) {
        if bytes == self.bytes {
            return;
        }
        // Sizes of memory are below 2^63, so neither conversion loses a bit.
        let change = bytes.wrapping_sub(self.bytes).cast_signed();
        // SAFETY: a plain value. Each change is undone by a later one, at the latest in `drop`.
        unsafe { ffi::od_cpu_memory_count_scratch(change) };
        self.bytes = bytes;
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        self.set(0);
    }
}
