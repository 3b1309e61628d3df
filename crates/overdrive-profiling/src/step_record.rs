//! The measurements of a step.

use std::fmt;

use overdrive_core::units;

use crate::{GpuSample, LoaderMetrics, MemoryUsage, PhaseSeconds, StepWork};

/// The measurements of a step. [`Display`](fmt::Display) is a table of some lines for a terminal.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct StepRecord {
    /// The number of the step, counted from 1 by the recorder.
    pub step: u64,
    /// The work of the step.
    pub work: StepWork,
    /// The seconds of the step: of the device where it has a clock of its own, else of the host.
    pub seconds: f64,
    /// The seconds from the creation of the recorder to the moment at which the device had finished the step.
    pub elapsed_seconds: f64,
    /// The time of the host by phase. The host only launches the work of a GPU; see `device_phases`.
    pub phases: PhaseSeconds,
    /// The time of the device by phase; `None` on a CPU, where it is that of the host.
    pub device_phases: Option<PhaseSeconds>,
    /// The tokens per second over the window of steps that ends with this one.
    pub tokens_per_second: f64,
    /// The samples per second over the window.
    pub samples_per_second: f64,
    /// The steps per second over the window.
    pub steps_per_second: f64,
    /// The model FLOPs utilization over the window, 0 to 1; `None` if model or peak are unknown.
    pub mfu: Option<f64>,
    /// The memory when the host ended the step.
    pub memory: MemoryUsage,
    /// The state of the GPU then, at most [`StepRecorderConfig::gpu_interval`](crate::StepRecorderConfig::gpu_interval) old.
    pub gpu: Option<GpuSample>,
    /// The data loading of the step, if the totals were set ([`StepRecorder::loader`](crate::StepRecorder::loader)).
    pub loader: Option<LoaderMetrics>,
}

impl fmt::Display for StepRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "step {}  {:.1} ms  {} tok/s  {:.1} samples/s  {:.2} it/s",
            self.step,
            1e3 * self.seconds,
            units::rounded(self.tokens_per_second),
            self.samples_per_second,
            self.steps_per_second,
        )?;
        if let Some(mfu) = self.mfu {
            write!(f, "  mfu {:.1}%", 100.0 * mfu)?;
        }
        writeln!(f)?;
        let (clock, phases) = match self.device_phases {
            Some(phases) => ("device", phases),
            None => ("host", self.phases),
        };
        let total = phases.total();
        for (phase, seconds) in phases.shown() {
            writeln!(
                f,
                "  {:<14} {:>9.2} ms {:>5.1}%",
                phase.name(),
                1e3 * seconds,
                100.0 * seconds / total
            )?;
        }
        writeln!(
            f,
            "  {:<14} {:>9.2} ms ({clock} time)",
            "total",
            1e3 * total
        )?;
        if let Some(loader) = self.loader {
            writeln!(
                f,
                "  loader         {} batches, waited {:.2} ms for them, {:.1} ready",
                loader.batches,
                1e3 * loader.wait_seconds,
                loader.queue_depth
            )?;
        }
        let bytes = |bytes: Option<u64>| bytes.map_or_else(|| "–".to_owned(), units::bytes);
        write!(
            f,
            "  memory         {} of tensors, {} at most; process {}, {} at most",
            bytes(self.memory.allocated_bytes),
            bytes(self.memory.peak_allocated_bytes),
            bytes(self.memory.resident_bytes),
            bytes(self.memory.peak_resident_bytes),
        )?;
        if let Some(gpu) = self.gpu {
            write!(f, "\n  GPU            {}", gpu_line(&gpu))?;
        }
        Ok(())
    }
}

fn gpu_line(gpu: &GpuSample) -> String {
    // A virtual or passively cooled GPU reports only some of the values.
    let mut parts = Vec::new();
    if let Some(busy) = gpu.utilization {
        parts.push(format!("{:.0}% busy", 100.0 * busy));
    }
    if let (Some(used), Some(total)) = (gpu.memory_used_bytes, gpu.memory_total_bytes) {
        parts.push(format!("{} of {}", units::bytes(used), units::bytes(total)));
    }
    if let Some(celsius) = gpu.temperature_celsius {
        parts.push(format!("{celsius:.0} °C"));
    }
    if let Some(watts) = gpu.power_watts {
        parts.push(match gpu.power_limit_watts {
            Some(limit) => format!("{watts:.0} of {limit:.0} W"),
            None => format!("{watts:.0} W"),
        });
    }
    if parts.is_empty() {
        "no values".to_owned()
    } else {
        parts.join(", ")
    }
}
