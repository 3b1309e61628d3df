//! Autocast: regions in which operators choose their precision.

use overdrive_sys::autocast as raw;
use tch::{Device, Kind};

use crate::{Error, Result};

/// Enters a region of autocast to `dtype` on the device type of `device`, until the guard is dropped: the
/// equivalent of `with torch.autocast(…):`.
///
/// Inside, operators that gain from it (matrix products, convolutions, attention) run in `dtype`,
/// those that need range (softmax, losses, norms) in fp32, and the rest in the dtype of their
/// inputs, as in `torch.autocast`. libtorch has the list of its operators; those of Overdrive ask for the state of the
/// region (`overdrive_sys::autocast::state`). End the region before backward, which runs in the dtypes of the forward:
/// bind the guard in the block or the function that computes the loss.
/// Regions nest; the previous state is restored at the end, also by an early return or a panic.
///
/// # Why a guard
///
/// A closure would need a `Result` of its own around the result of its body, or an error type that both share, which
/// a tch module and a model of another crate do not have. Under a guard `?` has its usual meaning, and the values
/// of the forward pass stay in scope.
///
/// # Errors
/// [`Error::UnsupportedDtype`] unless `dtype` is `Half` or `BFloat16`.
///
/// ```
/// use overdrive_precision::autocast;
/// use tch::{Device, Kind, Tensor};
///
/// let a = Tensor::ones([8, 8], (Kind::Float, Device::Cpu));
/// let product = {
///     let _autocast = autocast(Device::Cpu, Kind::BFloat16)?;
///     a.matmul(&a)
/// };
/// assert_eq!(product.kind(), Kind::BFloat16);
/// assert_eq!(a.matmul(&a).kind(), Kind::Float);
/// # Ok::<(), overdrive_precision::Error>(())
/// ```
pub fn autocast(device: Device, dtype: Kind) -> Result<AutocastGuard> {
    Autocast::new(device).dtype(dtype).enter()
}

/// Returns `true` if autocast is on for the device type of `device`, on this thread.
///
/// # Errors
/// Returns an error if the device type has no autocast.
pub fn is_autocast_enabled(device: Device) -> Result<bool> {
    Ok(raw::state(device)?.enabled)
}

/// The options of an autocast region: the arguments of `torch.autocast`.
///
/// ```
/// use overdrive_precision::{autocast, Autocast};
/// use tch::{Device, Kind, Tensor};
///
/// let a = Tensor::ones([2, 2], (Kind::Float, Device::Cpu));
/// let _autocast = autocast(Device::Cpu, Kind::BFloat16)?;
/// {
///     let _full = Autocast::new(Device::Cpu).enabled(false).enter()?;
///     assert_eq!(a.matmul(&a).kind(), Kind::Float); // full precision until `_full` is dropped
/// }
/// assert_eq!(a.matmul(&a).kind(), Kind::BFloat16);
/// # Ok::<(), overdrive_precision::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
#[must_use = "nothing is cast until the region is entered with `enter`"]
pub struct Autocast {
    device: Device,
    dtype: Option<Kind>,
    enabled: bool,
    fp8: Option<bool>,
    cache_enabled: Option<bool>,
}

impl Autocast {
    /// Creates a region for the device type of `device`, enabled, with the current dtype of that type (initially fp16
    /// on CUDA and bf16 on a CPU) and the current setting of the weight cache (initially on).
    pub fn new(device: Device) -> Self {
        Self {
            device,
            dtype: None,
            enabled: true,
            fp8: None,
            cache_enabled: None,
        }
    }

    /// Sets the dtype to cast to, `Half` or `BFloat16`.
    pub fn dtype(mut self, dtype: Kind) -> Self {
        self.dtype = Some(dtype);
        self
    }

    /// Switches casting on or off; `false` makes a region of full precision inside another one.
    pub fn enabled(mut self, enabled: bool) -> Self {
        self.enabled = enabled;
        self
    }

    /// Switches FP8 on or off for the linear layers of overdrive-fused and overdrive-nn: products of codes in E4M3 and, for
    /// gradients, in E5M2, each tensor with one scale, as in torchao's float8 training with tensorwise scaling
    /// (`fp8_autocast` of Transformer Engine). Layers with sizes that are not multiples of 16, and all other operators, run in
    /// the region's dtype. By default, a region keeps the setting of the region around it unless it sets a dtype.
    pub fn fp8(mut self, fp8: bool) -> Self {
        self.fp8 = Some(fp8);
        self
    }

    /// Switches the weight cache on or off. It keeps the copy of a cast weight until the outermost region ends, so that
    /// a weight that is used several times is cast once.
    pub fn cache_enabled(mut self, cache_enabled: bool) -> Self {
        self.cache_enabled = Some(cache_enabled);
        self
    }

    /// Enters the region, which ends when the guard is dropped. Guards may be dropped in any order: the region that
    /// was entered last, among those still open, applies.
    ///
    /// # Errors
    /// [`Error::UnsupportedDtype`]; nothing is changed then.
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
        let state = raw::State {
            enabled: self.enabled,
            dtype,
            fp8: self.fp8.unwrap_or(before.fp8 && self.dtype.is_none()),
        };
        let cache = self.cache_enabled.unwrap_or(cache_before);
        Ok(AutocastGuard {
            _region: raw::Region::enter(self.device, state, cache)?,
        })
    }
}

/// An active autocast region. Dropping it restores the previous state, also in a panic.
///
/// Autocast is a state of the thread, so the guard cannot be sent to another one:
///
/// ```compile_fail
/// let guard = overdrive_precision::autocast(tch::Device::Cpu, tch::Kind::BFloat16).unwrap();
/// std::thread::spawn(move || drop(guard));
/// ```
#[derive(Debug)]
#[must_use = "the region ends when the guard is dropped; bind it to a name such as `_autocast`, not to `_`"]
pub struct AutocastGuard {
    _region: raw::Region,
}
