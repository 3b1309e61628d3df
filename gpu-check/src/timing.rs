//! The time of work on a device.

use std::time::Instant;

use anyhow::Result;
use tch::Device;

/// Waits until the device has finished everything.
pub(crate) fn synchronize(device: Device) {
    if let Device::Cuda(index) = device {
        tch::Cuda::synchronize(i64::try_from(index).unwrap_or(0));
    }
}

/// Returns the median over `rounds` of the seconds of one call of `work`, of which `calls` are timed together. One
/// round before them is not timed.
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
