//! libtorch's profiler over a training loop.

use std::fmt;

use overdrive_sys::profiler::{NvtxRanges, ProfilerOptions, ProfilerSession, Range};
use tch::Cuda;

use crate::trace::Trace;
use crate::{Result, Schedule, ScheduledAction};

/// Options of a profiler: the arguments of `torch.profiler.profile`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProfilerConfig {
    /// If `true`, records operators and ranges on the CPU. Default `true`.
    pub cpu: bool,
    /// If `true`, records kernels and copies of GPUs. Default `None`: if there is a GPU.
    pub cuda: Option<bool>,
    /// If `true`, records the shapes of operators' inputs, which takes time and memory. Default `false`.
    pub record_shapes: bool,
    /// If `true`, records allocations and releases. Default `false`.
    pub profile_memory: bool,
    /// If `true`, records the floating-point operations of matrix products and convolutions, and shapes. Default
    /// `false`.
    pub with_flops: bool,
}

impl Default for ProfilerConfig {
    fn default() -> Self {
        Self {
            cpu: true,
            cuda: None,
            record_shapes: false,
            profile_memory: false,
            with_flops: false,
        }
    }
}

impl ProfilerConfig {
    fn session(&self) -> Result<ProfilerSession> {
        Ok(ProfilerSession::start(ProfilerOptions {
            cpu: self.cpu,
            cuda: self.records_gpus(),
            record_shapes: self.record_shapes,
            profile_memory: self.profile_memory,
            with_flops: self.with_flops,
        })?)
    }

    fn records_gpus(&self) -> bool {
        self.cuda.unwrap_or_else(Cuda::is_available)
    }

    /// Ends the session and returns its trace.
    fn trace_of(&self, session: ProfilerSession) -> Result<Trace> {
        let cupti_error = session.cupti_error().map(str::to_owned);
        let trace = Trace::new(session.stop()?, self.records_gpus(), cupti_error)?;
        if let Some(warning) = trace.gpu_warning() {
            tracing::warn!("{warning}");
        }
        Ok(trace)
    }
}

/// Runs `work` under the profiler. Returns its value and the trace. A process can take only one profile at a time.
///
/// ```
/// use overdrive_profiling::{GroupBy, ProfilerConfig, profile, record_function};
/// use tch::{Device, Kind, Tensor};
///
/// let x = Tensor::ones([64, 64], (Kind::Float, Device::Cpu));
/// let config = ProfilerConfig { with_flops: true, ..Default::default() };
/// let (_, mut trace) = profile(config, || {
///     let _range = record_function("my block");
///     x.matmul(&x)
/// })?;
/// let averages = trace.key_averages(GroupBy::Name);
/// assert_eq!(averages.get("aten::mm").map(|row| row.flops), Some(2 * 64 * 64 * 64));
/// assert_eq!(averages.get("my block").map(|row| row.calls), Some(1));
/// println!("{}", averages.table(10));
///
/// let folder = tempfile::tempdir()?;
/// trace.save_chrome_trace(folder.path().join("trace.json"))?; // for ui.perfetto.dev
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Returns an error while another profile is being taken, in which case `work` does not run, and libtorch's errors.
pub fn profile<T>(config: ProfilerConfig, work: impl FnOnce() -> T) -> Result<(T, Trace)> {
    let session = config.session()?;
    let value = work();
    Ok((value, config.trace_of(session)?))
}

/// Opens a named range of this thread's time in the trace, until the guard is dropped
/// (`torch.profiler.record_function`). The phases of a [`StepTimer`](crate::StepTimer) are such ranges
/// already. While no profiler records it costs some ten nanoseconds.
#[must_use = "the range ends when the guard is dropped; bind it to a name such as `_range`"]
pub fn record_function(name: &str) -> Option<Range> {
    // It fails only when memory is exhausted; a trace without a label is better than a step that fails.
    Range::begin(name).ok()
}

/// Marks operators, phases and [`record_function`]'s ranges as NVTX ranges until the guard is dropped, for NVIDIA's
/// Nsight Systems (`torch.autograd.profiler.emit_nvtx`): `nsys profile -t cuda,nvtx PROGRAM`. With `record_shapes`
/// the marks of operators have the shapes of their inputs.
///
/// Only the thread that calls this and the threads that autograd starts for it are marked.
///
/// # Errors
/// Returns an error without libtorch's CUDA libraries, or while a profile is being taken.
pub fn emit_nvtx(record_shapes: bool) -> Result<NvtxRanges> {
    Ok(NvtxRanges::start(record_shapes)?)
}

