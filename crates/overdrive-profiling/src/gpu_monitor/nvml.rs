//! NVIDIA's management library.

use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;

use super::{GpuProcess, GpuSample};

/// The loaded library.
pub(super) struct Driver(Nvml);

impl Driver {
    /// Loads the library and finds the GPU; an error is the reason in words.
    pub(super) fn open(pci_bus_id: &str) -> Result<Self, String> {
        let nvml = Nvml::init().map_err(|error| message(&error))?;
        // CUDA writes the PCI domain with four digits, NVML with eight; it accepts both.
        nvml.device_by_pci_bus_id(pci_bus_id)
            .map_err(|error| message(&error))?;
        Ok(Self(nvml))
    }

    pub(super) fn sample(&self, pci_bus_id: &str) -> GpuSample {
        let Ok(device) = self.0.device_by_pci_bus_id(pci_bus_id) else {
            // The GPU has failed since `open` found it ("fell off the bus").
            return GpuSample::default();
        };
        let rates = device.utilization_rates().ok();
        let memory = device.memory_info().ok();
        let watts = |milliwatts: u32| f64::from(milliwatts) * 1e-3;
        GpuSample {
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
        }
    }

    /// Returns the processes that compute on the GPU; none if the driver cannot be queried.
    pub(super) fn processes(&self, pci_bus_id: &str) -> Vec<GpuProcess> {
        let device = self.0.device_by_pci_bus_id(pci_bus_id);
        let processes = device.and_then(|device| device.running_compute_processes());
        let processes = processes.unwrap_or_default().into_iter();
        processes
            .map(|process| GpuProcess {
                pid: process.pid,
                memory_bytes: match process.used_gpu_memory {
                    UsedGpuMemory::Used(bytes) => Some(bytes),
                    UsedGpuMemory::Unavailable => None,
                },
            })
            .collect()
    }
}

fn message(error: &NvmlError) -> String {
    match error {
        NvmlError::LibloadingError(source) => {
            format!("NVIDIA's management library cannot be loaded ({source})")
        }
        NvmlError::DriverNotLoaded => "no NVIDIA driver is loaded".to_owned(),
        NvmlError::NotFound => "NVIDIA's management library does not know it".to_owned(),
        other => other.to_string(),
    }
}
