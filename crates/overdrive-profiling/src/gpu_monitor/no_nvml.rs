//! The stand-in for NVIDIA's management library in a build without the feature `nvml`.

use super::{GpuProcess, GpuSample};

/// No such value exists.
pub(super) enum Driver {}

impl Driver {
    pub(super) fn open(_pci_bus_id: &str) -> Result<Self, String> {
        Err("overdrive-profiling was built without its feature `nvml`".to_owned())
    }

    pub(super) fn sample(&self, _pci_bus_id: &str) -> GpuSample {
        match *self {}
    }

    pub(super) fn processes(&self, _pci_bus_id: &str) -> Vec<GpuProcess> {
        match *self {}
    }
}