type OnTrace<'a> = Box<dyn FnMut(Trace) -> Result<()> + 'a>;

/// libtorch's profiler by a schedule. The loop calls [`step`](Self::step) at the end of each step, and a closure gets
/// the trace of each cycle.
///
/// ```
/// use overdrive_profiling::{Phase, Profiler, ProfilerConfig, Schedule, StepTimer};
/// use tch::{Device, Kind, Tensor};
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("trace.json");
/// let schedule = Schedule { wait: 1, warmup: 1, active: 2, repeat: 1, ..Default::default() };
/// let mut profiler = Profiler::start(ProfilerConfig::default(), schedule, |mut trace| {
///     trace.save_chrome_trace(&path)
/// })?;
/// let timer = StepTimer::new();
/// let x = Tensor::ones([8, 8], (Kind::Float, Device::Cpu));
/// for _ in 0..6 {
///     timer.phase(Phase::Forward, || x.matmul(&x)); // a range `forward` in the trace
///     profiler.step()?;
/// }
/// profiler.finish()?;
/// assert!(std::fs::read_to_string(&path)?.contains("ProfilerStep#3"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "a dropped profiler records nothing; call `step` in the loop and `finish` after it"]
pub struct Profiler<'a> {
    config: ProfilerConfig,
    schedule: Schedule,
    on_trace: OnTrace<'a>,
    step: u64,
    // Fields are dropped in order: a range must end before its profile does.
    range: Option<Range>,
    session: Option<ProfilerSession>,
}

impl<'a> Profiler<'a> {
    /// Starts with step 0 of the schedule.
    ///
    /// # Errors
    /// [`overdrive_core::Error::InvalidOption`] for an option of the schedule; an error while another profile is
    /// being taken.
    pub fn start(
        config: ProfilerConfig,
        schedule: Schedule,
        on_trace: impl FnMut(Trace) -> Result<()> + 'a,
    ) -> Result<Self> {
        schedule.validate()?;
        let mut profiler = Self {
            config,
            schedule,
            on_trace: Box::new(on_trace),
            step: 0,
            range: None,
            session: None,
        };
        profiler.enter(ScheduledAction::Idle)?;
        Ok(profiler)
    }

    /// Ends a step of the loop and begins the next one. After the last step of a cycle the closure gets the
    /// trace; that time belongs to no step.
    ///
    /// # Errors
    /// Errors of the closure and of libtorch.
    pub fn step(&mut self) -> Result<()> {
        let ended = self.schedule.action(self.step);
        self.range = None;
        self.step += 1;
        if ended == ScheduledAction::RecordAndSave {
            self.deliver_trace()?;
        }
        self.enter(ended)
    }

    /// Ends the profiler. The closure gets the trace of an unfinished cycle too.
    ///
    /// # Errors
    /// As for [`step`](Self::step).
    pub fn finish(mut self) -> Result<()> {
        self.range = None;
        match self.schedule.action(self.step) {
            ScheduledAction::Record | ScheduledAction::RecordAndSave => self.deliver_trace(),
            ScheduledAction::Idle | ScheduledAction::WarmUp => Ok(()),
        }
    }

    /// Returns the number of ended steps.
    pub fn steps(&self) -> u64 {
        self.step
    }

    fn enter(&mut self, before: ScheduledAction) -> Result<()> {
        let now = self.schedule.action(self.step);
        if before == ScheduledAction::WarmUp && now != ScheduledAction::WarmUp {
            // The warm-up pays for the profiler's own setup; its trace is discarded.
            self.session = None;
        }
        if now == ScheduledAction::Idle {
            return Ok(());
        }
        if self.session.is_none() {
            self.session = Some(self.config.session()?);
        }
        // PyTorch's name, by which TensorBoard's plugin and HTA find the steps.
        self.range = record_function(&format!("ProfilerStep#{}", self.step));
        Ok(())
    }

    fn deliver_trace(&mut self) -> Result<()> {
        match self.session.take() {
            Some(session) => (self.on_trace)(self.config.trace_of(session)?),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Profiler<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Profiler")
            .field("step", &self.step)
            .field("recording", &self.session.is_some())
            .finish_non_exhaustive()
    }
}
