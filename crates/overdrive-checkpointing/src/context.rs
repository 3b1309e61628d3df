//! The context of a closure that changes its results: the autocast state and the random generators. It is
//! captured in the first pass and restored for the recomputation.

use overdrive_sys::{Result, autocast, random};
use tch::{Device, Tensor};

/// The device types with an autocast state; the index of the GPU does not matter.
const AUTOCAST_DEVICES: [Device; 2] = [Device::Cpu, Device::Cuda(0)];

pub(crate) struct Context {
    autocast: [autocast::State; 2],
    cache: bool,
    random: Vec<(Device, Tensor)>,
}

impl Context {
    /// Captures the current context; the generators of the CPU and of the inputs' GPUs only if `with_random`.
    pub(crate) fn capture(inputs: &[Tensor], with_random: bool) -> Result<Self> {
        let mut devices: Vec<Device> = Vec::new();
        if with_random {
            // The CPU's generator too: a closure with GPU inputs may draw on the CPU.
            devices.push(Device::Cpu);
            for device in inputs.iter().map(Tensor::device) {
                if matches!(device, Device::Cuda(_)) && !devices.contains(&device) {
                    devices.push(device);
                }
            }
        }
        Ok(Self {
            autocast: states()?,
            cache: autocast::cache_enabled()?,
            random: generators(&devices)?,
        })
    }

    /// Restores the context until the guard is dropped.
    pub(crate) fn enter(&self) -> Result<ContextGuard> {
        let devices: Vec<Device> = self.random.iter().map(|(device, _)| *device).collect();
        let [cpu, cuda] = AUTOCAST_DEVICES;
        // The regions keep the casts of regions inside the closure until the end of the recomputation.
        let guard = ContextGuard {
            _autocast: [
                autocast::Region::enter(cpu, self.autocast[0], self.cache)?,
                autocast::Region::enter(cuda, self.autocast[1], self.cache)?,
            ],
            random: generators(&devices)?,
        };
        set_generators(&self.random)?;
        Ok(guard)
    }
}

fn states() -> Result<[autocast::State; 2]> {
    let [cpu, cuda] = AUTOCAST_DEVICES;
    Ok([autocast::state(cpu)?, autocast::state(cuda)?])
}

fn generators(devices: &[Device]) -> Result<Vec<(Device, Tensor)>> {
    devices
        .iter()
        .map(|device| Ok((*device, random::state(*device)?)))
        .collect()
}

fn set_generators(states: &[(Device, Tensor)]) -> Result<()> {
    states
        .iter()
        .try_for_each(|(device, state)| random::set_state(*device, state))
}

/// A guard that restores the previous context when it is dropped, also by a panic.
#[must_use = "the state is restored when the guard is dropped"]
pub(crate) struct ContextGuard {
    _autocast: [autocast::Region; 2],
    random: Vec<(Device, Tensor)>,
}

impl Drop for ContextGuard {
    fn drop(&mut self) {
        if let Err(error) = set_generators(&self.random) {
            // The states were read before, so setting them fails only if libtorch is broken. A destructor
            // can only log an error.
            tracing::error!(%error, "restoring the random generators after a recomputation");
        }
    }
}
