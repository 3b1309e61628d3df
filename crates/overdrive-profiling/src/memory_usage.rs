//! How much memory a run takes: of tensors on its device, and of the process.

use serde::{Deserialize, Serialize};
use tch::Device;

use overdrive_sys::{memory, profiler};

/// Bytes now and at most. What a system does not tell is absent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct MemoryUsage {
    /// Tensors on the device that are alive.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allocated_bytes: Option<u64>,
    /// The most of them at once since the start or the last
    /// [`overdrive_sys::memory::reset_peak`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_allocated_bytes: Option<u64>,
    /// What the allocator holds of the device, blocks kept for reuse included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserved_bytes: Option<u64>,
    /// The resident set of the process: everything it has in main memory, libraries and caches
    /// included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resident_bytes: Option<u64>,
    /// The largest resident set since the process began.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_resident_bytes: Option<u64>,
}

impl MemoryUsage {
    /// Looks now. Costs some microseconds and does not wait for the device.
    pub fn of(device: Device) -> Self {
        // Absent means that the device is not in use yet, or the system does not tell.
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
    fn a_device_that_is_not_there_leaves_its_fields_out() {
        let usage = MemoryUsage::of(Device::Cuda(4711));
        assert_eq!(usage.allocated_bytes, None);
        let json = serde_json::to_string(&usage).expect("JSON");
        assert!(!json.contains("allocated_bytes"), "{json}");
    }
}
