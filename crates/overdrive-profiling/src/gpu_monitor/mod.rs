//! Utilization, memory, temperature and power of a GPU, through NVIDIA's management library (NVML).

#[cfg(feature = "nvml")]
#[path = "nvml.rs"]
mod driver;
#[cfg(not(feature = "nvml"))]
#[path = "no_nvml.rs"]
mod driver;

use std::fmt;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use driver::Driver;

/// The state of a GPU at one moment. Values that the GPU does not report (as many virtual GPUs) are absent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct GpuSample {
    /// The fraction of the last sampling period (a sixth of a second to a second) in which any kernel ran, 0 to 1. A
    /// high value does not mean fast: small kernels one after another give 1 too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub utilization: Option<f64>,
    /// The fraction of that period in which memory was read or written, 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_utilization: Option<f64>,
    /// The bytes of its memory that all processes use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_used_bytes: Option<u64>,
    /// The bytes of its memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_total_bytes: Option<u64>,
    /// The temperature of the chip in degrees Celsius.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature_celsius: Option<f64>,
    /// The power that it draws, in watts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub power_watts: Option<f64>,
    /// The power limit, in watts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub power_limit_watts: Option<f64>,
}

/// A process that computes on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct GpuProcess {
    /// The process ID.
    pub pid: u32,
    /// The bytes of the GPU's memory that it uses; `None` if the driver does not report them.
    pub memory_bytes: Option<u64>,
}

/// A monitor of one GPU through NVML (`libnvidia-ml`, which comes with the driver). The library is loaded
/// at run time; without it, or without the feature `nvml` of this crate, [`GpuMonitor::open`] returns the reason,
/// and training continues.
pub struct GpuMonitor {
    driver: Driver,
    // NVML numbers GPUs by PCI bus, CUDA by speed and `CUDA_VISIBLE_DEVICES`: the bus id is what both know.
    pci_bus_id: String,
    name: String,
    last: Option<(Instant, GpuSample)>,
}

/// The reason why a GPU has no monitor.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("GPU {index} cannot be monitored: {reason}")]
pub struct NoGpuMonitor {
    index: usize,
    reason: String,
}

impl GpuMonitor {
    /// Opens a monitor of the GPU with this CUDA index.
    ///
    /// # Errors
    /// [`NoGpuMonitor`] with the reason: no driver, no library, no such GPU.
    pub fn open(index: usize) -> Result<Self, NoGpuMonitor> {
        let unavailable = |reason: String| NoGpuMonitor { index, reason };
        let identity = overdrive_sys::profiler::cuda_identity(index)
            .map_err(|error| unavailable(error.to_string()))?;
        let driver = Driver::open(&identity.pci_bus_id).map_err(unavailable)?;
        Ok(Self {
            driver,
            pci_bus_id: identity.pci_bus_id,
            name: identity.name,
            last: None,
        })
    }

    /// Returns the GPU's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Queries the driver, which takes some tens of microseconds to a millisecond on the host and nothing on the
    /// device.
    pub fn sample(&mut self) -> GpuSample {
        let sample = self.driver.sample(&self.pci_bus_id);
        self.last = Some((Instant::now(), sample));
        sample
    }

    /// Returns the processes other than this one that compute on the GPU, as far as the driver shows them: those of
    /// other containers may be hidden.
    pub fn other_processes(&self) -> Vec<GpuProcess> {
        let mut processes = self.driver.processes(&self.pci_bus_id);
        processes.retain(|process| process.pid != std::process::id());
        processes
    }

    /// Returns the last sample, or a new one if that is older than `age`.
    pub(crate) fn sample_at_most(&mut self, age: Duration) -> GpuSample {
        match self.last {
            Some((when, sample)) if when.elapsed() < age => sample,
            _ => self.sample(),
        }
    }
}

impl fmt::Debug for GpuMonitor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GpuMonitor")
            .field("name", &self.name)
            .field("pci_bus_id", &self.pci_bus_id)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_that_does_not_exist_gives_a_reason_and_no_panic() {
        let error = GpuMonitor::open(4711).expect_err("no machine has that many");
        let text = error.to_string();
        assert!(text.starts_with("GPU 4711 cannot be monitored: "), "{text}");
        assert!(
            text.len() > "GPU 4711 cannot be monitored: ".len(),
            "{text}"
        );
    }

    #[test]
    #[ignore = "needs a CUDA GPU"]
    fn a_monitor_on_a_gpu_reports_its_memory() {
        let mut monitor = GpuMonitor::open(0).expect("the driver comes with its library");
        let sample = monitor.sample();
        assert!(sample.memory_total_bytes > Some(1 << 30), "{sample:?}");
        assert!(
            sample
                .utilization
                .is_none_or(|fraction| (0.0..=1.0).contains(&fraction))
        );
        assert_eq!(monitor.sample_at_most(Duration::from_secs(60)), sample);
        let own = std::process::id();
        assert!(
            monitor
                .other_processes()
                .iter()
                .all(|other| other.pid != own)
        );
    }

    #[test]
    fn absent_values_leave_no_keys() {
        let sample = GpuSample {
            utilization: Some(0.93),
            ..GpuSample::default()
        };
        let json = serde_json::to_string(&sample).expect("JSON");
        assert_eq!(json, r#"{"utilization":0.93}"#);
        assert_eq!(
            serde_json::from_str::<GpuSample>(&json).expect("reads back"),
            sample
        );
    }
}
