//! A timer of the phases of a step.

use std::cell::{Cell, RefCell};
use std::time::Instant;

use overdrive_sys::profiler::Range;
use tch::{Cuda, Device};

use crate::device_timeline::{DeviceClock, Timeline, stand_in};
use crate::{DevicePhases, Error, Phase, PhaseSeconds, Result};

/// A timer that splits the time of each step into phases.
///
/// At every moment exactly one phase is charged: the innermost open one, or [`Phase::Other`] if
/// none is open. So the phases of a step add up to its wall time, and a phase inside another
/// one is not counted twice. The methods take `&self`, so that closures which a step passes to other
/// crates can time themselves. While a [`Profiler`](crate::Profiler) records, each phase is a range of
/// its trace.
///
/// CUDA kernels run asynchronously: the host launches the work of a step, and is done with the step before the GPU
/// is. By the host's clock the phases measure the launches, and the time of the work is charged to whatever waits for
/// a result, often after the step. There are three kinds of timers, which are the same on a CPU:
///
/// - [`StepTimer::new`] uses the host's clock, which is right on a CPU only.
/// - That of a [`StepRecorder`](crate::StepRecorder) also records events in the device's work. Nothing
///   waits; the device time of a step is available once the device has finished it, often a step or two later. For
///   training.
/// - [`StepTimer::synchronized`] waits for the device at every phase boundary. The split is
///   right at once, but host and device no longer overlap. For measurements.
///
/// ```
/// use overdrive_profiling::{Phase, StepTimer};
///
/// let timer = StepTimer::new();
/// for _ in 0..3 {
///     timer.begin_step();
///     let batch = timer.phase(Phase::Data, || vec![1.0_f64; 1000]);
///     let loss: f64 = timer.phase(Phase::Forward, || batch.iter().sum());
///     assert_eq!(loss, 1000.0);
///     let seconds = timer.end_step();
///     assert!(seconds.forward > 0.0 && seconds.total() >= seconds.forward);
/// }
/// assert_eq!(timer.steps(), 3);
/// ```
#[derive(Debug)]
pub struct StepTimer {
    wait_for: Option<usize>,
    events: Option<RefCell<Events>>,
    created: Instant,
    current: Cell<Phase>,
    charged_until: Cell<Instant>,
    step: Cell<PhaseSeconds>,
    totals: Cell<PhaseSeconds>,
    steps: Cell<u64>,
}

/// The events on the device.
#[derive(Debug)]
struct Events {
    /// `None` after its first error: a clock that missed an event would assign times to the wrong steps.
    clock: Option<Box<dyn DeviceClock>>,
    /// That error, until it is returned: a phase boundary is often the drop of a guard, which cannot return one.
    failure: Option<Error>,
}

impl Events {
    fn record(&mut self, record: impl FnOnce(&mut dyn DeviceClock) -> Result<()>) {
        if let Some(clock) = &mut self.clock
            && let Err(error) = record(&mut **clock)
        {
            (self.clock, self.failure) = (None, Some(error));
        }
    }

    fn take(&mut self, wait: bool) -> Result<Vec<DevicePhases>> {
        let mut taken = Vec::new();
        self.record(|clock| {
            taken = clock.take(wait)?;
            Ok(())
        });
        self.failure.take().map_or(Ok(taken), Err)
    }
}

impl Default for StepTimer {
    fn default() -> Self {
        Self::new()
    }
}

impl StepTimer {
    /// Creates a timer by the host's clock. The first step begins now.
    pub fn new() -> Self {
        let created = Instant::now();
        Self {
            wait_for: None,
            events: None,
            created,
            current: Cell::new(Phase::Other),
            charged_until: Cell::new(created),
            step: Cell::default(),
            totals: Cell::default(),
            steps: Cell::new(0),
        }
    }

    /// Creates a timer that also records an event in the stream of `device` at each phase boundary, which takes a few
    /// microseconds on the host. Only this call waits for the work queued on the device so far. For a CPU, and for
    /// devices without events, it is [`StepTimer::new`].
    ///
    /// # Errors
    /// [`Error::NoSuchDevice`] if libtorch does not see this CUDA device; errors of libtorch.
    pub(crate) fn with_events(device: Device) -> Result<Self> {
        let clock: Option<Box<dyn DeviceClock>> = match (cuda_index(device)?, device) {
            (Some(_), _) => Some(Box::new(Timeline::new(device)?)),
            (None, Device::Cpu) => stand_in(),
            (None, _) => None,
        };
        // After the beginning of the device's clock, for which it has waited.
        let mut timer = Self::new();
        timer.events = clock.map(|clock| {
            RefCell::new(Events {
                clock: Some(clock),
                failure: None,
            })
        });
        Ok(timer)
    }

