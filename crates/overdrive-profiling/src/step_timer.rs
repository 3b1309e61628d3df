//! Where the wall time of a step goes.

use std::cell::Cell;
use std::ops::AddAssign;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use tch::{Cuda, Device};

use crate::{Error, Result};

/// A named part of a training step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Reading, tokenizing and moving the batch.
    Data,
    /// The model and its loss.
    Forward,
    /// The gradients.
    Backward,
    /// Unscaling, clipping, the update and zeroing the gradients.
    Optimizer,
    /// Whatever no other phase claims: logging, evaluation, the loop itself.
    Other,
}

impl Phase {
    /// Every phase, in the order of a step.
    pub const ALL: [Self; 5] = [
        Self::Data,
        Self::Forward,
        Self::Backward,
        Self::Optimizer,
        Self::Other,
    ];

    /// The name used in metrics files: `data`, `forward`, `backward`, `optimizer` or `other`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Data => "data",
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Optimizer => "optimizer",
            Self::Other => "other",
        }
    }
}

/// Seconds of wall time a phase. The phases never overlap: their sum is the time of the step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PhaseSeconds {
    /// Seconds in [`Phase::Data`].
    pub data: f64,
    /// Seconds in [`Phase::Forward`].
    pub forward: f64,
    /// Seconds in [`Phase::Backward`].
    pub backward: f64,
    /// Seconds in [`Phase::Optimizer`].
    pub optimizer: f64,
    /// Seconds in [`Phase::Other`].
    pub other: f64,
}

impl PhaseSeconds {
    /// The seconds of one phase.
    pub fn get(&self, phase: Phase) -> f64 {
        match phase {
            Phase::Data => self.data,
            Phase::Forward => self.forward,
            Phase::Backward => self.backward,
            Phase::Optimizer => self.optimizer,
            Phase::Other => self.other,
        }
    }

    /// The sum over all phases, in seconds.
    pub fn total(&self) -> f64 {
        Phase::ALL.iter().map(|&phase| self.get(phase)).sum()
    }

    fn slot(&mut self, phase: Phase) -> &mut f64 {
        match phase {
            Phase::Data => &mut self.data,
            Phase::Forward => &mut self.forward,
            Phase::Backward => &mut self.backward,
            Phase::Optimizer => &mut self.optimizer,
            Phase::Other => &mut self.other,
        }
    }
}

impl AddAssign for PhaseSeconds {
    fn add_assign(&mut self, rhs: Self) {
        for phase in Phase::ALL {
            *self.slot(phase) += rhs.get(phase);
        }
    }
}

/// Splits the wall time of each step into phases.
///
/// At every moment exactly one phase is charged: the innermost open one, or [`Phase::Other`] where
/// none is open. So the phases of a step add up to its wall time, and a phase opened inside another
/// one is not counted twice. The methods take `&self`, so that closures which a step hands to other
/// crates can time themselves.
///
/// CUDA kernels run behind the CPU's back: without waiting, the time of a forward pass shows up in
/// whatever asks for a result first. [`StepTimer::synchronized`] waits for the device at every
/// border between phases, which makes the split true and costs the overlap of CPU and GPU, so use
/// it for looking, and [`StepTimer::new`] for running. On a CPU both are the same.
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
    current: Cell<Phase>,
    charged_until: Cell<Instant>,
    step: Cell<PhaseSeconds>,
    totals: Cell<PhaseSeconds>,
    steps: Cell<u64>,
}

impl Default for StepTimer {
    fn default() -> Self {
        Self::new()
    }
}

impl StepTimer {
    /// A timer that never waits for a device. The first step begins now.
    pub fn new() -> Self {
        Self {
            wait_for: None,
            current: Cell::new(Phase::Other),
            charged_until: Cell::new(Instant::now()),
            step: Cell::default(),
            totals: Cell::default(),
            steps: Cell::new(0),
        }
    }

    /// A timer that waits for `device` at every border between phases (a device synchronisation
    /// each). For a CPU, and for devices that libtorch cannot wait for, it is [`StepTimer::new`].
    ///
    /// # Errors
    /// [`Error::NoSuchDevice`] where libtorch does not see this CUDA device.
    pub fn synchronized(device: Device) -> Result<Self> {
        let mut timer = Self::new();
        if let Device::Cuda(index) = device {
            let available = Cuda::device_count();
            if i64::try_from(index).map_or(true, |index| index >= available) {
                let device = format!("cuda:{index}");
                return Err(Error::NoSuchDevice { device, available });
            }
            timer.wait_for = Some(index);
        }
        Ok(timer)
    }

    /// Begins a step now. What passed since the last [`end_step`](Self::end_step) (an evaluation, a
    /// saved snapshot) belongs to no step; without this call it is [`Phase::Other`] of the next.
    pub fn begin_step(&self) {
        self.wait();
        self.step.set(PhaseSeconds::default());
        self.charged_until.set(Instant::now());
    }

    /// Runs `work` as part of `phase` and returns what it returns. A panic inside closes the phase.
    pub fn phase<T>(&self, phase: Phase, work: impl FnOnce() -> T) -> T {
        let _open = self.enter(phase);
        work()
    }

    /// Opens `phase` until the guard is dropped: the form for code that a closure cannot hold.
    pub fn enter(&self, phase: Phase) -> PhaseGuard<'_> {
        self.charge();
        PhaseGuard {
            timer: self,
            before: self.current.replace(phase),
        }
    }

    /// Ends the step, adds it to the totals and returns its phases. The next one begins now.
    pub fn end_step(&self) -> PhaseSeconds {
        self.charge();
        let step = self.step.take();
        let mut totals = self.totals.get();
        totals += step;
        self.totals.set(totals);
        self.steps.set(self.steps.get() + 1);
        step
    }

    /// The phases of all ended steps together.
    pub fn totals(&self) -> PhaseSeconds {
        self.totals.get()
    }

    /// How many steps have ended.
    pub fn steps(&self) -> u64 {
        self.steps.get()
    }

    /// Gives the time since the last border to the open phase.
    fn charge(&self) {
        self.wait();
        let now = Instant::now();
        let passed = now.saturating_duration_since(self.charged_until.replace(now));
        let mut step = self.step.get();
        *step.slot(self.current.get()) += passed.as_secs_f64();
        self.step.set(step);
    }

    fn wait(&self) {
        if let Some(Ok(index)) = self.wait_for.map(i64::try_from) {
            Cuda::synchronize(index);
        }
    }

    #[cfg(test)]
    fn advance(&self, by: std::time::Duration) {
        // Tests move the clock instead of sleeping: the border moves into the past.
        let border = self.charged_until.get();
        self.charged_until
            .set(border.checked_sub(by).unwrap_or(border));
    }
}

/// Keeps a phase open; see [`StepTimer::enter`].
#[derive(Debug)]
#[must_use = "the phase closes when the guard is dropped"]
pub struct PhaseGuard<'a> {
    timer: &'a StepTimer,
    before: Phase,
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
