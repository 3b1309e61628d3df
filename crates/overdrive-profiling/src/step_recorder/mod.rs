//! All measurements of a step in one record.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::time::Duration;

use tch::Device;

use crate::{
    Bottleneck, BottleneckThresholds, DataLoading, GpuMonitor, GpuSample, LoaderTotals,
    MemoryUsage, ModelFlops, NoGpuMonitor, PeakFlops, PeakSource, Phase, PhaseGuard, PhaseSeconds,
    Result, StepProfile, StepRecord, StepTimer,
};

/// The clock of the steps; see [`StepTimer`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Timing {
    /// Events in the device's stream, without waiting; for a CPU, and for devices without events, the clock of the
    /// host. The default.
    #[default]
    Events,
    /// The clock of the host, waiting for the device at every phase boundary.
    Synchronized,
}

/// Options of a [`StepRecorder`].
#[derive(Debug, Clone)]
pub struct StepRecorderConfig {
    /// The device that trains. Default: the CPU.
    pub device: Device,
    /// The clock of the phases. Default [`Timing::Events`].
    pub timing: Timing,
    /// The number of steps over which rates and the bottleneck are computed. Default 20.
    pub window: usize,
    /// The model's arithmetic, for MFU. Default `None`: no MFU.
    pub model: Option<ModelFlops>,
    /// The device's peak, for MFU ([`PeakFlops::of`]). Default `None`: no MFU.
    pub peak_flops: Option<PeakFlops>,
    /// The number of devices that share the work of a step, each with this peak; MFU is over all of them. Default 1.
    pub devices: usize,
    /// The minimum time between two queries of the GPU's driver. Default 1 s.
    pub gpu_interval: Duration,
    /// The thresholds of a bottleneck.
    pub thresholds: BottleneckThresholds,
}

impl Default for StepRecorderConfig {
    fn default() -> Self {
        Self {
            device: Device::Cpu,
            timing: Timing::default(),
            window: 20,
            model: None,
            peak_flops: None,
            devices: 1,
            // NVML itself updates its values at most a few times a second.
            gpu_interval: Duration::from_secs(1),
            thresholds: BottleneckThresholds::default(),
        }
    }
}

/// The work of a step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepWork {
    /// The number of tokens trained on.
    pub tokens: u64,
    /// The number of samples trained on: sequences, images.
    pub samples: u64,
}

/// A recorder of steps: the time of each phase, rates, MFU, memory, the GPU, and the bottleneck.
///
/// All times and rates are of steps that the device has finished. A CPU has finished a step when it ends; a GPU some
/// time after the host has launched it. [`take_finished`](Self::take_finished) returns the records of the steps that
/// are finished by now, [`finish`](Self::finish) waits for the others. Nothing else waits for the device, except
/// [`new`](Self::new) once, and every phase boundary with [`Timing::Synchronized`]. A step costs some tens of
/// microseconds.
///
/// ```
/// use overdrive_profiling::{
///     ModelFlops, PeakFlops, Phase, StepRecorder, StepRecorderConfig, StepWork,
/// };
///
/// let mut recorder = StepRecorder::new(StepRecorderConfig {
///     model: Some(ModelFlops {
///         parameters: 5_800_000, trainable_parameters: 5_800_000, layers: 6, heads: 4, head_dim: 64, sequence_length: 256,
///     }),
///     peak_flops: Some(PeakFlops::given(100e9)), // or PeakFlops::of(device, kind)
///     ..Default::default()
/// })?;
/// for step in 1..=3 {
///     recorder.begin_step();
///     let batch = recorder.phase(Phase::Data, || [1.0_f64; 64]);
///     recorder.phase(Phase::Forward, || batch.iter().sum::<f64>());
///     recorder.end_step(StepWork { tokens: 2048, samples: 8 });
///     for record in recorder.take_finished()? {
///         assert!(record.step == step && record.steps_per_second > 0.0 && record.mfu.is_some());
///         println!("{record}");
///     }
/// }
/// for record in recorder.finish()? {
///     println!("{record}"); // the steps that a GPU had not finished before
/// }
/// println!("{}", recorder.bottleneck().expect("three steps were measured"));
/// # Ok::<(), overdrive_profiling::Error>(())
/// ```
#[derive(Debug)]
pub struct StepRecorder {
    config: StepRecorderConfig,
    timer: StepTimer,
    /// The steps that the device has not finished, oldest first: without times and rates.
    unfinished: VecDeque<StepRecord>,
    /// The last finished steps.
    window: VecDeque<(StepWork, PhaseSeconds)>,
    /// The sum of the phases of the finished steps, and their number.
    totals: (PhaseSeconds, u64),
    tokens_seen: u64,
    gpu: Option<std::result::Result<GpuMonitor, NoGpuMonitor>>,
    last_gpu: Option<GpuSample>,
    /// The sum and the number of the utilizations of the GPU at the ends of the steps.
    utilization: (f64, u64),
    /// The totals of the loader at the end of the last step, and now.
    loader: [Option<LoaderTotals>; 2],
}

