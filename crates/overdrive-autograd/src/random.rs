//! The states of the devices' default random generators.
//!
//! A state is a tensor of bytes on the CPU in PyTorch's layout, so states can be exchanged with Python.

use tch::{Device, Tensor};

use crate::Result;

/// Returns the state of a device's generator (`torch.get_rng_state`, `torch.cuda.get_rng_state`).
///
/// # Errors
/// [`crate::Error::Sys`] if there is no such device.
pub fn state(device: Device) -> Result<Tensor> {
    Ok(overdrive_sys::random::state(device)?)
}

/// Sets the state of a device's generator.
///
/// # Errors
/// [`crate::Error::Sys`] if there is no such device, or the tensor is not a state of its generator.
pub fn set_state(device: Device, state: &Tensor) -> Result<()> {
    Ok(overdrive_sys::random::set_state(device, state)?)
}

/// Seeds the generator of one device; `tch::manual_seed` seeds those of all devices.
///
/// # Errors
/// [`crate::Error::Sys`] if there is no such device.
pub fn manual_seed(device: Device, seed: u64) -> Result<()> {
    Ok(overdrive_sys::random::seed(device, seed)?)
}

/// Returns the CPU and every CUDA device that is visible to this process.
pub fn devices() -> Vec<Device> {
    let cuda = usize::try_from(tch::Cuda::device_count()).unwrap_or(0);
    std::iter::once(Device::Cpu)
        .chain((0..cuda).map(Device::Cuda))
        .collect()
}

/// The stored states of the generators of several devices.
#[derive(Debug)]
pub struct Snapshot {
    states: Vec<(Device, Tensor)>,
}

impl Snapshot {
    /// Stores the states of the generators of `devices`.
    ///
    /// # Errors
    /// As [`state`].
    pub fn of(devices: &[Device]) -> Result<Self> {
        let states = devices
            .iter()
            .map(|device| Ok((*device, state(*device)?)))
            .collect::<Result<_>>()?;
        Ok(Self { states })
    }

    /// Returns the devices with their states.
    pub fn states(&self) -> &[(Device, Tensor)] {
        &self.states
    }

    /// Restores each state.
    ///
    /// # Errors
    /// As [`set_state`].
    pub fn restore(&self) -> Result<()> {
        for (device, state) in &self.states {
            set_state(*device, state)?;
        }
        Ok(())
    }
}

/// A guard that restores the generators of its devices when it is dropped, also by a panic
/// (`torch.random.fork_rng`).
///
/// ```
/// use overdrive_autograd::random::Fork;
/// use tch::{Device, Kind, Tensor};
///
/// tch::manual_seed(7);
/// let expected = Tensor::rand([3], (Kind::Float, Device::Cpu));
/// tch::manual_seed(7);
/// {
///     let _fork = Fork::of(&[Device::Cpu])?;
///     let _ = Tensor::rand([100], (Kind::Float, Device::Cpu));
/// }
/// assert_eq!(Tensor::rand([3], (Kind::Float, Device::Cpu)), expected);
/// # Ok::<(), overdrive_autograd::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "the generators are restored when this is dropped"]
pub struct Fork {
    before: Snapshot,
}

impl Fork {
    /// Stores the states of the generators of `devices`.
    ///
    /// # Errors
    /// As [`state`].
    pub fn of(devices: &[Device]) -> Result<Self> {
        Ok(Self {
            before: Snapshot::of(devices)?,
        })
    }

    /// Restores the generators now, and returns an error if that fails.
    ///
    /// # Errors
    /// As [`set_state`].
    pub fn join(self) -> Result<()> {
        self.before.restore()
        // Dropping restores the same states once more, which has no effect.
    }
}

impl Drop for Fork {
    fn drop(&mut self) {
        // The states came from these generators, so only a defect of libtorch could cause an error here. A
        // destructor cannot report it; `join` does.
        let _ = self.before.restore();
    }
}
