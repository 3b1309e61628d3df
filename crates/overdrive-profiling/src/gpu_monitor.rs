//! How busy, how full, how warm a GPU is, through NVIDIA's management library.

use std::fmt;
use std::time::{Duration, Instant};

use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
use nvml_wrapper::error::NvmlError;
use serde::{Deserialize, Serialize};

/// What a GPU says of itself. What it does not tell (a virtual GPU, a passively cooled one) is
/// absent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct GpuSample {
    /// The part of the last moments (a sixth of a second to a second) in which any kernel ran, 0 to
    /// 1. High is not fast: one small kernel after the other makes 1 too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub utilization: Option<f64>,
    /// The part of that time in which memory was read or written, 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_utilization: Option<f64>,
    /// Bytes of its memory in use, by every process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_used_bytes: Option<u64>,
    /// Bytes of its memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_total_bytes: Option<u64>,
    /// Degrees Celsius of the chip.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature_celsius: Option<f64>,
    /// Watts it draws.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub power_watts: Option<f64>,
    /// Watts it may draw.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub power_limit_watts: Option<f64>,
}

/// A look at one GPU through NVML (`libnvidia-ml`, which comes with the driver). The library is loaded
/// when this is opened; without it there is a reason instead of a monitor, and training goes on.
pub struct GpuMonitor {
    nvml: Nvml,
    /// Where the GPU sits: NVML numbers them otherwise than CUDA does.
    pci_bus_id: String,
    name: String,
    last: Option<(Instant, GpuSample)>,
}

/// Why there is no monitor.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("GPU {index} cannot be watched: {reason}")]
pub struct NoGpuMonitor {
    index: usize,
    reason: String,
}

impl GpuMonitor {
    /// Watches the GPU that CUDA calls `index`.
    ///
    /// # Errors
    /// [`NoGpuMonitor`] with the reason: no driver, no library, no such GPU.
    pub fn open(index: usize) -> Result<Self, NoGpuMonitor> {
        let no = |reason: String| NoGpuMonitor { index, reason };
        let identity =
            overdrive_sys::profiler::cuda_identity(index).map_err(|error| no(error.to_string()))?;
        let nvml = Nvml::init().map_err(|error| no(in_words(&error)))?;
        // CUDA writes a domain of four digits, NVML takes that too.
        nvml.device_by_pci_bus_id(identity.pci_bus_id.as_str())
            .map_err(|error| no(in_words(&error)))?;
        Ok(Self {
            nvml,
            pci_bus_id: identity.pci_bus_id,
            name: identity.name,
            last: None,
        })
    }

    /// The GPU's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Asks the driver now: some tens of microseconds to a millisecond of host time. The device does
    /// not notice.
    pub fn sample(&mut self) -> GpuSample {
        let Ok(device) = self.nvml.device_by_pci_bus_id(self.pci_bus_id.as_str()) else {
            // It was there when this was opened: it fell off the bus.
            return GpuSample::default();
        };
        let rates = device.utilization_rates().ok();
        let memory = device.memory_info().ok();
        let watts = |milliwatts: u32| f64::from(milliwatts) * 1e-3;
        let sample = GpuSample {
            utilization: rates.as_ref().map(|rates| f64::from(rates.gpu) / 100.0),
            memory_utilization: rates.map(|rates| f64::from(rates.memory) / 100.0),
            memory_used_bytes: memory.as_ref().map(|memory| memory.used),
            memory_total_bytes: memory.map(|memory| memory.total),
            temperature_celsius: device
                .temperature(TemperatureSensor::Gpu)
                .ok()
                .map(f64::from),
            power_watts: device.power_usage().ok().map(watts),
            power_limit_watts: device.enforced_power_limit().ok().map(watts),
        };
        self.last = Some((Instant::now(), sample));
        sample
    }

    /// The last sample, or a new one where it is older than `age`.
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

fn in_words(error: &NvmlError) -> String {
    match error {
        NvmlError::LibloadingError(source) => {
            format!("NVIDIA's management library cannot be loaded ({source})")
        }
        NvmlError::DriverNotLoaded => "no NVIDIA driver is loaded".to_owned(),
        NvmlError::NotFound => "NVIDIA's management library does not know it".to_owned(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_that_is_not_there_gives_a_reason_and_no_panic() {
        let error = GpuMonitor::open(4711).expect_err("no machine has that many");
        let text = error.to_string();
        assert!(text.starts_with("GPU 4711 cannot be watched: "), "{text}");
        assert!(text.len() > "GPU 4711 cannot be watched: ".len(), "{text}");
    }

    #[test]
    fn a_gpu_that_is_there_tells_its_memory() {
        if !tch::Cuda::is_available() {
            eprintln!("not run: no GPU");
            return;
        }
        let mut monitor = GpuMonitor::open(0).expect("the driver comes with its library");
        let sample = monitor.sample();
        assert!(sample.memory_total_bytes > Some(1 << 30), "{sample:?}");
        assert!(
            sample
                .utilization
                .is_none_or(|part| (0.0..=1.0).contains(&part))
        );
        assert_eq!(monitor.sample_at_most(Duration::from_secs(60)), sample);
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
