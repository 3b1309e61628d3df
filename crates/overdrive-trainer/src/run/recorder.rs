//! The step recorder and the profiler of a run.

use overdrive_precision::Precision;
use overdrive_profiling::{
    ModelFlops, PeakFlops, Profiler, ProfilerConfig, Schedule, StepRecorder, StepRecorderConfig,
};
use overdrive_sys::memory;
use tch::{Device, Kind};

use crate::Result;
use crate::arguments::{STEPS_BEFORE_TRACE, TrainingArguments};

impl TrainingArguments {
    /// Returns a recorder of the steps on `devices` devices like `device`. If the FLOPs of the `model` are known, it
    /// records the MFU, with the peak of the device in `precision`. On a CPU the peak is measured, which takes a fraction
    /// of a second.
    ///
    /// # Errors
    /// An error of the measurement.
    pub fn new_recorder(
        &self,
        model: Option<ModelFlops>,
        precision: Precision,
        device: Device,
        devices: usize,
    ) -> Result<StepRecorder> {
        let kind = match precision {
            Precision::Fp16 => Kind::Half,
            // The MFU of FP8 is that of bf16, as in torchtitan: above 1 if FP8 gains more than bf16 can.
            Precision::Bf16 | Precision::Fp8 => Kind::BFloat16,
            _ => Kind::Float,
        };
        let memory_peak = || {
            memory::stats(device)
                .map(|stats| stats.peak_allocated_bytes)
                .ok()
        };
        let before = memory_peak();
        let peak_flops = model.map(|_| PeakFlops::of(device, kind)).transpose()?;
        // The matrices of the measurement are not memory of the run.
        if memory_peak() > before {
            memory::reset_peak(device)?;
        }
        Ok(StepRecorder::new(StepRecorderConfig {
            device,
            peak_flops,
            model: model.map(|model| ModelFlops {
                sequence_length: self.context_length,
                ..model
            }),
            devices,
            ..StepRecorderConfig::default()
        })?)
    }

    /// Returns the profiler that writes `trace`, if it is set: three steps after the first five. Finish it
    /// after the loop: a run that ends earlier writes the steps it has.
    ///
    /// # Errors
    /// An error of libtorch's profiler.
    pub fn new_profiler(&self) -> Result<Option<Profiler<'static>>> {
        let Some(path) = self.trace.clone() else {
            return Ok(None);
        };
        let schedule = Schedule {
            // One of the skipped steps is the profiler's own warm-up, whose overhead must not be in the trace.
            wait: STEPS_BEFORE_TRACE - 1,
            warmup: 1,
            active: 3,
            repeat: 1,
            ..Schedule::default()
        };
        Ok(Some(Profiler::start(
            ProfilerConfig::default(),
            schedule,
            move |mut trace| trace.save_chrome_trace(&path),
        )?))
    }
}
