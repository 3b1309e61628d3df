//! What surrounds a closure and changes what it computes: autocast and random generators. Taken down in
//! the first pass, put back for the recomputation.

use overdrive_sys::{Result, autocast, random};
use tch::{Device, Tensor};

/// The device types whose autocast state is the thread's.
const AUTOCAST_DEVICES: [Device; 2] = [Device::Cpu, Device::Cuda(0)];

pub(crate) struct Ambient {
    autocast: [autocast::State; 2],
    cache: bool,
    random: Vec<(Device, Tensor)>,
}

impl Ambient {
    /// As it is now; the generators of the CPU and of the inputs' GPUs if `with_random`.
    pub(crate) fn now(inputs: &[Tensor], with_random: bool) -> Result<Self> {
        let mut devices: Vec<Device> = Vec::new();
        if with_random {
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

    /// Puts everything back to how it was, until the guard is dropped.
    pub(crate) fn enter(&self) -> Result<AmbientGuard> {
        let devices: Vec<Device> = self.random.iter().map(|(device, _)| *device).collect();
        let guard = AmbientGuard {
            autocast: states()?,
            cache: autocast::cache_enabled()?,
            random: generators(&devices)?,
        };
        autocast::increment_nesting()?;
        set_states(&self.autocast)?;
        autocast::set_cache_enabled(self.cache)?;
        set_generators(&self.random)?;
        Ok(guard)
    }
}

fn states() -> Result<[autocast::State; 2]> {
    let [cpu, cuda] = AUTOCAST_DEVICES;
    Ok([autocast::state(cpu)?, autocast::state(cuda)?])
}

fn set_states(states: &[autocast::State; 2]) -> Result<()> {
    AUTOCAST_DEVICES
        .iter()
        .zip(states)
        .try_for_each(|(device, state)| autocast::set_state(*device, *state))
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

/// Restores what was there before, also by a panic.
#[must_use = "the state is restored when the guard is dropped"]
pub(crate) struct AmbientGuard {
    autocast: [autocast::State; 2],
    cache: bool,
    random: Vec<(Device, Tensor)>,
}

impl AmbientGuard {
    fn leave(&self) -> Result<()> {
        // The outermost region drops its casts of weights, as autocast's own guards do.
        if autocast::decrement_nesting()? == 0 {
            autocast::clear_cache()?;
        }
        set_states(&self.autocast)?;
        autocast::set_cache_enabled(self.cache)?;
        set_generators(&self.random)
    }
}

impl Drop for AmbientGuard {
    fn drop(&mut self) {
        if let Err(error) = self.leave() {
            // Setting what was read before fails only if libtorch is broken; a destructor has nobody
            // to tell but the log.
            tracing::error!(%error, "restoring autocast and random generators after a recomputation");
        }
    }
}