impl StepRecorder {
    /// Creates a recorder. A GPU without NVIDIA's management library is not an error:
    /// [`gpu_unavailable`](Self::gpu_unavailable) returns the reason.
    ///
    /// # Errors
    /// [`crate::Error::NoSuchDevice`]; errors of libtorch.
    pub fn new(config: StepRecorderConfig) -> Result<Self> {
        let timer = match config.timing {
            Timing::Events => StepTimer::with_events(config.device)?,
            Timing::Synchronized => StepTimer::synchronized(config.device)?,
        };
        let gpu = match config.device {
            Device::Cuda(index) => Some(GpuMonitor::open(index)),
            _ => None,
        };
        Ok(Self {
            timer,
            unfinished: VecDeque::new(),
            window: VecDeque::new(),
            totals: (PhaseSeconds::default(), 0),
            tokens_seen: 0,
            gpu,
            last_gpu: None,
            utilization: (0.0, 0),
            loader: [None; 2],
            config,
        })
    }

    /// Returns the timer, for code that times itself.
    pub fn timer(&self) -> &StepTimer {
        &self.timer
    }

    /// Begins a step now; see [`StepTimer::begin_step`].
    pub fn begin_step(&self) {
        self.timer.begin_step();
    }

    /// Runs `work` as part of `phase`; see [`StepTimer::phase`].
    pub fn phase<T>(&self, phase: Phase, work: impl FnOnce() -> T) -> T {
        self.timer.phase(phase, work)
    }

