//! A step's phases as the device went through them.

use std::collections::VecDeque;

use overdrive_sys::profiler::DeviceEvent;

use crate::{Phase, PhaseSeconds, Result};

/// The phases of one step in device time.
///
/// The time between two borders counts for the phase that the host was in when it asked for the
/// work between them. Where the device runs behind the host, loading data costs nothing here; where
/// the device has to wait for a batch, the wait is in [`Phase::Data`]. So this is the split to act on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DevicePhases {
    /// The step of the timer, counted from 1.
    pub step: u64,
    /// The seconds of each phase.
    pub seconds: PhaseSeconds,
}

/// What a timeline marks its borders with: an event of the device, or a test's.
pub(crate) trait Mark: Sized {
    fn record(&mut self) -> Result<()>;
    fn is_done(&self) -> Result<bool>;
    fn wait(&self) -> Result<()>;
    fn seconds_since(&self, start: &Self) -> Result<f64>;
}

impl Mark for DeviceEvent {
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

/// Marks on a device between the phases of its steps, read when the device has passed them.
#[derive(Debug)]
pub(crate) struct Timeline<M> {
    make: fn(tch::Device) -> Result<M>,
    device: tch::Device,
    /// The borders of the step that is under way: each ends a piece of the phase beside it.
    borders: Vec<(Phase, M)>,
    ended: VecDeque<(u64, Vec<(Phase, M)>)>,
    /// Marks that were read, to be used again.
    free: Vec<M>,
}

impl Timeline<DeviceEvent> {
    pub(crate) fn new(device: tch::Device) -> Self {
        Self::with_marks(device, |device| Ok(DeviceEvent::new(device)?))
    }
}

impl<M: Mark> Timeline<M> {
    pub(crate) fn with_marks(device: tch::Device, make: fn(tch::Device) -> Result<M>) -> Self {
        Self {
            make,
            device,
            borders: Vec::new(),
            ended: VecDeque::new(),
            free: Vec::new(),
        }
    }

    /// Begins a step here; what was marked since the last one is dropped.
    pub(crate) fn begin(&mut self) -> Result<()> {
        self.free
            .extend(self.borders.drain(..).map(|(_, mark)| mark));
        self.border(Phase::Other)
    }

    /// Ends a piece of `phase` here.
    pub(crate) fn border(&mut self, phase: Phase) -> Result<()> {
        let mut mark = match self.free.pop() {
            Some(mark) => mark,
            None => (self.make)(self.device)?,
        };
        mark.record()?;
        self.borders.push((phase, mark));
        Ok(())
    }

    /// Ends the step here; the next one begins here too.
    pub(crate) fn end(&mut self, step: u64) -> Result<()> {
        self.ended
            .push_back((step, std::mem::take(&mut self.borders)));
        self.begin()
    }

    /// The ended steps that the device is through with; with `wait`, all of them.
    pub(crate) fn take(&mut self, wait: bool) -> Result<Vec<DevicePhases>> {
        let mut taken = Vec::new();
        while let Some((step, borders)) = self.ended.pop_front() {
            if let Some((_, last)) = borders.last() {
                if wait {
                    last.wait()?;
                }
                if !last.is_done()? {
                    self.ended.push_front((step, borders));
                    break;
                }
            }
            let mut seconds = PhaseSeconds::default();
            for pair in borders.windows(2) {
                let [(_, start), (phase, end)] = pair else {
                    continue; // windows of two have two
                };
                seconds.add(*phase, end.seconds_since(start)?);
            }
            self.free.extend(borders.into_iter().map(|(_, mark)| mark));
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
        /// The time of the pretended device's last mark, and how far it has got.
        static QUEUED: Cell<f64> = const { Cell::new(0.0) };
        static REACHED: Cell<f64> = const { Cell::new(0.0) };
        static MADE: Cell<usize> = const { Cell::new(0) };
    }

    /// A mark on a device whose every piece of work between two marks takes a second.
    struct Tick(Cell<f64>);

    impl Mark for Tick {
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
        Timeline::with_marks(tch::Device::Cpu, |_| {
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
            timeline.border(phase).expect("border");
        }
        timeline.end(number).expect("end");
    }

    #[test]
    fn a_step_is_read_once_the_device_has_passed_its_last_border() {
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
        assert_eq!(seconds.total(), 5.0, "the borders lie a second apart");
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
    fn marks_are_used_again() {
        let mut timeline = timeline();
        step(&mut timeline, 1);
        timeline.take(true).expect("take");
        let made = MADE.get();
        for number in 2..100 {
            step(&mut timeline, number);
            timeline.take(true).expect("take");
        }
        assert!(MADE.get() <= made + 1, "{} marks for {made}", MADE.get());
    }
}
