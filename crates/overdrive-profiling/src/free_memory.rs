//! The memory that is still available to a run.

use std::fs;
use std::path::Path;

use overdrive_sys::memory;
use tch::{Device, Kind, Tensor};

/// Returns the bytes that new tensors can take on `device`; `None` if the system does not report them.
///
/// On an accelerator these are the free bytes of the device. On a CPU they are the memory that Linux reports as
/// available (free memory and reclaimable caches), or less if the limits of the control groups (that of the
/// container, and its ancestors) leave less. The page cache does not count towards a group's usage.
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
    let membership = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let rest = control_groups_rest(Path::new("/sys/fs/cgroup"), &membership);
    Some(rest.map_or(available, |rest| rest.min(available)))
}

fn mem_available(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}

/// The files of the memory controller in a control group.
struct Controller {
    /// The limits: beyond `memory.high` the group is slowed down until it has given memory back.
    limits: &'static [&'static str],
    usage: &'static str,
    /// The counters of `memory.stat` whose memory the system reclaims when the group needs it: the page cache.
    reclaimable: &'static [&'static str],
}

const VERSION_2: Controller = Controller {
    limits: &["memory.max", "memory.high"],
    usage: "memory.current",
    reclaimable: &["active_file", "inactive_file", "slab_reclaimable"],
};

const VERSION_1: Controller = Controller {
    limits: &["memory.limit_in_bytes"],
    usage: "memory.usage_in_bytes",
    reclaimable: &["total_active_file", "total_inactive_file"],
};

/// Returns the bytes that the control groups of a process leave it: its own group and the ancestors, of both versions
/// under `mount`. `membership` is its `/proc/self/cgroup`. `None` without a limit.
fn control_groups_rest(mount: &Path, membership: &str) -> Option<u64> {
    let rests = membership.lines().filter_map(|line| {
        // `4:memory:/path` in version 1, `0::/path` in version 2.
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?);
        let (controller, root) = match controllers {
            "" => (VERSION_2, mount.to_owned()),
            _ if controllers.split(',').any(|name| name == "memory") => {
                (VERSION_1, mount.join("memory"))
            }
            _ => return None,
        };
        // A container may see the path of its group on the host, but only the group itself, at the root.
        let path = Path::new(path.trim_start_matches('/'));
        let groups = path.ancestors().map(|group| root.join(group));
        groups.filter_map(|group| controller.rest(&group)).min()
    });
    rests.min()
}

impl Controller {
    /// Returns the lowest limit of a group minus its usage, without reclaimable memory.
    fn rest(&self, group: &Path) -> Option<u64> {
        let read = |file: &str| fs::read_to_string(group.join(file)).ok();
        let number = |file: &str| read(file)?.trim().parse::<u64>().ok();
        // `max` is not a number.
        let limit = self.limits.iter().filter_map(|file| number(file)).min()?;
        let stat = read("memory.stat").unwrap_or_default();
        let reclaimable = stat.lines().filter_map(|line| {
            let (name, bytes) = line.split_once(' ')?;
            let counts = self.reclaimable.contains(&name);
            bytes.trim().parse::<u64>().ok().filter(|_| counts)
        });
        let used = number(self.usage)?.saturating_sub(reclaimable.sum());
        Some(limit.saturating_sub(used))
    }
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

    /// Writes files under `root`.
    fn write(root: &Path, files: &[(&str, &str)]) {
        for (file, text) in files {
            let path = root.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
    }

    #[test]
    fn the_least_rest_of_nested_groups_of_version_2_counts_without_the_page_cache() {
        let mount = tempfile::tempdir().unwrap();
        let rest = |membership| control_groups_rest(mount.path(), membership);
        assert_eq!(rest("0::/outer/inner\n"), None);
        write(
            mount.path(),
            &[
                ("outer/inner/memory.max", "max\n"),
                ("outer/inner/memory.high", "max\n"),
                ("outer/inner/memory.current", "400\n"),
            ],
        );
        assert_eq!(rest("0::/outer/inner\n"), None);
        write(
            mount.path(),
            &[
                ("outer/memory.max", "1000\n"),
                ("outer/memory.high", "900\n"),
                ("outer/memory.current", "880\n"),
                (
                    "outer/memory.stat",
                    "anon 80\nactive_file 300\ninactive_file 450\nslab_reclaimable 10\nshmem 40\n",
                ),
            ],
        );
        // 900 - (880 - 300 - 450 - 10)
        assert_eq!(rest("0::/outer/inner\n"), Some(780));
        write(mount.path(), &[("outer/inner/memory.max", "500\n")]);
        assert_eq!(rest("0::/outer/inner\n"), Some(100));
        // A group that uses more than its limit, which was lowered.
        write(mount.path(), &[("outer/inner/memory.max", "300\n")]);
        assert_eq!(rest("0::/outer/inner\n"), Some(0));
    }

    #[test]
    fn groups_of_version_1_are_found_by_their_path_or_at_the_root_of_a_container() {
        let mount = tempfile::tempdir().unwrap();
        let membership = "5:cpu,cpuacct:/elsewhere\n4:memory:/docker/abc\n0::/\n";
        write(
            mount.path(),
            &[
                ("memory/memory.limit_in_bytes", "2000\n"),
                ("memory/memory.usage_in_bytes", "1500\n"),
                (
                    "memory/memory.stat",
                    "inactive_file 5\ntotal_inactive_file 700\ntotal_active_file 100\n",
                ),
            ],
        );
        assert_eq!(control_groups_rest(mount.path(), membership), Some(1300));
        write(
            mount.path(),
            &[
                ("memory/docker/abc/memory.limit_in_bytes", "1000\n"),
                ("memory/docker/abc/memory.usage_in_bytes", "100\n"),
            ],
        );
        assert_eq!(control_groups_rest(mount.path(), membership), Some(900));
    }

    #[test]
    fn a_device_that_does_not_exist_has_no_memory() {
        assert_eq!(free_memory(Device::Cuda(4711)), None);
        if cfg!(target_os = "linux") {
            assert!(free_memory(Device::Cpu) > Some(0));
        }
    }
}
