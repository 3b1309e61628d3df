//! Metrics written to a file and read back, whole and damaged.

use std::fs;
use std::path::PathBuf;

use overdrive_profiling::{
    GpuSample, LoaderMetrics, LoaderTotals, MemoryUsage, Phase, PhaseSeconds, StepRecorder,
    StepRecorderConfig, StepWork,
};
use overdrive_tracking::{
    Error, JsonLines, StepMetrics, TensorBoard, Tracker, Trackers, read_metrics,
};
use proptest::prelude::*;
use tempfile::TempDir;

fn step(step: u64) -> StepMetrics {
    StepMetrics {
        step,
        loss: 8.3 / step as f64,
        learning_rate: 1e-3,
        tokens_per_second: 2311.5,
        peak_memory_bytes: 812 << 20,
        ..Default::default()
    }
}

fn file() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("new/metrics.jsonl");
    (folder, path)
}

fn memory() -> MemoryUsage {
    serde_json::from_str(r#"{"allocated_bytes":1024,"peak_resident_bytes":4096}"#).expect("memory")
}

fn loader() -> LoaderMetrics {
    LoaderMetrics {
        batches: 4,
        wait_seconds: 0.5,
        queue_depth: 1.5,
        failed_records: 0,
    }
}

fn gpu() -> GpuSample {
    serde_json::from_str(r#"{"utilization":0.93,"power_watts":512.5}"#).expect("GPU")
}

#[test]
fn a_line_has_the_promised_keys_and_leaves_absent_ones_out() {
    let line = step(1).to_json_line().expect("JSON");
    assert_eq!(
        line,
        r#"{"step":1,"loss":8.3,"learning_rate":0.001,"tokens_per_second":2311.5,"peak_memory_bytes":851443712}"#
    );
}

#[test]
fn numbers_that_are_not_finite_stay_valid_json_and_read_back_as_nan() {
    let metrics = StepMetrics {
        loss: f64::INFINITY,
        grad_norm: Some(f64::NAN),
        eval_loss: None,
        ..step(1)
    };
    let line = metrics.to_json_line().expect("JSON");
    let value: serde_json::Value = serde_json::from_str(&line).expect("valid JSON");
    assert!(
        value["loss"].is_null() && value["grad_norm"].is_null(),
        "{line}"
    );
    let again: StepMetrics = serde_json::from_str(&line).expect("reads back");
    assert!(again.loss.is_nan() && again.grad_norm.expect("there").is_nan());
    assert_eq!(again.eval_loss, None);
    assert!(metrics.scalars().iter().all(|(_, value)| value.is_finite()));
}

#[test]
fn records_come_back_as_they_were_written() {
    let (_folder, path) = file();
    let full = StepMetrics {
        epoch: Some(0.25),
        grad_norm: Some(1.5),
        loss_scale: Some(65536.0),
        tokens_seen: Some(4096),
        elapsed_seconds: Some(1.75),
        mfu: Some(0.41),
        eval_loss: Some(4.5),
        eval_bits_per_byte: Some(2.0),
        phase_seconds: Some(PhaseSeconds {
            forward: 0.5,
            ..Default::default()
        }),
        device_phase_seconds: Some(PhaseSeconds {
            host_to_device: 0.125,
            ..Default::default()
        }),
        samples_per_second: Some(8.0),
        steps_per_second: Some(2.0),
        memory: Some(memory()),
        gpu: Some(gpu()),
        loader: Some(loader()),
        padding: Some(0.25),
        extra: [("gpu_utilization".to_owned(), 0.93.into())].into(),
        ..step(2)
    };
    let records = [step(1), full];
    let mut tracker = JsonLines::create(&path).expect("create");
    for record in &records {
        tracker.log(record).expect("log");
    }
    tracker.finish().expect("finish");
    let read = read_metrics(&path).expect("read");
    assert_eq!(read.records, records);
    assert_eq!(read.truncated, None);
}

#[test]
fn a_cut_off_last_line_is_told_and_not_an_error() {
    let (_folder, path) = file();
    JsonLines::create(&path)
        .expect("create")
        .log(&step(1))
        .expect("log");
    let mut text = fs::read_to_string(&path).expect("read");
    text.push_str(r#"{"step":2,"lo"#);
    fs::write(&path, text).expect("write");
    let read = read_metrics(&path).expect("tolerant");
    assert_eq!(read.records, [step(1)]);
    assert_eq!(read.truncated.as_deref(), Some(r#"{"step":2,"lo"#));
}

#[test]
fn a_line_in_the_middle_that_is_no_record_is_skipped_with_its_number() {
    let (_folder, path) = file();
    JsonLines::create(&path)
        .expect("create")
        .log(&step(1))
        .expect("log");
    let good = fs::read_to_string(&path).expect("read");
    fs::write(&path, format!("{good}\n{{\"step\":2}}\n{good}")).expect("write");
    let read = read_metrics(&path).expect("line 3 has no loss");
    assert_eq!(read.records, [step(1), step(1)]);
    assert_eq!((read.skipped_lines, read.truncated), (vec![3], None));
}

#[test]
fn going_on_after_a_cut_off_line_removes_it() {
    let (_folder, path) = file();
    JsonLines::append(&path)
        .expect("starts the file")
        .log(&step(1))
        .expect("log");
    let mut text = fs::read_to_string(&path).expect("read");
    text.push_str(r#"{"step":2,"lo"#);
    fs::write(&path, text).expect("write");
    JsonLines::append(&path)
        .expect("append")
        .log(&step(2))
        .expect("log");
    assert_eq!(
        read_metrics(&path).expect("whole").records,
        [step(1), step(2)]
    );
}

#[test]
fn going_on_after_a_whole_line_without_its_break_keeps_it() {
    let (_folder, path) = file();
    JsonLines::append(&path)
        .expect("append")
        .log(&step(1))
        .expect("log");
    let text = fs::read_to_string(&path).expect("read");
    fs::write(&path, text.trim_end()).expect("write");
    JsonLines::append(&path)
        .expect("append")
        .log(&step(2))
        .expect("log");
    assert_eq!(
        read_metrics(&path).expect("whole").records,
        [step(1), step(2)]
    );
}

#[test]
fn creating_empties_the_file_and_appending_keeps_it() {
    let (_folder, path) = file();
    JsonLines::create(&path)
        .expect("create")
        .log(&step(1))
        .expect("log");
    JsonLines::append(&path)
        .expect("append")
        .log(&step(2))
        .expect("log");
    assert_eq!(read_metrics(&path).expect("read").records.len(), 2);
    JsonLines::create(&path).expect("create");
    assert_eq!(read_metrics(&path).expect("read").records.len(), 0);
}

#[test]
fn a_file_that_is_not_there_is_an_error_with_its_path() {
    let error = read_metrics("/nowhere/metrics.jsonl").expect_err("not there");
    assert!(
        error
            .to_string()
            .starts_with("cannot read /nowhere/metrics.jsonl: "),
        "{error}"
    );
}

/// Keeps the steps it was given; fails on each where `broken`.
struct Fake {
    steps: std::sync::Arc<std::sync::Mutex<Vec<u64>>>,
    broken: bool,
}

impl Tracker for Fake {
    fn log(&mut self, metrics: &StepMetrics) -> overdrive_tracking::Result<()> {
        self.steps.lock().expect("lock").push(metrics.step);
        if self.broken {
            read_metrics("/nowhere/at-all").map(|_| ())
        } else {
            Ok(())
        }
    }

    fn finish(&mut self) -> overdrive_tracking::Result<()> {
        Ok(())
    }
}

#[test]
fn every_tracker_gets_the_record_also_after_one_that_fails() {
    let steps = std::sync::Arc::default();
    let fake = |broken| Fake {
        steps: std::sync::Arc::clone(&steps),
        broken,
    };
    let mut trackers = Trackers::new()
        .with(fake(false))
        .with(fake(true))
        .with(fake(false));
    assert_eq!(trackers.len(), 3);
    let error = trackers
        .log(&step(5))
        .expect_err("the second one is broken");
    assert!(error.to_string().contains("/nowhere/at-all"), "{error}");
    assert_eq!(*steps.lock().expect("lock"), [5, 5, 5]);
    trackers.finish().expect("finish");
}

#[test]
fn the_scalars_have_hugging_faces_names() {
    let metrics = StepMetrics {
        eval_loss: Some(4.5),
        eval_bits_per_byte: Some(2.0),
        grad_norm: Some(1.0),
        phase_seconds: Some(PhaseSeconds::default()),
        extra: [
            ("eval_accuracy".to_owned(), 0.5.into()),
            ("note".to_owned(), "text".into()),
        ]
        .into(),
        ..step(1)
    };
    let tags: Vec<_> = metrics.scalars().into_iter().map(|(tag, _)| tag).collect();
    assert_eq!(
        tags,
        [
            "train/loss",
            "train/learning_rate",
            "train/tokens_per_second",
            "train/peak_memory_bytes",
            "train/grad_norm",
            "eval/loss",
            "eval/bits_per_byte",
            "time/data_seconds",
            "time/forward_seconds",
            "time/backward_seconds",
            "time/optimizer_seconds",
            "time/other_seconds",
            "eval/accuracy",
        ]
    );
}

#[test]
fn measurements_of_the_machine_become_scalars_of_their_own_groups() {
    let metrics = StepMetrics {
        samples_per_second: Some(8.0),
        steps_per_second: Some(2.0),
        device_phase_seconds: Some(PhaseSeconds {
            host_to_device: 0.125,
            ..Default::default()
        }),
        memory: Some(memory()),
        gpu: Some(gpu()),
        loader: Some(loader()),
        padding: Some(0.25),
        ..step(1)
    };
    let scalars: std::collections::BTreeMap<_, _> = metrics.scalars().into_iter().collect();
    for (tag, value) in [
        ("train/samples_per_second", 8.0),
        ("train/steps_per_second", 2.0),
        ("device_time/host_to_device_seconds", 0.125),
        ("memory/allocated_bytes", 1024.0),
        ("memory/peak_resident_bytes", 4096.0),
        ("gpu/utilization", 0.93),
        ("data/wait_seconds", 0.5),
        ("data/queue_depth", 1.5),
        ("train/padding", 0.25),
        ("gpu/power_watts", 512.5),
    ] {
        assert_eq!(scalars.get(tag), Some(&value), "{tag}");
    }
    for absent in [
        "gpu/temperature_celsius",
        "memory/reserved_bytes",
        "time/data_seconds",
    ] {
        assert!(!scalars.contains_key(absent), "{absent}");
    }
}

#[test]
fn trackers_work_behind_threads() {
    let (folder, path) = file();
    let trackers = Trackers::new()
        .with(JsonLines::create(&path).expect("create"))
        .with(TensorBoard::create(folder.path()).expect("create"));
    let log = std::thread::spawn(move || {
        let mut trackers = trackers;
        trackers.log(&step(1))
    });
    log.join().expect("no panic").expect("logged");
}

fn finite() -> impl Strategy<Value = f64> {
    prop::num::f64::NORMAL | prop::num::f64::ZERO
}

proptest! {
    #[test]
    fn any_record_survives_its_line(
        step in any::<u64>(),
        loss in finite(),
        learning_rate in finite(),
        tokens_per_second in finite(),
        peak_memory_bytes in any::<u64>(),
        eval_loss in prop::option::of(finite()),
        tokens_seen in prop::option::of(any::<u64>()),
        forward in prop::option::of(finite()),
    ) {
        let metrics = StepMetrics {
            step, loss, learning_rate, tokens_per_second, peak_memory_bytes, eval_loss, tokens_seen,
            phase_seconds: forward.map(|forward| PhaseSeconds { forward, ..Default::default() }),
            ..Default::default()
        };
        let line = metrics.to_json_line().expect("JSON");
        prop_assert!(!line.contains('\n'));
        let again: StepMetrics = serde_json::from_str(&line).expect("reads back");
        prop_assert_eq!(again, metrics);
    }

    #[test]
    fn a_file_cut_anywhere_reads_as_its_whole_lines(steps in 1_u64..6, cut in any::<prop::sample::Index>()) {
        let (_folder, path) = file();
        let mut tracker = JsonLines::create(&path).expect("create");
        for number in 1..=steps {
            tracker.log(&step(number)).expect("log");
        }
        let bytes = fs::read(&path).expect("read");
        let cut = cut.index(bytes.len() + 1);
        fs::write(&path, &bytes[..cut]).expect("write");
        let whole = bytes[..cut].iter().filter(|&&byte| byte == b'\n').count();
        let read = read_metrics(&path).expect("tolerant");
        // A line that lacks only its break is whole too.
        let records = read.records.len();
        prop_assert!(records == whole || (records == whole + 1 && read.truncated.is_none()));
        prop_assert_eq!(&read.records[..], &(1..=records as u64).map(step).collect::<Vec<_>>()[..]);
    }
}

#[test]
fn a_record_fills_the_metrics_of_its_step_and_leaves_the_rest() {
    let mut recorder = StepRecorder::new(StepRecorderConfig::default()).unwrap();
    recorder.begin_step();
    recorder.phase(Phase::Forward, || {
        std::thread::sleep(std::time::Duration::from_millis(1));
    });
    recorder.loader(LoaderTotals {
        batches: 3,
        ready: 3,
        ..LoaderTotals::default()
    });
    let work = StepWork {
        tokens: 1000,
        samples: 10,
    };
    recorder.end_step(work);
    let record = recorder.finish().unwrap().remove(0);
    let mut metrics = StepMetrics {
        step: 7,
        loss: 2.5,
        ..Default::default()
    };
    metrics.apply(&record);
    assert_eq!((metrics.step, metrics.loss), (7, 2.5));
    assert_eq!(metrics.phase_seconds, Some(record.phases));
    assert_eq!(metrics.memory, Some(record.memory));
    assert_eq!((metrics.mfu, metrics.gpu), (None, None));
    assert!(metrics.samples_per_second.is_some());
    assert!(metrics.loader.is_some());
    assert_eq!(metrics.loader, record.loader);
    assert!(
        recorder.gpu_unavailable().is_none(),
        "a CPU has no GPU to miss"
    );
}

/// A tracker that fails for the steps in a range.
struct FailsFor(std::ops::Range<u64>);

impl Tracker for FailsFor {
    fn log(&mut self, metrics: &StepMetrics) -> overdrive_tracking::Result<()> {
        match self.0.contains(&metrics.step) {
            true => Err(Error::Tracker {
                tracker: "service".to_owned(),
                source: "it is down".into(),
            }),
            false => Ok(()),
        }
    }

    fn finish(&mut self) -> overdrive_tracking::Result<()> {
        Ok(())
    }
}

#[test]
fn a_failing_tracker_is_told_once_and_once_more_when_it_works_again() {
    let (_folder, path) = file();
    let mut trackers = Trackers::new()
        .with(FailsFor(3..6))
        .with(JsonLines::create(&path).expect("create"));
    let lines: Vec<_> = (1..=8)
        .map(|number| trackers.log_or_warn(&step(number)))
        .collect();
    let told: Vec<_> = lines.iter().flatten().collect();
    assert_eq!(told.len(), 2, "{told:?}");
    let first = lines[2].as_ref().expect("step 3 fails first");
    assert!(
        first.contains("step 3") && first.contains("it is down") && first.contains("continues"),
        "{first}"
    );
    let again = lines[5].as_ref().expect("step 6 works again");
    assert!(again.contains("again from step 6 on"), "{again}");
    // The other trackers get every step.
    assert_eq!(read_metrics(&path).expect("read").records.len(), 8);
}

#[test]
fn a_line_that_was_cut_within_a_character_does_not_keep_a_run_from_resuming() {
    let (_folder, path) = file();
    let mut tracker = JsonLines::create(&path).expect("create");
    for number in 1..=3 {
        tracker.log(&step(number)).expect("log");
    }
    drop(tracker);
    let whole = fs::read(&path).expect("read");
    // The first byte of "ä", whose second one found no room.
    fs::write(&path, [&whole[..], b"{\"step\":4,\"name\":\"\xc3"].concat()).expect("write");
    let mut tracker = JsonLines::resume(&path, 2).expect("resumes");
    tracker.log(&step(3)).expect("log");
    assert_eq!(fs::read(&path).expect("read"), whole);
}

#[test]
fn resuming_keeps_the_lines_that_are_no_records() {
    let (_folder, path) = file();
    JsonLines::create(&path).expect("create");
    let line = |number| step(number).to_json_line().expect("JSON") + "\n";
    let note = "{\"note\":\"restarted by hand\"}\n";
    // A block that was lost in a power failure has zeros.
    let damaged = format!("\0\0\0{}", line(3));
    let lines = [note, &line(1), note, &line(2), &damaged, note];
    fs::write(&path, lines.concat()).expect("write");
    JsonLines::resume(&path, 1).expect("resumes");
    let kept = fs::read_to_string(&path).expect("read");
    assert_eq!(kept, [note, &line(1), note, &damaged, note].concat());
    // The file of a run that has resumed can be read.
    let read = read_metrics(&path).expect("read");
    assert_eq!(read.records, [step(1)]);
    assert_eq!(
        (read.skipped_lines, read.truncated),
        (vec![1, 3, 4, 5], None)
    );
}

#[cfg(unix)]
#[test]
fn lines_at_the_end_are_removed_in_place_which_needs_no_room() {
    use std::os::unix::fs::MetadataExt;
    let (_folder, path) = file();
    let mut tracker = JsonLines::create(&path).expect("create");
    for number in 1..=3 {
        tracker.log(&step(number)).expect("log");
    }
    let inode = || fs::metadata(&path).expect("there").ino();
    let before = inode();
    JsonLines::resume(&path, 1).expect("resumes");
    assert_eq!(inode(), before);
    assert_eq!(read_metrics(&path).expect("read").records, [step(1)]);
}
