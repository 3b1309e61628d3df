//! The phases of a step in device time.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;

use overdrive_sys::profiler::DeviceEvent;

use crate::{Phase, PhaseSeconds, Result};

/// The phases of one step in device time.
///
/// The time between two events counts for the phase in which the host launched the
/// work between them. Where the device runs behind the host, loading data costs nothing here; where
/// the device has to wait for a batch, the wait is in [`Phase::Data`]. So this is the split to optimize.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DevicePhases {
    /// The number of the step, counted from 1 by the timer.
    pub step: u64,
    /// The seconds of each phase.
    pub seconds: PhaseSeconds,
    /// The moment at which the device had finished the step, in seconds since the timer was created.
    pub end: f64,
}

/// The clock of a device that runs behind the host: it is read once the device has passed what was recorded.
#[doc(hidden)]
pub trait DeviceClock: fmt::Debug + Send {
    /// Begins a step here, and forgets what was recorded since the last one.
    ///
    /// # Errors
    /// Errors of the device.
    fn begin(&mut self) -> Result<()>;

    /// Ends a section of `phase` here.
    ///
    /// # Errors
    /// Errors of the device.
    fn boundary(&mut self, phase: Phase) -> Result<()>;

    /// Ends the step here, where the next one begins.
    ///
    /// # Errors
    /// Errors of the device.
    fn end(&mut self, step: u64) -> Result<()>;

    /// Takes the ended steps that the device has finished, oldest first; with `wait` all of them.
    ///
    /// # Errors
    /// Errors of the device's work.
    fn take(&mut self, wait: bool) -> Result<Vec<DevicePhases>>;
}

type MakeClock = dyn Fn() -> Box<dyn DeviceClock>;

thread_local! {
    static STAND_IN: RefCell<Option<Box<MakeClock>>> = const { RefCell::new(None) };
}

/// For tests: until the guard is dropped, the timers that this thread makes for the CPU use clocks of `make`, as
/// those for a GPU use its events.
#[doc(hidden)]
pub fn serve_cpu_with(make: impl Fn() -> Box<dyn DeviceClock> + 'static) -> StandInClock {
    STAND_IN.set(Some(Box::new(make)));
    StandInClock(())
}

/// The guard of [`serve_cpu_with`].
#[doc(hidden)]
#[derive(Debug)]
#[must_use = "the timers use the clock of the host again when the guard is dropped"]
pub struct StandInClock(());

impl Drop for StandInClock {
    fn drop(&mut self) {
        STAND_IN.take();
    }
}

/// Returns the clock that stands in for a device behind the CPU, if a test has set one.
pub(crate) fn stand_in() -> Option<Box<dyn DeviceClock>> {
    STAND_IN.with_borrow(|make| make.as_ref().map(|make| make()))
}

/// An event in the work of a device, or a test's stand-in for one.
pub(crate) trait Event: Sized + fmt::Debug + Send {
    fn record(&mut self) -> Result<()>;
    fn is_done(&self) -> Result<bool>;
    fn wait(&self) -> Result<()>;
    fn seconds_since(&self, start: &Self) -> Result<f64>;
}

impl Event for DeviceEvent {
    fn record(&mut self) -> Result<()> {
        Ok(DeviceEvent::record(self)?)
    }

    fn is_done(&self) -> Result<bool> {
        Ok(DeviceEvent::is_done(self)?)
    }

    fn wait(&self) -> Result<()> {
        Ok(DeviceEvent::wait(self)?)
    }

    fn seconds_since(&self, start: &Self) -> Result<f64> {
        Ok(DeviceEvent::seconds_since(self, start)?)
    }
}

/// Events on a device between the phases of its steps, read when the device has passed them.
#[derive(Debug)]
pub(crate) struct Timeline<E> {
    make: fn(tch::Device) -> Result<E>,
    device: tch::Device,
    /// The events of the current step: each ends a section of the phase beside it.
    boundaries: Vec<(Phase, E)>,
    /// The steps that ended on the host and were not read yet, oldest first.
    ended: VecDeque<(u64, Vec<(Phase, E)>)>,
    /// The end of the last step that was read, at first the event of the beginning, and its seconds since that one.
    last: Option<(E, f64)>,
    /// Events that were read. They are reused, since creating one costs the driver more than recording it.
    free: Vec<E>,
}

impl Timeline<DeviceEvent> {
    pub(crate) fn new(device: tch::Device) -> Result<Self> {
        Self::with_events(device, |device| Ok(DeviceEvent::new(device)?))
    }
}

impl<E: Event> Timeline<E> {
    /// Creates a timeline that begins now. It waits for the device this once, so that its beginning is one moment for
    /// the host and for the device.
    pub(crate) fn with_events(
        device: tch::Device,
        make: fn(tch::Device) -> Result<E>,
    ) -> Result<Self> {
        let mut timeline = Self {
            make,
            device,
            boundaries: Vec::new(),
            ended: VecDeque::new(),
            last: None,
            free: Vec::new(),
        };
        let beginning = timeline.recorded()?;
        beginning.wait()?;
        timeline.last = Some((beginning, 0.0));
        timeline.begin()?;
        Ok(timeline)
    }

    /// Returns an event that is recorded here.
    fn recorded(&mut self) -> Result<E> {
        let mut event = match self.free.pop() {
            Some(event) => event,
            None => (self.make)(self.device)?,
        };
        event.record()?;
        Ok(event)
    }
}

