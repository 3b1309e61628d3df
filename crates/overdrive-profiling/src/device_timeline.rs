//! The phases of a step in device time.

use std::collections::VecDeque;

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
}

/// An event in the work of a device, or a test's stand-in for one.
pub(crate) trait Event: Sized {
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
    /// Events that were read. They are reused, since creating one costs the driver more than recording it.
    free: Vec<E>,
}

impl Timeline<DeviceEvent> {
    pub(crate) fn new(device: tch::Device) -> Self {
        Self::with_events(device, |device| Ok(DeviceEvent::new(device)?))
    }
}

impl<E: Event> Timeline<E> {
    pub(crate) fn with_events(device: tch::Device, make: fn(tch::Device) -> Result<E>) -> Self {
        Self {
            make,
            device,
            boundaries: Vec::new(),
            ended: VecDeque::new(),
            free: Vec::new(),
        }
    }

    /// Begins a step here, and drops the events since the last one.
    pub(crate) fn begin(&mut self) -> Result<()> {
        self.free
            .extend(self.boundaries.drain(..).map(|(_, event)| event));
        self.boundary(Phase::Other)
    }

    /// Ends a section of `phase` here.
    pub(crate) fn boundary(&mut self, phase: Phase) -> Result<()> {
        let mut event = match self.free.pop() {
            Some(event) => event,
            None => (self.make)(self.device)?,
        };
        event.record()?;
        self.boundaries.push((phase, event));
        Ok(())
    }

    /// Ends the step here, where the next one begins.
    pub(crate) fn end(&mut self, step: u64) -> Result<()> {
        self.ended
            .push_back((step, std::mem::take(&mut self.boundaries)));
        self.begin()
    }

    /// Takes the ended steps that the device has finished; with `wait` all of them.
    pub(crate) fn take(&mut self, wait: bool) -> Result<Vec<DevicePhases>> {
        let mut taken = Vec::new();
        while let Some((step, boundaries)) = self.ended.pop_front() {
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
            self.free
                .extend(boundaries.into_iter().map(|(_, event)| event));
            taken.push(DevicePhases { step, seconds });
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
        Timeline::with_events(tch::Device::Cpu, |_| {
            MADE.set(MADE.get() + 1);
            Ok(Tick(Cell::new(0.0)))
        })
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
