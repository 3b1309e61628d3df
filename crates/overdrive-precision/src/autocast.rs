//! Regions in which operators choose their precision.

use std::marker::PhantomData;

use overdrive_sys::autocast as raw;
use tch::{Device, Kind};

use crate::{Error, Result};

/// Runs `body` with autocast to `dtype` on the type of `device`, and returns its value.
///
/// Inside, operators that gain from it (matrix products, convolutions, attention) run in `dtype`,
/// those that need range (softmax, losses, norms) in fp32, and the rest in the dtype of their
/// inputs, as in `torch.autocast`. Backward belongs outside: it runs in the dtypes of the forward.
/// Regions nest; the state before is restored at the end, also when `body` panics.
///
/// # Errors
/// [`Error::UnsupportedDtype`] unless `dtype` is `Half` or `BFloat16`; `body` is not run then.
///
/// ```
/// use overdrive_precision::autocast;
/// use tch::{Device, Kind, Tensor};
///
/// let a = Tensor::ones([8, 8], (Kind::Float, Device::Cpu));
/// let product = autocast(Device::Cpu, Kind::BFloat16, || a.matmul(&a))?;
/// assert_eq!(product.kind(), Kind::BFloat16);
/// # Ok::<(), overdrive_precision::Error>(())
/// ```
pub fn autocast<T>(device: Device, dtype: Kind, body: impl FnOnce() -> T) -> Result<T> {
    Autocast::new(device).dtype(dtype).run(body)
}

/// Whether autocast is on for the type of `device`, on this thread.
///
/// # Errors
/// When the device type has no autocast.
pub fn is_autocast_enabled(device: Device) -> Result<bool> {
    Ok(raw::state(device)?.enabled)
}

/// An autocast region that is yet to be entered (`torch.autocast`'s arguments).
///
/// ```
/// use overdrive_precision::{autocast, Autocast};
/// use tch::{Device, Kind, Tensor};
///
/// let a = Tensor::ones([2, 2], (Kind::Float, Device::Cpu));
/// autocast(Device::Cpu, Kind::BFloat16, || -> overdrive_precision::Result<()> {
///     let _full = Autocast::new(Device::Cpu).enabled(false).enter()?;
///     assert_eq!(a.matmul(&a).kind(), Kind::Float); // full precision, until `_full` goes
///     Ok(())
/// })??;
/// # Ok::<(), overdrive_precision::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
#[must_use = "nothing is cast until it is entered with `enter` or `run`"]
pub struct Autocast {
    device: Device,
    dtype: Option<Kind>,
    enabled: bool,
    cache_enabled: Option<bool>,
}

impl Autocast {
    /// A region for the type of `device`, enabled, with that type's present dtype (at first fp16 on
    /// CUDA and bf16 on a CPU) and the present setting of the weight cache (at first on).
    pub fn new(device: Device) -> Self {
        Self {
            device,
            dtype: None,
            enabled: true,
            cache_enabled: None,
        }
    }

    /// Casts to `dtype`, `Half` or `BFloat16`.
    pub fn dtype(mut self, dtype: Kind) -> Self {
        self.dtype = Some(dtype);
        self
    }

    /// Whether to cast at all; `false` makes a region of full precision inside another.
    pub fn enabled(mut self, enabled: bool) -> Self {
        self.enabled = enabled;
        self
    }

    /// Whether a weight that was cast stays so until the outermost region ends, so that it is cast
    /// once however often it is used. It costs the memory of the copy.
    pub fn cache_enabled(mut self, cache_enabled: bool) -> Self {
        self.cache_enabled = Some(cache_enabled);
        self
    }

    /// Enters the region; it lasts as long as the guard. Guards end in the reverse order of their
    /// beginning, as Rust drops them.
    ///
    /// # Errors
    /// [`Error::UnsupportedDtype`]; nothing has changed then.
    pub fn enter(self) -> Result<AutocastGuard> {
        let before = raw::state(self.device)?;
        let cache_before = raw::cache_enabled()?;
        let dtype = self.dtype.unwrap_or(before.dtype);
        if self.enabled && !matches!(dtype, Kind::Half | Kind::BFloat16) {
            return Err(Error::UnsupportedDtype {
                device: self.device,
                dtype,
            });
        }
        // From here on the guard undoes what was done, whatever fails in between.
        raw::increment_nesting()?;
        let guard = AutocastGuard {
            device: self.device,
            before,
            cache_before,
            not_send: PhantomData,
        };
        raw::set_state(
            self.device,
            raw::State {
                enabled: self.enabled,
                dtype,
            },
        )?;
        raw::set_cache_enabled(self.cache_enabled.unwrap_or(cache_before))?;
        Ok(guard)
    }

    /// Runs `body` in the region.
    ///
    /// # Errors
    /// As [`enter`](Self::enter); `body` is not run then.
    pub fn run<T>(self, body: impl FnOnce() -> T) -> Result<T> {
        let _region = self.enter()?;
        Ok(body())
    }
}

/// An autocast region that was entered; dropping it restores the state before, also in a panic.
///
/// Autocast belongs to the thread, and so does the guard:
///
/// ```compile_fail
/// let guard = overdrive_precision::Autocast::new(tch::Device::Cpu).enter().unwrap();
/// std::thread::spawn(move || drop(guard));
/// ```
#[derive(Debug)]
#[must_use = "the region ends when the guard is dropped; bind it to a name such as `_region`"]
pub struct AutocastGuard {
    device: Device,
    before: raw::State,
    cache_before: bool,
    not_send: PhantomData<*const ()>,
}

impl Drop for AutocastGuard {
    fn drop(&mut self) {
        // A destructor has nobody to report to, and none of these fails for a state that was read
        // from libtorch itself; each is tried whatever the others did.
        if raw::decrement_nesting().is_ok_and(|depth| depth == 0) {
            let _ = raw::clear_cache();
        }
        let _ = raw::set_state(self.device, self.before);
        let _ = raw::set_cache_enabled(self.cache_before);
    }
}
