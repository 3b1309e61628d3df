//! The machine of a measurement.

use std::fs;

use overdrive_sys::build_info::{cpu_capability, libtorch_version};
use overdrive_sys::threads;
use serde::{Deserialize, Serialize};

/// The machine of a measurement, for readers of its numbers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// The name of the processor.
    pub cpu: String,
    /// The number of processors that this process may run on.
    pub logical_cores: usize,
    /// The number of threads that libtorch uses inside one operator.
    pub threads: usize,
    /// The bytes of main memory; `None` if the system does not report them.
    pub memory_bytes: Option<u64>,
    /// The operating system and architecture, as `linux x86_64`.
    pub system: String,
    /// The version of libtorch.
    pub libtorch: String,
    /// The vector instructions of libtorch's CPU kernels, by its name: `AVX2`.
    pub cpu_capability: String,
    /// The number of CUDA devices that libtorch sees.
    pub cuda_devices: usize,
    /// The name of the device trained on; `None` unless the caller sets it.
    pub accelerator: Option<String>,
}

impl Machine {
    /// Returns the machine that the program runs on.
    pub fn detect() -> Self {
        Self {
            cpu: cpu_name().unwrap_or_else(|| "unknown".to_owned()),
            logical_cores: std::thread::available_parallelism().map_or(1, Into::into),
            threads: threads::intra_op(),
            memory_bytes: memory_bytes(),
            system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            // The error takes the place of the version: a reader sees the reason and not a guess.
            libtorch: libtorch_version().unwrap_or_else(|error| error.to_string()),
            cpu_capability: cpu_capability().unwrap_or_else(|error| error.to_string()),
            cuda_devices: usize::try_from(tch::Cuda::device_count()).unwrap_or(0),
            accelerator: None,
        }
    }
}

/// Returns the value of a `key : value` line of a file in Linux' `/proc`.
fn proc_value(file: &str, key: &str) -> Option<String> {
    let text = fs::read_to_string(file).ok()?;
    let line = text.lines().find(|line| line.starts_with(key))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

fn cpu_name() -> Option<String> {
    if cfg!(target_os = "macos") {
        return sysctl("machdep.cpu.brand_string");
    }
    // Linux on ARM has no model name, only the numbers of implementer and part.
    proc_value("/proc/cpuinfo", "model name").or_else(|| {
        let implementer = proc_value("/proc/cpuinfo", "CPU implementer")?;
        let part = proc_value("/proc/cpuinfo", "CPU part")?;
        Some(format!(
            "{} implementer {implementer} part {part}",
            std::env::consts::ARCH
        ))
    })
}

fn memory_bytes() -> Option<u64> {
    if cfg!(target_os = "macos") {
        return sysctl("hw.memsize")?.parse().ok();
    }
    let kibibytes = proc_value("/proc/meminfo", "MemTotal")?;
    Some(kibibytes.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

fn sysctl(name: &str) -> Option<String> {
    let output = std::process::Command::new("sysctl")
        .args(["-n", name])
        .output()
        .ok()?;
    output
        .status
        .success()
        .then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_a_processor_and_threads() {
        let machine = Machine::detect();
        assert!(!machine.cpu.is_empty());
        assert!(machine.logical_cores >= 1);
        assert!(machine.threads >= 1);
        assert!(machine.libtorch.starts_with("2."), "{}", machine.libtorch);
        assert!(
            !machine.cpu_capability.contains(' '),
            "{}",
            machine.cpu_capability
        );
        if cfg!(target_os = "linux") {
            assert!(machine.memory_bytes.is_some_and(|bytes| bytes > 100 << 20));
        }
    }
}
