//! The choice between our kernels and libtorch's operators for each GPU.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::Path;
use std::sync::OnceLock;

use overdrive_core::Switch;
use parking_lot::Mutex;
use tch::Device;
use tracing::info;

use crate::driver::{Context, Driver};
use crate::embedded::target_for;
use crate::error::Result;
use crate::kernels::Kernels;
use crate::verified::{is_used, report_of};

const VARIABLE: &str = "OVERDRIVE_GPU_KERNELS";
const DRIVER: &str = "libcuda.so.1";

/// Returns the kernels for tensors on a device; `None` if libtorch's operators should be used.
///
/// By default they are used on the architectures for which a report shows that they are correct: compute capability 9.0
/// (H100, H200). `OVERDRIVE_GPU_KERNELS=1` uses them elsewhere as well; `=0` turns them off. The variable is read once;
/// [`override_enabled`] overrides it.
///
/// # Errors
/// [`Error::Common`](crate::Error::Common) if `OVERDRIVE_GPU_KERNELS` has another value,
/// [`Error::Library`](crate::Error::Library) and [`Error::Driver`](crate::Error::Driver) if the CUDA driver cannot be used.
pub fn kernels(device: Device) -> Result<Option<&'static Kernels>> {
    match device {
        Device::Cuda(index) => {
            let asked = asked()?;
            let capability = || Ok(overdrive_sys::cuda::compute_capability(index)?);
            GPUS.get(index, asked, capability, || open(index))
        }
        Device::Cpu => Ok(STAND_IN.get().copied()),
        _ => Ok(None),
    }
}

/// Returns the user's choice, if there is one.
pub(crate) fn asked() -> Result<Option<bool>> {
    Ok(SWITCH.get()?)
}

static SWITCH: Switch = Switch::new(
    VARIABLE,
    "0 (libtorch's operators) or 1 (Overdrive's kernels)",
);

/// Returns the kernels of a device if they were used or requested before, even if they are off now.
pub fn opened(device: Device) -> Option<&'static Kernels> {
    match device {
        Device::Cuda(index) => GPUS.opened(index),
        Device::Cpu => STAND_IN.get().copied(),
        _ => None,
    }
}

static GPUS: Gpus = Gpus::new();

/// The number and the setting of each guard that exists, in the order in which they were made.
static OVERRIDES: Mutex<Vec<(u64, bool)>> = Mutex::new(Vec::new());

/// Turns the kernels on or off for all threads, regardless of `OVERDRIVE_GPU_KERNELS`, until the returned guard is
/// dropped: to compare both in one process. Of several guards, in one thread or in several, the one made last decides,
/// in whatever order they are dropped. The backward pass of a function runs on the same path as its forward pass.
pub fn override_enabled(enabled: bool) -> EnabledGuard {
    let mut overrides = OVERRIDES.lock();
    let number = overrides.last().map_or(0, |&(last, _)| last + 1);
    overrides.push((number, enabled));
    SWITCH.replace(Some(enabled));
    EnabledGuard(number)
}

/// A guard that ends the setting of [`override_enabled`] when it is dropped.
#[derive(Debug)]
#[must_use = "the setting ends when the guard is dropped"]
pub struct EnabledGuard(u64);

impl Drop for EnabledGuard {
    fn drop(&mut self) {
        let mut overrides = OVERRIDES.lock();
        overrides.retain(|&(number, _)| number != self.0);
        SWITCH.replace(overrides.last().map(|&(_, enabled)| enabled));
    }
}

/// The GPUs of the process that kernels were requested for.
pub(crate) struct Gpus(Mutex<BTreeMap<usize, Gpu>>);

#[derive(Clone, Copy)]
struct Gpu {
    /// The target whose images run on the GPU.
    target: Option<&'static str>,
    /// The kernels, after their first use.
    opened: Option<&'static Kernels>,
}

