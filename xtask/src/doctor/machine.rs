//! Processor and memory.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use overdrive_build::cpu::CpuFeatures;

/// The processors.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Cpu {
    pub(super) model: String,
    pub(super) physical_cores: usize,
    pub(super) logical_cores: usize,
}

impl Cpu {
    /// Returns the number of threads that libtorch starts by default: one per physical core, and at most one per CPU that
    /// the affinity of the process allows. It does not see the quota of a container.
    pub(super) fn threads(&self) -> usize {
        #[cfg(target_os = "linux")]
        if let Ok(allowed) = rustix::thread::sched_getaffinity(None) {
            return self.physical_cores.min(allowed.count() as usize);
        }
        self.physical_cores
    }
}

pub(super) fn cpu() -> Cpu {
    let here = std::thread::available_parallelism().map_or(1, usize::from);
    match fs::read_to_string("/proc/cpuinfo") {
        Ok(text) => parse_cpuinfo(&text, here),
        Err(_) => {
            let number = |name: &str| sysctl(name)?.parse().ok();
            Cpu {
                model: sysctl("machdep.cpu.brand_string").unwrap_or_else(|| "unknown".to_owned()),
                physical_cores: number("hw.physicalcpu").unwrap_or(here),
                logical_cores: number("hw.logicalcpu").unwrap_or(here),
            }
        }
    }
}

/// Counts the cores. `/proc/cpuinfo` of x86-64 names the core of each processor; that of aarch64 does not, and
/// has no model name either, so there each processor counts as a core.
fn parse_cpuinfo(text: &str, here: usize) -> Cpu {
    let values = |key: &str| {
        let key = key.to_owned();
        text.lines()
            .filter_map(|line| line.split_once(':'))
            .filter(move |(name, _)| name.trim() == key)
            .map(|(_, value)| value.trim().to_owned())
            .collect::<Vec<_>>()
    };
    let logical = match values("processor").len() {
        0 => here,
        count => count,
    };
    let cores: BTreeSet<_> = values("physical id")
        .into_iter()
        .zip(values("core id"))
        .collect();
    let model = values("model name").into_iter().next();
    let arm = || {
        let part = |key| values(key).into_iter().next();
        Some(format!(
            "Arm, implementer {}, part {}",
            part("CPU implementer")?,
            part("CPU part")?
        ))
    };
    Cpu {
        model: model.or_else(arm).unwrap_or_else(|| "unknown".to_owned()),
        physical_cores: if cores.is_empty() {
            logical
        } else {
            cores.len()
        },
        logical_cores: logical,
    }
}

/// Lists the features that matter, including those that are missing.
pub(super) fn features_line(features: CpuFeatures) -> String {
    let list: &[(&str, bool)] = if cfg!(target_arch = "aarch64") {
        &[("NEON", features.neon), ("BF16", features.bf16)]
    } else {
        &[
            ("AVX2", features.avx2),
            ("FMA", features.fma),
            ("AVX-512", features.avx512),
            ("VNNI", features.vnni),
            ("AVX512-BF16", features.avx512_bf16),
            ("AMX-BF16", features.amx_bf16),
        ]
    };
    let names = |there: bool| {
        let names: Vec<&str> = list
            .iter()
            .filter(|(_, has)| *has == there)
            .map(|(name, _)| *name)
            .collect();
        if names.is_empty() {
            "none".to_owned()
        } else {
            names.join(", ")
        }
    };
    format!("{} (not there: {})", names(true), names(false))
}

/// The memory in bytes; `None` for values that the system does not report.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Memory {
    pub(super) total: Option<u64>,
    pub(super) available: Option<u64>,
    /// The limit of the control group, which is that of the container.
    pub(super) limit: Option<u64>,
}

pub(super) fn memory() -> Memory {
    match fs::read_to_string("/proc/meminfo") {
        Ok(text) => {
            let limit = [
                "/sys/fs/cgroup/memory.max",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            ]
            .iter()
            .find_map(|path| fs::read_to_string(path).ok()?.trim().parse().ok());
            let memory = parse_meminfo(&text);
            // Without a limit, version 1 reports a number larger than any memory.
            let limit = limit.filter(|limit| memory.total.is_none_or(|total| *limit < total));
            Memory { limit, ..memory }
        }
        Err(_) => Memory {
            total: sysctl("hw.memsize").and_then(|text| text.parse().ok()),
            ..Memory::default()
        },
    }
}

fn parse_meminfo(text: &str) -> Memory {
    let bytes = |key: &str| {
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
        let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(kilobytes * 1024)
    };
    Memory {
        total: bytes("MemTotal"),
        available: bytes("MemAvailable"),
        limit: None,
    }
}

/// Returns a value of macOS' `sysctl`.
fn sysctl(name: &str) -> Option<String> {
    let output = Command::new("sysctl").args(["-n", name]).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    (output.status.success() && !text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_threads_of_one_core_are_one_core() {
        let processor = |number: u32, core: u32| {
            format!(
                "processor\t: {number}\nmodel name\t: Some CPU @ 2.50GHz\nphysical id\t: 0\n\
                 siblings\t: 4\ncore id\t\t: {core}\ncpu cores\t: 2\n\n"
            )
        };
        let text: String = [(0, 0), (1, 1), (2, 0), (3, 1)]
            .map(|(n, c)| processor(n, c))
            .concat();
        let cpu = parse_cpuinfo(&text, 4);
        assert_eq!(cpu.model, "Some CPU @ 2.50GHz");
        assert_eq!((cpu.physical_cores, cpu.logical_cores), (2, 4));
    }

    #[test]
    fn cores_of_two_sockets_with_the_same_numbers_are_two() {
        let text = "processor: 0\nphysical id: 0\ncore id: 0\n\nprocessor: 1\nphysical id: 1\n\
                    core id: 0\n";
        assert_eq!(parse_cpuinfo(text, 2).physical_cores, 2);
    }

    #[test]
    fn on_arm_each_processor_is_a_core() {
        let text = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd bf16\n\
                    CPU implementer\t: 0x41\nCPU part\t: 0xd40\n\nprocessor\t: 1\n\
                    CPU implementer\t: 0x41\nCPU part\t: 0xd40\n";
        let cpu = parse_cpuinfo(text, 2);
        assert_eq!((cpu.physical_cores, cpu.logical_cores), (2, 2));
        assert_eq!(cpu.model, "Arm, implementer 0x41, part 0xd40");
    }

    #[test]
    fn memory_is_in_kilobytes() {
        let memory = parse_meminfo("MemTotal:       8000000 kB\nMemAvailable:    500000 kB\n");
        assert_eq!(memory.total, Some(8_000_000 * 1024));
        assert_eq!(memory.available, Some(500_000 * 1024));
        assert_eq!(parse_meminfo(""), Memory::default());
    }
}
