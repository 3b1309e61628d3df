//! The state of each device's default random generator.
//!
//! A state is a tensor of bytes on the CPU, in PyTorch's own layout: a state that Python saved can be
//! set here and the other way round.

use tch::{Device, Tensor};

use crate::Result;

/// The state of a device's generator (`torch.get_rng_state`, `torch.cuda.get_rng_state`).
///
/// # Errors
/// [`crate::Error::Sys`] if there is no such device.
pub fn state(device: Device) -> Result<Tensor> {
    Ok(overdrive_sys::random::state(device)?)
}

/// Sets the state of a device's generator.
///
/// # Errors
/// [`crate::Error::Sys`] if there is no such device, or the tensor is no state of its generator.
pub fn set_state(device: Device, state: &Tensor) -> Result<()> {
    Ok(overdrive_sys::random::set_state(device, state)?)
}

/// Seeds the generator of one device; `tch::manual_seed` seeds those of all.
///
/// # Errors
/// [`crate::Error::Sys`] if there is no such device.
pub fn manual_seed(device: Device, seed: u64) -> Result<()> {
    Ok(overdrive_sys::random::seed(device, seed)?)
}

/// The generators of the CPU and of every CUDA device that this process can see.
pub fn devices() -> Vec<Device> {
    let cuda = usize::try_from(tch::Cuda::device_count()).unwrap_or(0);
    std::iter::once(Device::Cpu)
        .chain((0..cuda).map(Device::Cuda))
        .collect()
}

/// The states of several devices, to be set again later.
#[derive(Debug)]
pub struct Snapshot {
    states: Vec<(Device, Tensor)>,
}

impl Snapshot {
    /// The states of the generators of `devices`.
    ///
    /// # Errors
    /// As for [`state`].
    pub fn of(devices: &[Device]) -> Result<Self> {
        let states = devices
            .iter()
            .map(|device| Ok((*device, state(*device)?)))
            .collect::<Result<_>>()?;
        Ok(Self { states })
    }

    /// The states, device by device.
    pub fn states(&self) -> &[(Device, Tensor)] {
        &self.states
    }

    /// Sets each state again.
    ///
    /// # Errors
    /// As for [`set_state`].
    pub fn restore(&self) -> Result<()> {
        for (device, state) in &self.states {
            set_state(*device, state)?;
        }
        Ok(())
    }
}

/// Restores the generators of its devices when dropped, also by a panic (`torch.random.fork_rng`):
/// what is drawn meanwhile leaves no trace.
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
    /// Remembers the states of the generators of `devices`.
    ///
    /// # Errors
    /// As for [`state`].
    pub fn of(devices: &[Device]) -> Result<Self> {
        Ok(Self {
            before: Snapshot::of(devices)?,
        })
    }

    /// Restores now, and says if that fails.
    ///
    /// # Errors
    /// As for [`set_state`].
    pub fn join(self) -> Result<()> {
        self.before.restore()
        // Dropping restores once more, to the same states.
    }
}

impl Drop for Fork {
    fn drop(&mut self) {
        // The states came from these generators: refusing them would be a defect of libtorch, and a
        // destructor has nobody to tell. `join` tells.
        let _ = self.before.restore();
    }
}