    /// Opens `phase` until the guard is dropped; see [`StepTimer::enter`].
    pub fn enter(&self, phase: Phase) -> PhaseGuard<'_> {
        self.timer.enter(phase)
    }

    /// Sets the totals of the data loader, for the record of the current step. The work of a loader before the first
    /// step counts for the first step.
    pub fn loader(&mut self, totals: LoaderTotals) {
        self.loader[1] = Some(totals);
    }

    /// Returns the share of data loading in all finished steps; `None` before the first.
    pub fn data_loading(&self) -> Option<DataLoading> {
        let (totals, steps) = self.totals;
        if steps == 0 {
            return None;
        }
        Some(DataLoading {
            share: totals.data / totals.total().max(f64::MIN_POSITIVE),
            seconds_a_step: totals.data / steps as f64,
            loader: self.loader[1],
        })
    }

    /// Ends the step. Its record follows when the device has finished it.
    pub fn end_step(&mut self, work: StepWork) {
        let phases = self.timer.end_step();
        if let Some(Ok(monitor)) = &mut self.gpu {
            self.last_gpu = Some(monitor.sample_at_most(self.config.gpu_interval));
        }
        if let Some(busy) = self.last_gpu.and_then(|gpu| gpu.utilization) {
            let (sum, steps) = self.utilization;
            self.utilization = (sum + busy, steps + 1);
        }
        let [before, now] = self.loader;
        let loader = now.map(|now| now.since(&before.unwrap_or_default()));
        self.loader[0] = now;
        self.unfinished.push_back(StepRecord {
            step: self.timer.steps(),
            work,
            seconds: phases.total(),
            elapsed_seconds: self.timer.seconds(),
            phases,
            device_phases: None,
            tokens_per_second: 0.0,
            samples_per_second: 0.0,
            steps_per_second: 0.0,
            mfu: None,
            memory: MemoryUsage::of(self.config.device),
            gpu: self.last_gpu,
            loader,
        });
    }

    /// Returns the records of the steps that the device has finished since the last call, oldest first: on a CPU of
    /// all, on a GPU often of all but the last ones. Does not wait.
    ///
    /// # Errors
    /// Errors of the work on the device.
    pub fn take_finished(&mut self) -> Result<Vec<StepRecord>> {
        self.finished(false)
    }

    /// Waits until the device has finished all steps, and returns the records that no call has returned yet, oldest
    /// first. Call it at the end of a run, or where the host has just read a result of the last step, because then
    /// there is nothing to wait for.
    ///
    /// # Errors
    /// Errors of the work on the device.
    pub fn finish(&mut self) -> Result<Vec<StepRecord>> {
        self.finished(true)
    }

    fn finished(&mut self, wait: bool) -> Result<Vec<StepRecord>> {
        let mut records = Vec::new();
        if !self.timer.has_device_phases() {
            // The host is done with a step when the step is done.
            records.extend(std::mem::take(&mut self.unfinished));
        }
        if self.timer.has_lost_device() {
            // The failed device clock will never report these steps as finished.
            self.unfinished.clear();
        }
        for on_device in self.timer.device_phases(wait)? {
            // A step that was ended on the timer alone has no record.
            if let Some(mut record) = self
                .unfinished
                .pop_front_if(|record| record.step == on_device.step)
            {
                record.seconds = on_device.seconds.total();
                record.elapsed_seconds = on_device.end;
                record.device_phases = Some(on_device.seconds);
                records.push(record);
            }
        }
        for record in &mut records {
            self.set_rates(record);
        }
        Ok(records)
    }

    /// Sets the rates of a step that the device has finished, over the window that ends with it.
    fn set_rates(&mut self, record: &mut StepRecord) {
        let phases = record.device_phases.unwrap_or(record.phases);
        self.totals.0 += phases;
        self.totals.1 += 1;
        self.tokens_seen += record.work.tokens;
        if self.window.len() >= self.config.window.max(1) {
            self.window.pop_front();
        }
        self.window.push_back((record.work, phases));
        record.tokens_per_second = self.rate(|work| work.tokens);
        record.samples_per_second = self.rate(|work| work.samples);
        record.steps_per_second = self.rate(|_| 1);
        self.raise_measured_peak(record.tokens_per_second);
        record.mfu = self.mfu(record.tokens_per_second);
    }

    /// Returns the bottleneck of the last finished steps; `None` before the first.
    pub fn bottleneck(&self) -> Option<Bottleneck> {
        let mut phases = PhaseSeconds::default();
        self.window.iter().for_each(|&(_, step)| phases += step);
        let profile = StepProfile {
            phases,
            mfu: self.mfu(self.rate(|work| work.tokens)),
            gpu_utilization: self.last_gpu.and_then(|gpu| gpu.utilization),
        };
        Bottleneck::find(&profile, &self.config.thresholds)
    }

    /// Returns the mean utilization of the GPU over all steps so far, 0 to 1; `None` without a monitored GPU.
    pub fn gpu_utilization(&self) -> Option<f64> {
        let (sum, steps) = self.utilization;
        (steps > 0).then(|| sum / steps as f64)
    }

    /// Returns the reason why the GPU is not monitored; `None` on a CPU, and if it is.
    pub fn gpu_unavailable(&self) -> Option<&NoGpuMonitor> {
        self.gpu.as_ref()?.as_ref().err()
    }

    /// Returns the number of tokens of the finished steps.
    pub fn tokens_seen(&self) -> u64 {
        self.tokens_seen
    }

    /// Returns the work of the window divided by its time, not a mean of rates, so that a slow step weighs as much as
    /// it costs; 0 before the first step.
    fn rate(&self, of: impl Fn(StepWork) -> u64) -> f64 {
        let done: u64 = self.window.iter().map(|&(work, _)| of(work)).sum();
        let seconds: f64 = self.window.iter().map(|(_, step)| step.total()).sum();
        if seconds > 0.0 {
            done as f64 / seconds
        } else {
            0.0
        }
    }

    /// Raises a measured peak to the rate that the model reaches. On a busy machine the measurement is too low, and
    /// the MFU would exceed 1.
    fn raise_measured_peak(&mut self, tokens_per_second: f64) {
        let Some(model) = self.config.model else {
            return;
        };
        let reached = model.per_token() * tokens_per_second / self.config.devices.max(1) as f64;
        if let Some(peak) = &mut self.config.peak_flops
            && matches!(peak.source, PeakSource::Measured { .. })
            && reached > peak.flops_per_second
        {
            peak.flops_per_second = reached;
        }
    }

    fn mfu(&self, tokens_per_second: f64) -> Option<f64> {
        let peak = self.config.peak_flops.as_ref()?.flops_per_second;
        let peak = peak * self.config.devices.max(1) as f64;
        let model = self.config.model.as_ref()?;
        Some(model.utilization(tokens_per_second, peak))
    }
}
