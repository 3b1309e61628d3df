//! NVIDIA GPUs, as listed by `nvidia-smi`.

use std::fmt;
use std::process::Command;

/// The first driver that runs CUDA 13.
pub(super) const DRIVER_FOR_CUDA_13: u32 = 580;

/// One GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Gpu {
    pub(super) name: String,
    pub(super) driver: String,
    pub(super) driver_major: u32,
    /// The memory in MiB.
    pub(super) memory_mib: u64,
    /// The compute capability, for example (8, 0); `None` from drivers that do not report it.
    pub(super) capability: Option<(u32, u32)>,
}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}, {} MiB, driver {}",
            self.name, self.memory_mib, self.driver
        )?;
        match self.capability {
            Some((major, minor)) => write!(f, ", compute capability {major}.{minor}"),
            None => write!(f, ", compute capability unknown"),
        }
    }
}

/// The reason why no GPU can be listed.
#[derive(Debug)]
pub(super) enum Absence {
    /// No driver is installed.
    NoTool,
    /// A driver is installed, but does not answer.
    Failed(String),
}

pub(super) fn list() -> Result<Vec<Gpu>, Absence> {
    let output = Command::new("nvidia-smi")
        .args(["--query-gpu=name,driver_version,memory.total,compute_cap"])
        .arg("--format=csv,noheader,nounits")
        .output()
        .map_err(|_| Absence::NoTool)?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        let all = format!("{text}{}", String::from_utf8_lossy(&output.stderr));
        let line = all.lines().find(|line| !line.trim().is_empty());
        return Err(Absence::Failed(
            line.unwrap_or("no message").trim().to_owned(),
        ));
    }
    Ok(parse(&text))
}

fn parse(text: &str) -> Vec<Gpu> {
    text.lines()
        .filter_map(|line| {
            let parts: Vec<&str> = line.split(',').map(str::trim).collect();
            let [name, driver, memory, capability] = parts[..] else {
                return None;
            };
            let numbers = capability.split_once('.');
            Some(Gpu {
                name: name.to_owned(),
                driver: driver.to_owned(),
                driver_major: driver.split('.').next()?.parse().ok()?,
                memory_mib: memory.parse().ok()?,
                capability: numbers.and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?))),
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_nvidia_smi_is_read() {
        let gpus = parse("NVIDIA H200, 580.95.05, 143771, 9.0\nTesla T4, 470.1, 15360, [N/A]\n");
        assert_eq!(gpus.len(), 2);
        assert_eq!(gpus[0].capability, Some((9, 0)));
        assert_eq!(gpus[0].memory_mib, 143_771);
        assert!(gpus[0].driver_major >= DRIVER_FOR_CUDA_13);
        assert_eq!(gpus[1].capability, None);
        assert!(gpus[1].driver_major < DRIVER_FOR_CUDA_13);
        assert!(parse("No devices were found\n").is_empty());
    }
}
