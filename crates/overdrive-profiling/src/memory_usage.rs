//! The memory of a run: tensors on its device, and the process.

use serde::{Deserialize, Serialize};
use tch::Device;

use overdrive_sys::{memory, profiler};

/// Current and peak bytes. Values that the system does not report are absent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct MemoryUsage {
    /// The bytes of live tensors on the device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allocated_bytes: Option<u64>,
    /// Their peak since the start or the last
    /// [`overdrive_sys::memory::reset_peak`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_allocated_bytes: Option<u64>,
    /// The bytes that the allocator holds, including blocks kept for reuse.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserved_bytes: Option<u64>,
    /// The resident set of the process: everything that it has in main memory, including libraries and
    /// caches.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resident_bytes: Option<u64>,
    /// The largest resident set since the process began.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_resident_bytes: Option<u64>,
}

impl MemoryUsage {
    /// Returns the current memory usage. Takes some microseconds and does not wait for the device.
    pub fn of(device: Device) -> Self {
        // An error means that the device is not in use yet, or that the system does not report it.
        let tensors = memory::stats(device).ok();
        let process = profiler::process_memory().ok();
        Self {
            allocated_bytes: tensors.map(|stats| stats.allocated_bytes),
            peak_allocated_bytes: tensors.map(|stats| stats.peak_allocated_bytes),
            reserved_bytes: tensors.map(|stats| stats.reserved_bytes),
            resident_bytes: process.map(|process| process.resident_bytes),
            peak_resident_bytes: process.map(|process| process.peak_resident_bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Kind, Tensor};

    #[test]
    fn a_tensor_shows_up_in_the_counts() {
        let large = Tensor::ones([16 << 20], (Kind::Uint8, Device::Cpu));
        let usage = MemoryUsage::of(Device::Cpu);
        let allocated = usage.allocated_bytes.expect("our allocator counts");
        assert!(allocated >= 16 << 20, "{usage:?}");
        assert!(usage.peak_allocated_bytes >= Some(allocated));
        assert!(usage.resident_bytes > Some(16 << 20), "{usage:?}");
        assert!(usage.peak_resident_bytes >= usage.resident_bytes);
        drop(large);
    }

    #[test]
    fn a_device_that_does_not_exist_has_no_fields() {
        let usage = MemoryUsage::of(Device::Cuda(4711));
        assert_eq!(usage.allocated_bytes, None);
        let json = serde_json::to_string(&usage).expect("JSON");
        assert!(!json.contains("allocated_bytes"), "{json}");
    }
}
