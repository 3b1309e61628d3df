//! The times and rates of runs on a device that finishes its work after the host has launched it, as a GPU does.

use std::collections::VecDeque;
use std::path::Path;

use overdrive::profiling::{self, DeviceClock, DevicePhases, Phase, PhaseSeconds, serve_cpu_with};
use overdrive::tracking::{StepMetrics, read_metrics};
use overdrive::trainer::TrainingArguments;

use crate::alone;
use crate::resume::{arguments, latest, train, train_whole};

/// The seconds of a step of two micro-batches: each takes 1 s forward and 2 s backward, the optimizer 0.5 s.
const STEP: f64 = 6.5;
/// The seconds that lie before each step.
const PAUSE: f64 = 0.25;

/// A device that has finished nothing until the host waits for it.
#[derive(Debug, Default)]
struct Behind {
    now: f64,
    step: PhaseSeconds,
    ended: VecDeque<DevicePhases>,
}

impl DeviceClock for Behind {
    fn begin(&mut self) -> profiling::Result<()> {
        self.step = PhaseSeconds::default();
        self.now += PAUSE;
        Ok(())
    }

    fn boundary(&mut self, phase: Phase) -> profiling::Result<()> {
        let seconds = match phase {
            Phase::Forward => 1.0,
            Phase::Backward => 2.0,
            Phase::Optimizer => 0.5,
            _ => 0.0,
        };
        self.step.add(phase, seconds);
        self.now += seconds;
        Ok(())
    }

    fn end(&mut self, step: u64) -> profiling::Result<()> {
        let (seconds, end) = (std::mem::take(&mut self.step), self.now);
        self.ended.push_back(DevicePhases { step, seconds, end });
        Ok(())
    }

    fn take(&mut self, wait: bool) -> profiling::Result<Vec<DevicePhases>> {
        let ended = if wait {
            std::mem::take(&mut self.ended)
        } else {
            VecDeque::new()
        };
        Ok(ended.into())
    }
}

fn metrics(folder: &Path) -> Vec<StepMetrics> {
    read_metrics(folder.join("run/metrics.jsonl"))
        .unwrap()
        .records
}

#[track_caller]
fn equal(measured: f64, expected: f64) {
    assert!(
        (measured / expected - 1.0).abs() < 1e-9,
        "{measured} instead of {expected}"
    );
}

/// Checks the records of a run whose process began after step `before`, when `tokens` were seen.
fn check(records: &[StepMetrics], before: u64, tokens: u64) {
    for record in records {
        // The window is longer than the run.
        let steps = (record.step - before) as f64;
        let seen = record.tokens_seen.unwrap() - tokens;
        equal(record.tokens_per_second, seen as f64 / (steps * STEP));
        equal(record.steps_per_second.unwrap(), 1.0 / STEP);
        equal(
            record.elapsed_seconds.unwrap(),
            record.step as f64 * (STEP + PAUSE),
        );
        let phases = record.device_phase_seconds.unwrap();
        assert_eq!(
            (phases.forward, phases.backward, phases.optimizer),
            (2.0, 4.0, 0.5)
        );
        assert!(record.mfu.is_some_and(|mfu| mfu <= 1.0), "{:?}", record.mfu);
    }
}

#[test]
fn rates_and_times_are_those_of_the_device_when_the_host_is_ahead_of_it() {
    let _alone = alone();
    let _device = serve_cpu_with(|| Box::new(Behind::default()));
    let folder = tempfile::tempdir().unwrap();
    let every_five = TrainingArguments {
        logging_steps: 5.0,
        ..arguments(folder.path())
    };
    // Killed when the steps 6 to 10 are logged.
    let (killed, _) = train(folder.path(), &every_five, "run", 7, &|_| 0.0);
    assert!(killed.is_err());
    let records = metrics(folder.path());
    check(&records[..5], 0, 0);
    let tokens = records[4].tokens_seen.unwrap();

    let resumed = TrainingArguments {
        resume_from_checkpoint: latest(),
        ..every_five
    };
    let (summary, _) = train_whole(folder.path(), &resumed, "run");
    let summary = summary.unwrap();
    let records = metrics(folder.path());
    assert_eq!(records.len(), 12);
    check(&records[5..], 5, tokens);
    equal(summary.step_seconds, 7.0 * STEP);
    equal(
        summary.tokens_per_second(),
        summary.tokens as f64 / (7.0 * STEP),
    );
    // The device has never waited for a batch.
    assert_eq!(summary.data_loading.unwrap().share, 0.0);
}