impl Gpus {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    /// Returns the kernels of a GPU if they are used there. `asked` is the user's choice; `open` is called at their
    /// first use, so that the driver is not needed if they are not used.
    pub(crate) fn get(
        &self,
        index: usize,
        asked: Option<bool>,
        capability: impl FnOnce() -> Result<(u32, u32)>,
        open: impl FnOnce() -> Result<&'static Kernels>,
    ) -> Result<Option<&'static Kernels>> {
        if asked == Some(false) {
            return Ok(None);
        }
        let mut gpus = self.0.lock();
        let mut gpu = match gpus.get(&index) {
            Some(known) => *known,
            None => {
                let capability = capability()?;
                let target = target_for(capability);
                report_choice(index, capability, target, asked);
                Gpu {
                    target,
                    opened: None,
                }
            }
        };
        let used = gpu.target.is_some_and(|target| is_used(target, asked));
        if used && gpu.opened.is_none() {
            gpu.opened = Some(open()?);
        }
        gpus.insert(index, gpu);
        Ok(gpu.opened.filter(|_| used))
    }

    fn opened(&self, index: usize) -> Option<&'static Kernels> {
        self.0.lock().get(&index)?.opened
    }
}

/// Logs which kernels a GPU uses, and why.
fn report_choice(
    index: usize,
    (major, minor): (u32, u32),
    target: Option<&'static str>,
    asked: Option<bool>,
) {
    let Some(target) = target else {
        info!(
            "GPU {index} uses libtorch's operators: Overdrive has no kernels for its compute capability, {major}.{minor}"
        );
        return;
    };
    match (report_of(target), asked) {
        (Some(report), _) => info!(
            "GPU {index} uses Overdrive's kernels for {target}, which are verified by {report}; {VARIABLE}=0 turns \
             them off"
        ),
        (None, Some(true)) => info!(
            "GPU {index} uses Overdrive's kernels for {target}, which no report verifies, because they were \
             requested"
        ),
        (None, _) => info!(
            "GPU {index} uses libtorch's operators: no report verifies Overdrive's kernels for {target}; {VARIABLE}=1 \
             turns them on"
        ),
    }
}

/// Opens the driver for a GPU.
fn open(index: usize) -> Result<&'static Kernels> {
    let ordinal = i32::try_from(index).unwrap_or(i32::MAX);
    let context = Context::new(Driver::open(OsStr::new(DRIVER), None)?, ordinal)?;
    // One for each GPU, for the life of the process.
    Ok(Box::leak(Box::new(Kernels::new(
        context,
        Device::Cuda(index),
    )?)))
}

static STAND_IN: OnceLock<&'static Kernels> = OnceLock::new();

/// For tests: makes [`kernels`] serve tensors on the CPU with a library that replaces the CUDA driver and libtorch's
/// current stream. The library decides what to do with launches.
///
/// # Safety
/// The library has the functions of the driver with the same types.
///
/// # Errors
/// As [`kernels`].
#[doc(hidden)]
#[allow(unsafe_code, reason = "code of the caller's choice is run")]
pub unsafe fn serve_cpu_with(library: &Path) -> Result<&'static Kernels> {
    let driver = Driver::open(library.as_os_str(), Some(library.as_os_str()))?;
    let made = Kernels::new(Context::new(driver, 0)?, Device::Cpu)?;
    Ok(STAND_IN.get_or_init(|| Box::leak(Box::new(made))))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::*;

    #[test]
    fn an_override_ends_with_its_guard_in_whatever_order_guards_are_dropped() {
        let outer = override_enabled(true);
        let inner = override_enabled(false);
        assert_eq!(SWITCH.get().unwrap(), Some(false));
        drop(inner);
        assert_eq!(SWITCH.get().unwrap(), Some(true));
        drop(outer);
        assert_eq!(SWITCH.replace(None), None);

        let (first, second) = (override_enabled(true), override_enabled(true));
        drop(first);
        let third = override_enabled(false);
        assert_eq!(SWITCH.get().unwrap(), Some(false));
        drop(third);
        assert_eq!(SWITCH.get().unwrap(), Some(true));
        drop(second);
        assert_eq!(SWITCH.replace(None), None);
    }
}