    /// Creates a timer that waits for `device` at every phase boundary (a device synchronization
    /// each). For a CPU, and for devices that libtorch cannot wait for, it is [`StepTimer::new`].
    ///
    /// # Errors
    /// [`Error::NoSuchDevice`] if libtorch does not see this CUDA device.
    pub fn synchronized(device: Device) -> Result<Self> {
        let mut timer = Self::new();
        timer.wait_for = cuda_index(device)?;
        Ok(timer)
    }

    /// Begins a step now. The time since the last [`end_step`](Self::end_step) (an evaluation, a
    /// snapshot) belongs to no step; without this call it is [`Phase::Other`] of the next step.
    pub fn begin_step(&self) {
        // Work of before the step must not count for its first phase.
        self.wait();
        self.step.set(PhaseSeconds::default());
        self.charged_until.set(Instant::now());
        self.record(|clock| clock.begin());
    }

    /// Runs `work` as part of `phase` and returns its result. A panic inside closes the phase.
    pub fn phase<T>(&self, phase: Phase, work: impl FnOnce() -> T) -> T {
        let _open = self.enter(phase);
        work()
    }

    /// Opens `phase` until the guard is dropped, for code that does not fit into a closure.
    pub fn enter(&self, phase: Phase) -> PhaseGuard<'_> {
        self.charge();
        PhaseGuard {
            timer: self,
            before: self.current.replace(phase),
            // It fails only when memory is exhausted; a trace without a label is better than a step that fails.
            _range: Range::begin(phase.name()).ok(),
        }
    }

    /// Ends the step, adds it to the totals and returns its phases by the host's clock. The next step
    /// begins now.
    pub fn end_step(&self) -> PhaseSeconds {
        self.charge();
        let step = self.step.take();
        let mut totals = self.totals.get();
        totals += step;
        self.totals.set(totals);
        let number = self.steps.get() + 1;
        self.steps.set(number);
        self.record(|clock| clock.end(number));
        step
    }

    /// Returns the phases in device time of the steps that the device has finished since the last call,
    /// oldest first; with `wait` of all steps, after waiting for them. Empty without [`StepTimer::with_events`] on a
    /// GPU.
    ///
    /// # Errors
    /// Errors of the work on the device, each once. Nothing is measured on the device after the first.
    pub(crate) fn device_phases(&self, wait: bool) -> Result<Vec<DevicePhases>> {
        let Some(events) = &self.events else {
            return Ok(Vec::new());
        };
        events.borrow_mut().take(wait)
    }

    /// Returns `true` if the device has a clock of its own ([`StepTimer::with_events`] on a GPU).
    pub(crate) fn has_device_phases(&self) -> bool {
        self.events.is_some()
    }

    /// Returns `true` if the device's clock has failed.
    pub(crate) fn has_lost_device(&self) -> bool {
        let lost = |events: &RefCell<Events>| events.borrow().clock.is_none();
        self.events.as_ref().is_some_and(lost)
    }

    /// Returns the seconds of wall time since the timer was created, up to the last phase boundary.
    pub(crate) fn seconds(&self) -> f64 {
        let until = self.charged_until.get();
        until.saturating_duration_since(self.created).as_secs_f64()
    }

    /// Returns the sum of all ended steps by phase, by the host's clock.
    pub fn totals(&self) -> PhaseSeconds {
        self.totals.get()
    }

    /// Returns the number of ended steps.
    pub fn steps(&self) -> u64 {
        self.steps.get()
    }

    /// Charges the time since the last boundary to the open phase.
    fn charge(&self) {
        self.wait();
        let now = Instant::now();
        let passed = now.saturating_duration_since(self.charged_until.replace(now));
        let mut step = self.step.get();
        step.add(self.current.get(), passed.as_secs_f64());
        self.step.set(step);
        let phase = self.current.get();
        self.record(|clock| clock.boundary(phase));
    }

    fn record(&self, record: impl FnOnce(&mut dyn DeviceClock) -> Result<()>) {
        if let Some(events) = &self.events {
            events.borrow_mut().record(record);
        }
    }

    fn wait(&self) {
        if let Some(Ok(index)) = self.wait_for.map(i64::try_from) {
            Cuda::synchronize(index);
        }
    }

    #[cfg(test)]
    pub(crate) fn advance(&self, by: std::time::Duration) {
        // Tests move the last boundary into the past instead of sleeping.
        let boundary = self.charged_until.get();
        self.charged_until
            .set(boundary.checked_sub(by).unwrap_or(boundary));
    }
}

/// Returns the index of a CUDA device, which must exist; `None` for other devices.
fn cuda_index(device: Device) -> Result<Option<usize>> {
    let Device::Cuda(index) = device else {
        return Ok(None);
    };
    let available = Cuda::device_count();
    if i64::try_from(index).map_or(true, |index| index >= available) {
        let device = format!("cuda:{index}");
        return Err(Error::NoSuchDevice { device, available });
    }
    Ok(Some(index))
}

