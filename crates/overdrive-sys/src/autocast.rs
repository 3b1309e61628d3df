//! The raw autocast state of the current thread.
//!
//! A [`Region`] restores the state; the other functions change it until it is changed again. The guards of
//! overdrive-precision are meant for general use.

use std::cell::Cell;

use tch::{Device, Kind};

use crate::device::{device_type, kind, scalar_type};
use crate::error::{Error, Result, check};
use crate::ffi;
use crate::mode_stack::{Entered, ThreadMode, keep};

/// The autocast state of a device type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct State {
    /// If `true`, operators cast their inputs.
    pub enabled: bool,
    /// The dtype that they cast to.
    pub dtype: Kind,
    /// If `true` in an enabled region, overdrive-fused multiplies linear layers in FP8. libtorch has no such state.
    pub fp8: bool,
}

thread_local! {
    /// [`State::fp8`] of CPUs and of all other devices.
    static FP8: Cell<[bool; 2]> = const { Cell::new([false; 2]) };
}

/// Returns the state for the type of `device`.
///
/// # Errors
/// [`Error::Torch`] for a device type without autocast.
pub fn state(device: Device) -> Result<State> {
    let (mut enabled, mut dtype) = (0, 0);
    // SAFETY: both are written only on success.
    let status =
        unsafe { ffi::od_autocast_get(device_type(device), &raw mut enabled, &raw mut dtype) };
    check(status, "reading the autocast state")?;
    let dtype = kind(dtype).ok_or_else(|| Error::Torch {
        operation: "reading the autocast state".to_owned(),
        message: format!("libtorch casts to its scalar type {dtype}, for which tch has no `Kind`"),
    })?;
    let [cpu, others] = FP8.get();
    Ok(State {
        enabled: enabled != 0,
        dtype,
        fp8: if device == Device::Cpu { cpu } else { others },
    })
}

/// Sets the state for the type of `device`.
///
/// # Errors
/// [`Error::Common`] for a dtype that is not a floating-point one, [`Error::Torch`] for a device type
/// without autocast.
pub fn set_state(device: Device, state: State) -> Result<()> {
    let dtype = scalar_type(state.dtype).ok_or_else(|| {
        let given = format!("{:?}", state.dtype);
        overdrive_core::Error::option("dtype", given, "Half, BFloat16, Float or Double")
    })?;
    // SAFETY: plain values.
    let status =
        unsafe { ffi::od_autocast_set(device_type(device), i32::from(state.enabled), dtype) };
    check(status, "setting the autocast state")?;
    let [cpu, others] = FP8.get();
    FP8.set(match device {
        Device::Cpu => [state.fp8, others],
        _ => [cpu, state.fp8],
    });
    Ok(())
}

/// A part of an autocast region without FP8, which ends when it is dropped: for a head or a router, whose results need
/// more digits. Drop such parts in the reverse order of their creation.
#[derive(Debug)]
#[must_use = "the part ends when it is dropped"]
pub struct WithoutFp8 {
    before: [bool; 2],
}

impl WithoutFp8 {
    /// Begins the part on this thread.
    pub fn enter() -> Self {
        let before = FP8.replace([false; 2]);
        Self { before }
    }
}

impl Drop for WithoutFp8 {
    fn drop(&mut self) {
        FP8.set(self.before);
    }
}

/// Returns `true` if casts of weights are cached until the outermost autocast region ends.
///
/// # Errors
/// [`Error::Torch`] if libtorch throws.
pub fn cache_enabled() -> Result<bool> {
    let mut enabled = 0;
    // SAFETY: written only on success.
    let status = unsafe { ffi::od_autocast_cache_get(&raw mut enabled) };
    check(status, "reading the autocast cache")?;
    Ok(enabled != 0)
}

/// Enables or disables the cache of cast weights.
///
/// # Errors
/// [`Error::Torch`] if libtorch throws.
pub fn set_cache_enabled(enabled: bool) -> Result<()> {
    // SAFETY: a plain value.
    let status = unsafe { ffi::od_autocast_cache_set(i32::from(enabled)) };
    check(status, "setting the autocast cache")
}

/// Drops the cached casts.
///
/// # Errors
/// [`Error::Torch`] if libtorch throws.
pub fn clear_cache() -> Result<()> {
    // SAFETY: no arguments.
    let status = unsafe { ffi::od_autocast_cache_clear() };
    check(status, "clearing the autocast cache")
}

/// Enters one more autocast region and returns the new depth.
///
/// # Errors
/// [`Error::Torch`] if libtorch throws.
pub fn increment_nesting() -> Result<i32> {
    nesting(1)
}

/// Leaves an autocast region and returns the new depth. At 0 the caller must clear the cache, as PyTorch
/// does.
///
/// # Errors
/// [`Error::Torch`] if libtorch throws.
pub fn decrement_nesting() -> Result<i32> {
    nesting(-1)
}

fn nesting(delta: i32) -> Result<i32> {
    let mut depth = 0;
    // SAFETY: written only on success.
    let status = unsafe { ffi::od_autocast_nesting(delta, &raw mut depth) };
    check(status, "counting autocast regions")?;
    Ok(depth)
}

/// An autocast region of this thread, which ends when it is dropped, also by a panic. Regions may be dropped in any
/// order: the one that was entered last, among those still open, applies.
#[derive(Debug)]
#[must_use = "the region ends when it is dropped"]
pub struct Region {
    _entered: Entered,
}

impl Region {
    /// Enters a region with the state `state` for the type of `device`. With `cache_enabled`, casts of weights are
    /// cached until the outermost region ends.
    ///
    /// # Errors
    /// As [`state()`] and [`set_state`]; nothing is changed then.
    pub fn enter(device: Device, state: State, cache_enabled: bool) -> Result<Self> {
        let mut mode = Casting {
            device,
            state,
            cache: cache_enabled,
            before: (state, cache_enabled),
        };
        mode.try_enter()?;
        Ok(Self {
            _entered: keep(mode),
        })
    }
}

/// Turns autocast off for the type of `device` until the returned region is dropped, for operators whose operands it must
/// not round; `None` if it is off.
///
/// # Errors
/// As [`state()`] and [`set_state`].
pub fn off(device: Device) -> Result<Option<Region>> {
    // Autocast cannot be on for a device type without it.
    let Some(state) = state(device).ok().filter(|on| on.enabled) else {
        return Ok(None);
    };
    let state = State {
        enabled: false,
        ..state
    };
    Region::enter(device, state, cache_enabled()?).map(Some)
}

struct Casting {
    device: Device,
    state: State,
    cache: bool,
    before: (State, bool),
}

impl Casting {
    fn try_enter(&mut self) -> Result<()> {
        self.before = (state(self.device)?, cache_enabled()?);
        set_state(self.device, self.state)?;
        set_cache_enabled(self.cache)?;
        increment_nesting().map(drop)
    }
}

impl ThreadMode for Casting {
    fn enter(&mut self) {
        // These states were set before, so setting them again does not fail; a destructor could not report it.
        let entered = self.try_enter();
        debug_assert!(entered.is_ok());
    }

    fn leave(&mut self) {
        // As in `enter`: the states were read from libtorch itself.
        // The cached copies would be stale once an optimizer changes the weights.
        if decrement_nesting().is_ok_and(|depth| depth == 0) {
            let _ = clear_cache();
        }
        let _ = set_state(self.device, self.before.0);
        let _ = set_cache_enabled(self.before.1);
    }
}
