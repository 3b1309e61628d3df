//! All measurements of a step in one record.

use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

use overdrive_core::units;
use tch::Device;

use crate::{
    Bottleneck, BottleneckThresholds, DataLoading, GpuMonitor, GpuSample, LoaderMetrics,
    LoaderTotals, MemoryUsage, ModelFlops, NoGpuMonitor, PeakFlops, PeakSource, Phase, PhaseGuard,
    PhaseSeconds, Result, StepProfile, StepTimer, Throughput,
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
    throughput: Throughput,
    samples: Throughput,
    /// The steps that the device has not finished, oldest first: without times and rates.
    unfinished: VecDeque<StepRecord>,
    /// The phases of the last finished steps.
    window: VecDeque<PhaseSeconds>,
    /// The sum of the phases of the finished steps, and their number.
    totals: (PhaseSeconds, u64),
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
            throughput: Throughput::new(config.window),
            samples: Throughput::new(config.window),
            unfinished: VecDeque::new(),
            window: VecDeque::new(),
            totals: (PhaseSeconds::default(), 0),
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
        push(&mut self.window, phases, self.config.window);
        let time = Duration::try_from_secs_f64(record.seconds).unwrap_or_default();
        self.throughput.record(record.work.tokens, time);
        self.samples.record(record.work.samples, time);
        record.tokens_per_second = self.throughput.tokens_per_second();
        record.samples_per_second = self.samples.tokens_per_second();
        record.steps_per_second = rate(&self.window);
        self.raise_measured_peak(record.tokens_per_second);
        record.mfu = self.mfu(record.tokens_per_second);
    }

    /// Returns the bottleneck of the last finished steps; `None` before the first.
    pub fn bottleneck(&self) -> Option<Bottleneck> {
        let mut phases = PhaseSeconds::default();
        self.window.iter().for_each(|&step| phases += step);
        let profile = StepProfile {
            phases,
            mfu: self.mfu(self.throughput.tokens_per_second()),
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
        self.throughput.tokens_seen()
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

fn push(window: &mut VecDeque<PhaseSeconds>, phases: PhaseSeconds, length: usize) {
    if window.len() >= length.max(1) {
        window.pop_front();
    }
    window.push_back(phases);
}

fn rate(window: &VecDeque<PhaseSeconds>) -> f64 {
    let seconds: f64 = window.iter().map(PhaseSeconds::total).sum();
    if seconds > 0.0 {
        window.len() as f64 / seconds
    } else {
        0.0
    }
}

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
    /// The state of the GPU then, at most [`StepRecorderConfig::gpu_interval`] old.
    pub gpu: Option<GpuSample>,
    /// The data loading of the step, if the totals were set ([`StepRecorder::loader`]).
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

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::DevicePhases;
    use crate::device_timeline::{DeviceClock, StandInClock, serve_cpu_with};

    fn recorder(config: StepRecorderConfig) -> StepRecorder {
        StepRecorder::new(config).expect("a CPU")
    }

    fn slept(recorder: &mut StepRecorder, data: u64, forward: u64) -> StepRecord {
        recorder.begin_step();
        let sleep = |milliseconds| std::thread::sleep(Duration::from_millis(milliseconds));
        recorder.phase(Phase::Data, || sleep(data));
        recorder.phase(Phase::Forward, || sleep(forward));
        let work = StepWork {
            tokens: 1000,
            samples: 10,
        };
        recorder.end_step(work);
        let mut records = recorder.take_finished().expect("no device");
        assert_eq!(records.len(), 1);
        records.remove(0)
    }

    #[test]
    fn each_step_has_its_difference_of_the_loader_totals() {
        let mut recorder = recorder(StepRecorderConfig::default());
        assert_eq!(recorder.data_loading(), None);
        let mut totals = LoaderTotals::default();
        for step in 1..=2_u64 {
            totals.batches += 3;
            totals.ready += 3 * step;
            totals.wait += Duration::from_millis(step);
            recorder.loader(totals);
            let record = slept(&mut recorder, 5, 15);
            let loader = record.loader.expect("totals were set");
            assert_eq!((loader.batches, loader.queue_depth), (3, step as f64));
            assert!((loader.wait_seconds - 1e-3 * step as f64).abs() < 1e-9);
            assert!(
                record
                    .to_string()
                    .contains("  loader         3 batches, waited ")
            );
        }
        let loading = recorder.data_loading().expect("two steps");
        assert_eq!(loading.loader, Some(totals));
        // Sleeps last at least as long as requested; how much longer depends on the machine.
        assert!(
            loading.seconds_a_step >= 0.005 && loading.share < 0.9,
            "{loading}"
        );
    }

    #[test]
    fn rates_follow_from_one_another_and_mfu_from_the_model() {
        let model = ModelFlops {
            parameters: 1000,
            trainable_parameters: 1000,
            layers: 1,
            heads: 1,
            head_dim: 8,
            sequence_length: 16,
        };
        let mut recorder = recorder(StepRecorderConfig {
            model: Some(model),
            peak_flops: Some(PeakFlops::given(1e9)),
            ..Default::default()
        });
        slept(&mut recorder, 1, 4);
        let record = slept(&mut recorder, 1, 4);
        assert_eq!(record.step, 2);
        assert!(record.steps_per_second > 1.0 && record.steps_per_second < 200.0);
        let near = |a: f64, b: f64| (a / b - 1.0).abs() < 1e-6;
        assert!(near(
            record.tokens_per_second,
            1000.0 * record.steps_per_second
        ));
        assert!(near(
            record.samples_per_second,
            10.0 * record.steps_per_second
        ));
        let mfu = record.mfu.expect("model and peak are known");
        assert!(near(
            mfu,
            model.per_token() * record.tokens_per_second / 1e9
        ));
        assert_eq!(recorder.tokens_seen(), 2000);
    }

    #[test]
    fn mfu_is_over_the_peak_of_all_devices_that_share_the_work() {
        let model = ModelFlops {
            parameters: 1000,
            trainable_parameters: 1000,
            layers: 1,
            heads: 1,
            head_dim: 8,
            sequence_length: 16,
        };
        let mut recorder = recorder(StepRecorderConfig {
            model: Some(model),
            peak_flops: Some(PeakFlops::given(1e9)),
            devices: 4,
            ..Default::default()
        });
        let record = slept(&mut recorder, 0, 2);
        let mfu = record.mfu.expect("model and peak are known");
        let expected = model.per_token() * record.tokens_per_second / 4e9;
        assert!((mfu / expected - 1.0).abs() < 1e-6, "{mfu} {expected}");
    }

    #[test]
    fn a_peak_measured_too_low_is_raised_and_a_given_one_is_not() {
        let model = ModelFlops {
            parameters: 1_000_000,
            trainable_parameters: 1_000_000,
            layers: 1,
            heads: 1,
            head_dim: 8,
            sequence_length: 16,
        };
        for (source, most) in [
            (PeakSource::Measured { width: 8 }, 1.0),
            (PeakSource::Given, f64::INFINITY),
        ] {
            let mut recorder = recorder(StepRecorderConfig {
                model: Some(model),
                peak_flops: Some(PeakFlops {
                    flops_per_second: 1.0,
                    source: source.clone(),
                }),
                ..Default::default()
            });
            let mfu = slept(&mut recorder, 0, 2).mfu.expect("both are known");
            assert!(mfu > 0.99 && mfu <= most, "{source:?}: {mfu}");
            assert_eq!(mfu > 2.0, source == PeakSource::Given);
        }
    }

    /// A device that runs behind the host: it takes a second for each section of forward or backward, however fast the
    /// host has launched it, and half a second between two steps. It never waits for data. It finishes a step when
    /// `FINISHED` says so, or is waited for.
    #[derive(Debug, Default)]
    struct Behind {
        now: f64,
        section: PhaseSeconds,
        ended: VecDeque<DevicePhases>,
    }

    thread_local! {
        static FINISHED: Cell<u64> = const { Cell::new(0) };
    }

    impl DeviceClock for Behind {
        fn begin(&mut self) -> Result<()> {
            self.section = PhaseSeconds::default();
            self.now += 0.5;
            Ok(())
        }

        fn boundary(&mut self, phase: Phase) -> Result<()> {
            if matches!(phase, Phase::Forward | Phase::Backward) {
                self.section.add(phase, 1.0);
                self.now += 1.0;
            }
            Ok(())
        }

        fn end(&mut self, step: u64) -> Result<()> {
            let seconds = std::mem::take(&mut self.section);
            let end = self.now;
            self.ended.push_back(DevicePhases { step, seconds, end });
            Ok(())
        }

        fn take(&mut self, wait: bool) -> Result<Vec<DevicePhases>> {
            let done = |step: u64| wait || step <= FINISHED.get();
            let left = self
                .ended
                .split_off(self.ended.partition_point(|one| done(one.step)));
            Ok(std::mem::replace(&mut self.ended, left).into())
        }
    }

    const LAUNCHED: StepWork = StepWork {
        tokens: 1000,
        samples: 10,
    };

    /// Launches a step of 1 s forward and 2 s backward, which takes the host microseconds.
    fn launched(recorder: &mut StepRecorder) -> Vec<StepRecord> {
        recorder.begin_step();
        recorder.phase(Phase::Forward, || ());
        recorder.phase(Phase::Backward, || ());
        recorder.phase(Phase::Backward, || ());
        recorder.end_step(LAUNCHED);
        recorder.take_finished().expect("no device")
    }

    fn behind(config: StepRecorderConfig) -> (StandInClock, StepRecorder) {
        let guard = serve_cpu_with(|| Box::new(Behind::default()));
        FINISHED.set(0);
        (guard, recorder(config))
    }

    #[test]
    fn rates_are_those_of_a_device_that_finishes_steps_after_the_host() {
        let model = ModelFlops {
            parameters: 1000,
            trainable_parameters: 1000,
            layers: 1,
            heads: 1,
            head_dim: 8,
            sequence_length: 16,
        };
        // The device reaches half of its peak: 1,000 tokens in three seconds.
        let peak = model.per_token() * 1000.0 / 3.0 * 2.0;
        let (_guard, mut recorder) = behind(StepRecorderConfig {
            model: Some(model),
            peak_flops: Some(PeakFlops::given(peak)),
            ..Default::default()
        });
        for _ in 0..14 {
            assert_eq!(
                launched(&mut recorder),
                [],
                "the device has not finished it"
            );
        }
        // By the clock of the host the MFU would be far above 100 %.
        let host = recorder.timer().totals().total();
        assert!(14.0 * 1000.0 / host * model.per_token() / peak > 1.0);
        let records = recorder.finish().expect("no device");
        let steps: Vec<u64> = records.iter().map(|record| record.step).collect();
        assert_eq!(steps, Vec::from_iter(1..=14));
        for record in &records {
            assert_eq!(record.seconds, 3.0);
            assert_eq!(
                record.elapsed_seconds,
                0.5 + 3.5 * (record.step - 1) as f64 + 3.0
            );
            let phases = record.device_phases.expect("it has a clock");
            assert_eq!((phases.forward, phases.backward), (1.0, 2.0));
            assert_eq!(record.tokens_per_second, 1000.0 / 3.0);
            assert_eq!(record.samples_per_second, 10.0 / 3.0);
            assert!((record.steps_per_second - 1.0 / 3.0).abs() < 1e-12);
            let mfu = record.mfu.expect("model and peak are known");
            assert!((mfu - 0.5).abs() < 1e-12, "{mfu}");
            assert!(
                record.to_string().contains("3000.00 ms (device time)"),
                "{record}"
            );
        }
        assert!(
            recorder.finish().expect("no device").is_empty(),
            "each once"
        );
        assert_eq!(recorder.tokens_seen(), 14_000);
    }

    #[test]
    fn a_step_is_returned_by_the_first_call_after_the_device_has_finished_it() {
        let (_guard, mut recorder) = behind(StepRecorderConfig::default());
        let numbers =
            |records: Vec<StepRecord>| Vec::from_iter(records.iter().map(|record| record.step));
        assert_eq!(numbers(launched(&mut recorder)), [0; 0]);
        assert_eq!(recorder.bottleneck(), None, "nothing is known of the step");
        assert_eq!(recorder.data_loading(), None);
        FINISHED.set(1);
        assert_eq!(numbers(launched(&mut recorder)), [1]);
        FINISHED.set(2);
        assert_eq!(numbers(recorder.take_finished().expect("no device")), [2]);
        assert_eq!(numbers(launched(&mut recorder)), [0; 0]);
        assert_eq!(numbers(recorder.finish().expect("no device")), [3]);
    }

    #[test]
    fn loading_that_the_device_does_not_wait_for_is_no_share_of_its_steps() {
        let (_guard, mut recorder) = behind(StepRecorderConfig::default());
        recorder.begin_step();
        recorder.phase(Phase::Data, || std::thread::sleep(Duration::from_millis(5)));
        recorder.phase(Phase::Forward, || ());
        recorder.end_step(LAUNCHED);
        // By the clock of the host it would be nearly all of the step.
        let host = recorder.timer().totals();
        assert!(host.data > 0.0 && host.forward < host.total());
        recorder.finish().expect("no device");
        let loading = recorder.data_loading().expect("a finished step");
        assert_eq!(loading.share, 0.0);
        assert!(matches!(
            recorder.bottleneck(),
            Some(Bottleneck::Compute { .. })
        ));
    }

    #[test]
    fn slow_data_is_found_as_the_bottleneck() {
        let mut recorder = recorder(StepRecorderConfig::default());
        assert_eq!(recorder.bottleneck(), None);
        slept(&mut recorder, 30, 10);
        let bottleneck = recorder.bottleneck().expect("a step was measured");
        assert!(
            matches!(bottleneck, Bottleneck::Data { .. }),
            "{bottleneck}"
        );
        assert!(bottleneck.to_string().contains("raise num_workers"));
    }

    #[test]
    fn the_table_names_phases_rates_and_memory() {
        let record = StepRecord {
            step: 120,
            work: StepWork {
                tokens: 2048,
                samples: 8,
            },
            seconds: 0.4,
            elapsed_seconds: 48.0,
            phases: PhaseSeconds {
                data: 0.1,
                forward: 0.3,
                ..Default::default()
            },
            device_phases: None,
            tokens_per_second: 5120.0,
            samples_per_second: 20.0,
            steps_per_second: 2.5,
            mfu: Some(0.412),
            memory: MemoryUsage::default(),
            gpu: Some(GpuSample {
                utilization: Some(0.97),
                power_watts: Some(412.4),
                power_limit_watts: Some(700.0),
                ..Default::default()
            }),
            loader: None,
        };
        let text = record.to_string();
        let first = "step 120  400.0 ms  5,120 tok/s  20.0 samples/s  2.50 it/s  mfu 41.2%";
        assert_eq!(text.lines().next(), Some(first));
        assert!(
            text.contains("  data              100.00 ms  25.0%\n"),
            "{text}"
        );
        assert!(!text.contains("accumulate"), "{text}");
        assert!(text.contains("(host time)"), "{text}");
        assert!(
            text.ends_with("GPU            97% busy, 412 of 700 W"),
            "{text}"
        );
    }
}