/// A guard that keeps a phase open; see [`StepTimer::enter`].
#[derive(Debug)]
#[must_use = "the phase closes when the guard is dropped"]
pub struct PhaseGuard<'a> {
    timer: &'a StepTimer,
    before: Phase,
    _range: Option<Range>,
}

impl Drop for PhaseGuard<'_> {
    fn drop(&mut self) {
        self.timer.charge();
        self.timer.current.set(self.before);
    }
}
#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// A test's own code takes far less than this many seconds.
    const TOLERANCE: f64 = 0.5;

    #[track_caller]
    fn about(measured: f64, expected: f64) {
        assert!(
            (measured - expected).abs() < TOLERANCE,
            "{measured} s, expected {expected} s"
        );
    }

    #[test]
    fn the_phases_of_a_step_add_up_to_its_wall_time() {
        let timer = StepTimer::new();
        timer.phase(Phase::Data, || timer.advance(SECOND));
        timer.advance(2 * SECOND);
        timer.phase(Phase::Backward, || timer.advance(4 * SECOND));
        let step = timer.end_step();
        about(step.data, 1.0);
        about(step.other, 2.0);
        about(step.backward, 4.0);
        about(step.forward + step.optimizer, 0.0);
        about(step.total(), 7.0);
    }

    #[test]
    fn an_inner_phase_is_not_counted_twice() {
        let timer = StepTimer::new();
        timer.phase(Phase::Forward, || {
            timer.advance(SECOND);
            timer.phase(Phase::Data, || timer.advance(3 * SECOND));
            timer.advance(SECOND);
        });
        let step = timer.end_step();
        about(step.forward, 2.0);
        about(step.data, 3.0);
    }

    #[test]
    fn a_phase_may_be_opened_several_times_in_a_step() {
        let timer = StepTimer::new();
        for _ in 0..3 {
            timer.phase(Phase::Forward, || timer.advance(SECOND));
            timer.phase(Phase::Backward, || timer.advance(2 * SECOND));
        }
        let step = timer.end_step();
        about(step.forward, 3.0);
        about(step.backward, 6.0);
    }

    #[test]
    fn totals_are_the_sum_over_the_steps_and_leave_out_what_is_between_them() {
        let timer = StepTimer::new();
        for _ in 0..2 {
            timer.begin_step();
            timer.phase(Phase::Optimizer, || timer.advance(SECOND));
            timer.end_step();
            timer.advance(60 * SECOND);
        }
        about(timer.totals().optimizer, 2.0);
        about(timer.totals().total(), 2.0);
        assert_eq!(timer.steps(), 2);
    }

    #[test]
    fn without_begin_step_the_time_between_steps_is_other() {
        let timer = StepTimer::new();
        timer.end_step();
        timer.advance(5 * SECOND);
        about(timer.end_step().other, 5.0);
    }

    #[test]
    fn a_panic_closes_the_phase() {
        let timer = StepTimer::new();
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            timer.phase(Phase::Forward, || panic!("on purpose"));
        }));
        assert!(outcome.is_err());
        timer.advance(SECOND);
        about(timer.end_step().other, 1.0);
    }

    #[test]
    fn a_synchronized_timer_for_a_cpu_needs_no_device() {
        assert!(StepTimer::synchronized(Device::Cpu).is_ok());
    }

    #[test]
    fn events_on_a_cpu_are_the_hosts_clock_alone() {
        let timer = StepTimer::with_events(Device::Cpu).expect("a CPU needs no device");
        timer.phase(Phase::Forward, || timer.advance(SECOND));
        about(timer.end_step().forward, 1.0);
        assert!(timer.device_phases(true).expect("no device").is_empty());
        assert!(StepTimer::with_events(Device::Cuda(4711)).is_err());
    }

    #[test]
    #[ignore = "needs a CUDA GPU"]
    fn events_on_a_gpu_split_the_step_without_waiting() {
        let device = Device::Cuda(0);
        let timer = StepTimer::with_events(device).expect("a GPU is there");
        let x = tch::Tensor::ones([2048, 2048], (tch::Kind::Float, device));
        for _ in 0..3 {
            timer.begin_step();
            timer.phase(Phase::Forward, || drop(x.matmul(&x)));
            timer.phase(Phase::Backward, || (0..4).for_each(|_| drop(x.matmul(&x))));
            timer.end_step();
        }
        let steps = timer.device_phases(true).expect("the device is well");
        assert_eq!(steps.iter().map(|s| s.step).collect::<Vec<_>>(), [1, 2, 3]);
        assert!(steps[2].seconds.backward > 2.0 * steps[2].seconds.forward);
    }

    #[test]
    fn waiting_for_a_device_that_is_not_there_is_an_error_that_counts_the_devices() {
        let error = StepTimer::synchronized(Device::Cuda(4711)).expect_err("no such device");
        let text = error.to_string();
        assert!(
            text.starts_with("cannot wait for cuda:4711: this process sees "),
            "{text}"
        );
        assert!(text.contains("StepTimer::new"), "{text}");
    }
}