impl<E: Event> DeviceClock for Timeline<E> {
    fn begin(&mut self) -> Result<()> {
        self.free
            .extend(self.boundaries.drain(..).map(|(_, event)| event));
        self.boundary(Phase::Other)
    }

    fn boundary(&mut self, phase: Phase) -> Result<()> {
        let event = self.recorded()?;
        self.boundaries.push((phase, event));
        Ok(())
    }

    fn end(&mut self, step: u64) -> Result<()> {
        self.ended
            .push_back((step, std::mem::take(&mut self.boundaries)));
        self.begin()
    }

    fn take(&mut self, wait: bool) -> Result<Vec<DevicePhases>> {
        let mut taken = Vec::new();
        while let Some((step, mut boundaries)) = self.ended.pop_front() {
            // Events of a stream complete in order: the last one stands for all of the step.
            if let Some((_, last)) = boundaries.last() {
                if wait {
                    last.wait()?;
                }
                if !last.is_done()? {
                    self.ended.push_front((step, boundaries));
                    break;
                }
            }
            let mut seconds = PhaseSeconds::default();
            for pair in boundaries.windows(2) {
                let [(_, start), (phase, end)] = pair else {
                    continue; // `windows(2)` gives slices of two.
                };
                seconds.add(*phase, end.seconds_since(start)?);
            }
            // Summed from step to step: CUDA's time between two events has 24 bits, which are coarse after a day.
            let mut end = 0.0;
            if let (Some((_, event)), Some((last, before))) = (boundaries.pop(), self.last.take()) {
                end = before + event.seconds_since(&last)?;
                self.free.push(last);
                self.last = Some((event, end));
            }
            self.free
                .extend(boundaries.into_iter().map(|(_, event)| event));
            taken.push(DevicePhases { step, seconds, end });
        }
        Ok(taken)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    thread_local! {
        /// The time of the simulated device's last event, the time that it has reached, and the events made.
        static QUEUED: Cell<f64> = const { Cell::new(0.0) };
        static REACHED: Cell<f64> = const { Cell::new(0.0) };
        static MADE: Cell<usize> = const { Cell::new(0) };
    }

    /// An event of a device whose work between two events takes a second.
    #[derive(Debug)]
    struct Tick(Cell<f64>);

    impl Event for Tick {
        fn record(&mut self) -> Result<()> {
            QUEUED.set(QUEUED.get() + 1.0);
            self.0.set(QUEUED.get());
            Ok(())
        }
        fn is_done(&self) -> Result<bool> {
            Ok(self.0.get() <= REACHED.get())
        }
        fn wait(&self) -> Result<()> {
            REACHED.set(REACHED.get().max(self.0.get()));
            Ok(())
        }
        fn seconds_since(&self, start: &Self) -> Result<f64> {
            Ok(self.0.get() - start.0.get())
        }
    }

    fn timeline() -> Timeline<Tick> {
        let timeline = Timeline::with_events(tch::Device::Cpu, |_| {
            MADE.set(MADE.get() + 1);
            Ok(Tick(Cell::new(0.0)))
        });
        timeline.expect("a timeline")
    }

    fn step(timeline: &mut Timeline<Tick>, number: u64) {
        timeline.begin().expect("begin");
        for phase in [
            Phase::Other,
            Phase::Data,
            Phase::Forward,
            Phase::Backward,
            Phase::Forward,
        ] {
            timeline.boundary(phase).expect("boundary");
        }
        timeline.end(number).expect("end");
    }

    #[test]
    fn a_step_is_read_once_the_device_has_passed_its_last_event() {
        let mut timeline = timeline();
        step(&mut timeline, 1);
        assert!(
            timeline.take(false).expect("take").is_empty(),
            "nothing has run yet"
        );
        REACHED.set(QUEUED.get());
        let taken = timeline.take(false).expect("take");
        assert_eq!(taken.len(), 1);
        assert_eq!(taken[0].step, 1);
        let seconds = taken[0].seconds;
        assert_eq!(
            (seconds.data, seconds.forward, seconds.backward),
            (1.0, 2.0, 1.0)
        );
        assert_eq!(seconds.total(), 5.0, "the events are a second apart");
        assert!(
            timeline.take(false).expect("take").is_empty(),
            "each step once"
        );
    }

    #[test]
    fn waiting_reads_every_step_in_order() {
        let mut timeline = timeline();
        (1..=3).for_each(|number| step(&mut timeline, number));
        let taken = timeline.take(true).expect("take");
        let steps: Vec<_> = taken.iter().map(|phases| phases.step).collect();
        assert_eq!(steps, [1, 2, 3]);
    }

    #[test]
    fn a_step_ends_so_many_seconds_after_the_beginning_of_the_timeline() {
        let mut timeline = timeline();
        let beginning = QUEUED.get() - 1.0;
        for number in 1..=3 {
            step(&mut timeline, number);
            // The work between two steps, such as an evaluation, takes a second.
            let end = QUEUED.get() - 1.0;
            let taken = timeline.take(true).expect("take");
            assert_eq!(taken[0].end, end - beginning);
        }
    }

    #[test]
    fn events_are_reused() {
        let mut timeline = timeline();
        step(&mut timeline, 1);
        timeline.take(true).expect("take");
        let made = MADE.get();
        for number in 2..100 {
            step(&mut timeline, number);
            timeline.take(true).expect("take");
        }
        assert!(MADE.get() <= made + 1, "{} events for {made}", MADE.get());
    }
}
