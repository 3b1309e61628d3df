//! The states and seeds of the default random generators of the devices.

use std::ptr;

use tch::{Device, Tensor};

use crate::device::{device_index, device_type};
use crate::error::{Result, check};
use crate::ffi;
use crate::function::handle;

/// Returns the state as a tensor of bytes on the CPU (`torch.get_rng_state`, `torch.cuda.get_rng_state`).
///
/// # Errors
/// [`crate::Error::Torch`] if there is no such device.
pub fn state(device: Device) -> Result<Tensor> {
    let mut raw = ptr::null_mut();
    // SAFETY: on success `raw` is a new handle that nobody else owns.
    unsafe {
        let status =
            ffi::od_random_state_get(device_type(device), device_index(device), &raw mut raw);
        check(status, "reading a random state")?;
        Ok(Tensor::from_ptr(raw.cast()))
    }
}

/// Sets the state to one that [`state`] returned.
///
/// # Errors
/// [`crate::Error::Torch`] if there is no such device or the tensor is not a state of its generator.
pub fn set_state(device: Device, state: &Tensor) -> Result<()> {
    // SAFETY: the handle is valid while borrowed.
    let status = unsafe {
        ffi::od_random_state_set(device_type(device), device_index(device), handle(state))
    };
    check(status, "setting a random state")
}

/// Seeds the generator of one device; `tch::manual_seed` seeds those of all devices.
///
/// # Errors
/// [`crate::Error::Torch`] if there is no such device.
pub fn seed(device: Device, seed: u64) -> Result<()> {
    // SAFETY: plain numbers.
    let status = unsafe { ffi::od_random_seed(device_type(device), device_index(device), seed) };
    check(status, "seeding a random generator")
}
