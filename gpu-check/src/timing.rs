//! The time of work on a device.

use std::time::Instant;

use anyhow::Result;
use overdrive::profiling::{GroupBy, ProfilerConfig, SortBy, Trace, profile};
use overdrive_gpu::Kernels;
use tch::Device;

use crate::finding::Finding;

/// Waits until the device has finished everything.
pub(crate) fn synchronize(device: Device) {
    if let Device::Cuda(index) = device {
        tch::Cuda::synchronize(i64::try_from(index).unwrap_or(0));
    }
}

/// Returns the median seconds of one call of `work` over `rounds` rounds of `calls` calls. One warm-up round is not
/// timed.
pub(crate) fn seconds(
    device: Device,
    rounds: usize,
    calls: usize,
    mut work: impl FnMut() -> Result<()>,
) -> Result<f64> {
    let mut times = Vec::with_capacity(rounds);
    for round in 0..=rounds {
        synchronize(device);
        let began = Instant::now();
        for _ in 0..calls.max(1) {
            work()?;
        }
        synchronize(device);
        if round > 0 {
            times.push(began.elapsed().as_secs_f64() / calls.max(1) as f64);
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(times.get(times.len() / 2).copied().unwrap_or(f64::NAN))
}

/// Returns the result of `work` with its trace, of the host and of a GPU, for which it waits.
pub(crate) fn trace<T>(
    device: Device,
    settings: ProfilerConfig,
    work: impl FnOnce() -> Result<T>,
) -> Result<(T, Trace)> {
    let settings = ProfilerConfig {
        cuda: Some(device != Device::Cpu),
        ..settings
    };
    let (result, trace) = profile(settings, || {
        let result = work();
        synchronize(device);
        result
    })?;
    Ok((result?, trace))
}

/// The kernels that a finding names, and the characters of their names.
const MOST_KERNELS: usize = 14;
const MOST_LETTERS: usize = 48;

/// Profiles work of `steps` steps on a GPU: the device's time for a step, and the kernels that take most of it.
pub(crate) fn kernels_by_time(
    device: Device,
    steps: usize,
    work: impl FnOnce() -> Result<()>,
) -> Result<Finding> {
    let ((), trace) = trace(device, ProfilerConfig::default(), work)?;
    let mut averages = trace.key_averages(GroupBy::Name);
    averages.sort_by(SortBy::SelfDeviceTime);
    let each = |nanoseconds: u64| nanoseconds as f64 / 1e6 / steps.max(1) as f64;
    let kernels = averages.rows().iter().filter(|row| row.on_device);
    let mut finding = Finding::passed()
        .with("device ms a step", each(averages.device_ns()))
        .with(
            "launches a step",
            kernels.clone().map(|row| row.calls).sum::<u64>() as f64 / steps.max(1) as f64,
        );
    for row in kernels.take(MOST_KERNELS) {
        let name: String = row.name.chars().take(MOST_LETTERS).collect();
        let calls = row.calls as f64 / steps.max(1) as f64;
        finding = finding.noting(format!(
            "{:.3} ms, {calls:.1} x {name}",
            each(row.self_device_ns)
        ));
    }
    Ok(finding)
}

/// Returns the kernels of overdrive-gpu for a device, whatever `OVERDRIVE_GPU_KERNELS` says; `None` on a CPU.
pub(crate) fn own_kernels(device: Device) -> Result<Option<&'static Kernels>> {
    let _on = overdrive_gpu::override_enabled(true);
    Ok(overdrive_gpu::kernels(device)?)
}

/// Returns the non-default setting of the kernels of overdrive-gpu on a device, with its name in the report; `None` if
/// the device has only one setting, like a CPU.
pub(crate) fn other_kernels(device: Device) -> Result<Option<(bool, &'static str)>> {
    if device == Device::Cpu || own_kernels(device)?.is_none() {
        return Ok(None);
    }
    let is_default = overdrive_gpu::kernels(device)?.is_some();
    Ok(Some(match is_default {
        true => (false, "without own kernels"),
        false => (true, "own kernels"),
    }))
}

/// Sets whether the kernels of overdrive-gpu are used until the result is dropped; `None` keeps the default.
#[must_use]
pub(crate) fn kernels_set(to: Option<bool>) -> Option<overdrive_gpu::EnabledGuard> {
    to.map(overdrive_gpu::override_enabled)
}

/// Runs `work` with the kernels of overdrive-gpu, and returns its result with the number of their launches; `None` on a
/// device without them.
pub(crate) fn with_own_kernels<T>(
    device: Device,
    work: impl FnOnce() -> Result<T>,
) -> Result<Option<(T, u64)>> {
    let Some(kernels) = own_kernels(device)? else {
        return Ok(None);
    };
    let count = || kernels.launches().values().sum::<u64>();
    let before = count();
    let _on = overdrive_gpu::override_enabled(true);
    let result = work()?;
    Ok(Some((result, count() - before)))
}
