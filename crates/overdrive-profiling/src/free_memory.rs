//! The memory that a run can still take.

use std::fs;

use overdrive_sys::memory;
use tch::{Device, Kind, Tensor};

/// Returns the bytes that new tensors can take on `device`; `None` if the system does not report them.
///
/// On an accelerator these are the free bytes of the device. On a CPU they are the memory that Linux calls available
/// (free, and caches that it would give up), or what the limit of the control group (the container) leaves of it.
///
/// ```
/// use overdrive_profiling::free_memory;
/// use tch::Device;
///
/// if let Some(bytes) = free_memory(Device::Cpu) {
///     println!("{} GiB are free", bytes >> 30);
/// }
/// ```
pub fn free_memory(device: Device) -> Option<u64> {
    match device {
        Device::Cpu => free_main_memory(),
        _ => {
            // Without a first tensor the allocator of the device does not exist yet.
            let _first = Tensor::f_zeros([1i64], (Kind::Uint8, device)).ok()?;
            memory::free_bytes(device).ok()
        }
    }
}

fn free_main_memory() -> Option<u64> {
    let available = mem_available(&fs::read_to_string("/proc/meminfo").ok()?)?;
    let group = |limit: &str, usage: &str| {
        let read = |path: &str| fs::read_to_string(path).ok();
        group_rest(&read(limit)?, &read(usage)?)
    };
    // Version 2 of control groups, then version 1.
    let rest = group("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current").or_else(|| {
        group(
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        )
    });
    Some(rest.map_or(available, |rest| rest.min(available)))
}

fn mem_available(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}

/// Returns the bytes between the usage and the limit of a control group; `None` without a limit (`max`).
fn group_rest(limit: &str, usage: &str) -> Option<u64> {
    let limit: u64 = limit.trim().parse().ok()?;
    Some(limit.saturating_sub(usage.trim().parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_available_memory_is_read_in_kibibytes() {
        let meminfo = "MemTotal:       8000000 kB\nMemFree: 1 kB\nMemAvailable:    500000 kB\n";
        assert_eq!(mem_available(meminfo), Some(500_000 * 1024));
        assert_eq!(mem_available("MemTotal: 8 kB\n"), None);
    }

    #[test]
    fn a_control_group_leaves_what_it_does_not_use() {
        assert_eq!(group_rest("1000\n", "400\n"), Some(600));
        assert_eq!(group_rest("1000\n", "1400\n"), Some(0));
        assert_eq!(group_rest("max\n", "400\n"), None);
    }

    #[test]
    fn a_device_that_does_not_exist_has_no_memory() {
        assert_eq!(free_memory(Device::Cuda(4711)), None);
        if cfg!(target_os = "linux") {
            assert!(free_memory(Device::Cpu) > Some(0));
        }
    }
}
