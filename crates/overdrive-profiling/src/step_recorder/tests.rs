use std::cell::Cell;

use super::*;
use crate::DevicePhases;
use crate::device_timeline::{DeviceClock, StandInClock, serve_cpu_with};

fn recorder(config: StepRecorderConfig) -> StepRecorder {
    StepRecorder::new(config).expect("a CPU")
}

const MODEL: ModelFlops = ModelFlops {
    parameters: 1000,
    trainable_parameters: 1000,
    layers: 1,
    heads: 1,
    head_dim: 8,
    sequence_length: 16,
};

const SECOND: Duration = Duration::from_secs(1);

/// Moves a recorder's clock instead of sleeping, by `data` and `forward` seconds in these phases of a step.
fn passed(recorder: &mut StepRecorder, data: u32, forward: u32) -> StepRecord {
    recorder.begin_step();
    let pass = |seconds| recorder.timer().advance(seconds * SECOND);
    recorder.phase(Phase::Data, || pass(data));
    recorder.phase(Phase::Forward, || pass(forward));
    recorder.end_step(LAUNCHED);
    let mut records = recorder.take_finished().expect("no device");
    assert_eq!(records.len(), 1);
    records.remove(0)
}

/// A step has 1,000 seconds, so that the time of the tests themselves hardly counts.
#[track_caller]
fn near(a: f64, b: f64) {
    assert!((a / b - 1.0).abs() < 1e-3, "{a} is not about {b}");
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
        let record = passed(&mut recorder, 250, 750);
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
    near(loading.seconds_a_step, 250.0);
    near(loading.share, 0.25);
}

#[test]
fn rates_follow_from_one_another_and_mfu_from_the_model() {
    let mut recorder = recorder(StepRecorderConfig {
        model: Some(MODEL),
        peak_flops: Some(PeakFlops::given(1e9)),
        ..Default::default()
    });
    passed(&mut recorder, 200, 800);
    let record = passed(&mut recorder, 200, 800);
    assert_eq!(record.step, 2);
    near(record.steps_per_second, 1e-3);
    near(record.tokens_per_second, 1.0);
    near(record.samples_per_second, 0.01);
    let mfu = record.mfu.expect("model and peak are known");
    near(mfu, MODEL.per_token() / 1e9);
    assert_eq!(recorder.tokens_seen(), 2000);
}

#[test]
fn mfu_is_over_the_peak_of_all_devices_that_share_the_work() {
    let mut recorder = recorder(StepRecorderConfig {
        model: Some(MODEL),
        peak_flops: Some(PeakFlops::given(1e9)),
        devices: 4,
        ..Default::default()
    });
    let record = passed(&mut recorder, 0, 1000);
    let mfu = record.mfu.expect("model and peak are known");
    near(mfu, MODEL.per_token() / 4e9);
}

#[test]
fn a_peak_measured_too_low_is_raised_and_a_given_one_is_not() {
    for (source, expected) in [
        (PeakSource::Measured { width: 8 }, 1.0),
        (PeakSource::Given, MODEL.per_token()),
    ] {
        let mut recorder = recorder(StepRecorderConfig {
            model: Some(MODEL),
            peak_flops: Some(PeakFlops {
                flops_per_second: 1.0,
                source,
            }),
            ..Default::default()
        });
        let record = passed(&mut recorder, 0, 1000);
        near(record.mfu.expect("both are known"), expected);
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
    /// The step whose end is an error.
    static FAILS: Cell<u64> = const { Cell::new(0) };
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
        if step == FAILS.get() {
            return Err(crate::Error::UnknownPeak {
                device: "cuda:0".to_owned(),
                dtype: "float32".to_owned(),
                message: "on purpose".to_owned(),
            });
        }
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
    FAILS.set(0);
    (guard, recorder(config))
}

#[test]
fn rates_are_those_of_a_device_that_finishes_steps_after_the_host() {
    // The device reaches half of its peak: 1,000 tokens in three seconds.
    let peak = MODEL.per_token() * 1000.0 / 3.0 * 2.0;
    let (_guard, mut recorder) = behind(StepRecorderConfig {
        model: Some(MODEL),
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
    assert!(14.0 * 1000.0 / host * MODEL.per_token() / peak > 1.0);
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
fn after_an_error_of_the_device_nothing_is_measured_and_nothing_is_kept() {
    let (_guard, mut recorder) = behind(StepRecorderConfig::default());
    FAILS.set(2);
    FINISHED.set(u64::MAX);
    assert_eq!(launched(&mut recorder).len(), 1);
    recorder.begin_step();
    recorder.end_step(LAUNCHED);
    let error = recorder.take_finished().expect_err("the device failed");
    assert!(error.to_string().contains("on purpose"), "{error}");
    for _ in 0..3 {
        assert_eq!(launched(&mut recorder), [], "the error comes once");
        assert!(recorder.unfinished.is_empty(), "no call will take them");
    }
    assert_eq!(recorder.tokens_seen(), 1000);
}

#[test]
fn a_window_of_zero_steps_is_one_of_one_step() {
    let (_guard, mut recorder) = behind(StepRecorderConfig {
        window: 0,
        ..Default::default()
    });
    FINISHED.set(u64::MAX);
    launched(&mut recorder);
    recorder.begin_step();
    recorder.phase(Phase::Forward, || ());
    recorder.end_step(StepWork {
        tokens: 60,
        samples: 0,
    });
    let record = recorder.take_finished().expect("no device").remove(0);
    assert_eq!(record.tokens_per_second, 60.0);
}

#[test]
fn loading_that_the_device_does_not_wait_for_is_no_share_of_its_steps() {
    let (_guard, mut recorder) = behind(StepRecorderConfig::default());
    recorder.begin_step();
    recorder.phase(Phase::Data, || recorder.timer().advance(SECOND));
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
    passed(&mut recorder, 3, 1);
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
