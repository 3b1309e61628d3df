//! Runs whose disk is full. A child process has a small file system of its own, which it fills.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use overdrive::snapshot::Snapshot;
use overdrive::tracking::{StepMetrics, Tracker, Trackers};
use overdrive::trainer::{TextData, TrainingArguments};

use crate::alone;
use crate::resume::{arguments, fit_with, losses};

const FOLDER: &str = "OVERDRIVE_FULL_DISK_TEST_FOLDER";
/// The step after which the disk is full, and the one after which it has room again.
const FULL: std::ops::Range<u64> = 4..40;

/// Fills the disk, and makes room again.
struct Filler {
    folder: PathBuf,
}

impl Filler {
    fn lines(&self) -> usize {
        let metrics = fs::read(self.folder.join("run/metrics.jsonl")).unwrap();
        metrics.iter().filter(|&&byte| byte == b'\n').count()
    }
}

impl Tracker for Filler {
    fn log(&mut self, metrics: &StepMetrics) -> overdrive::tracking::Result<()> {
        let path = self.folder.join("filler");
        if metrics.step == FULL.start {
            let mut file = File::create(&path).unwrap();
            while file.write_all(&[0; 4096]).is_ok() {}
        } else if metrics.step == FULL.end {
            // Otherwise the disk was not full, and this test shows nothing.
            assert!(self.lines() < metrics.step as usize);
            fs::remove_file(path).unwrap();
        }
        Ok(())
    }

    fn finish(&mut self) -> overdrive::tracking::Result<()> {
        Ok(())
    }
}

/// The child process.
#[test]
#[ignore = "the other process of the test here"]
fn trains_while_the_disk_is_full() {
    let Some(folder) = std::env::var_os(FOLDER).map(PathBuf::from) else {
        return;
    };
    let _alone = alone();
    // Text and cache are on another disk.
    let elsewhere = tempfile::tempdir().unwrap();
    let arguments = |run: &Path| TrainingArguments {
        max_steps: 50,
        save_steps: 10.0,
        output_dir: Some(run.to_owned()),
        ..arguments(elsewhere.path())
    };
    let cache = elsewhere.path().join("cache");
    let train = |run: &Path, trackers: Trackers| {
        let arguments = arguments(run);
        let data = TextData::prepare_in(&cache, &arguments, |_| {}).unwrap();
        let (ended, _) = fit_with(&data, &arguments, trackers, &|_| 0.0);
        ended.unwrap().0
    };
    train(&elsewhere.path().join("whole"), Trackers::new());
    let filler = Filler {
        folder: folder.clone(),
    };
    let summary = train(&folder.join("run"), Trackers::new().with(filler));

    assert_eq!(summary.losses.len(), 50);
    assert_eq!(losses(&folder, "run"), losses(elsewhere.path(), "whole"));
    for (step, saved) in [
        (10, false),
        (20, false),
        (30, false),
        (40, true),
        (50, true),
    ] {
        let snapshot = folder.join(format!("run/checkpoint-{step}"));
        assert_eq!(snapshot.exists(), saved, "{step}");
        assert!(!saved || Snapshot::open(snapshot).is_ok(), "{step}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_ends_no_run_and_its_metrics_follow_when_there_is_room() {
    let dir = tempfile::tempdir().unwrap();
    let mount = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--mount", "sh", "-c"]);
        command.arg(format!(
            "mount -t tmpfs -o size=24m tmpfs \"${FOLDER}\" && {script}"
        ));
        command.arg("sh").env(FOLDER, dir.path());
        command
    };
    if !mount("true").status().is_ok_and(|status| status.success()) {
        eprintln!("not run: this system lets no user mount a file system");
        return;
    }
    let output = mount("exec \"$@\"")
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "full_disk::trains_while_the_disk_is_full"])
        .args(["--ignored", "--nocapture"])
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, told) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{out}\n{told}");
    assert!(out.contains("1 passed"), "{out}");
    // Each is told once, and not in every step.
    for (line, times) in [
        ("were not recorded", 1),
        ("metrics are recorded again", 1),
        ("no snapshot of step", 3),
    ] {
        assert_eq!(told.matches(line).count(), times, "{line}: {told}");
    }
}

/// A tracker that stores nothing, as on a full disk.
struct Full;

impl Tracker for Full {
    fn log(&mut self, _metrics: &StepMetrics) -> overdrive::tracking::Result<()> {
        self.finish()
    }

    fn finish(&mut self) -> overdrive::tracking::Result<()> {
        let full = std::io::ErrorKind::StorageFull.into();
        Err(overdrive::core::Error::io("append to", "metrics")(full).into())
    }
}

#[test]
fn metrics_that_cannot_be_written_do_not_end_a_run() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let arguments = TrainingArguments {
        output_dir: Some(dir.path().join("run")),
        ..arguments(dir.path())
    };
    let data = TextData::prepare_in(&dir.path().join("cache"), &arguments, |_| {}).unwrap();
    let (ended, _) = fit_with(&data, &arguments, Trackers::new().with(Full), &|_| 0.0);
    let (summary, _) = ended.unwrap();
    assert_eq!(summary.losses.len(), 12);
    assert_eq!(summary.saved_step, Some(12));
    // The other trackers and the snapshots have everything.
    assert_eq!(losses(dir.path(), "run").len(), 12);
    Snapshot::open(dir.path().join("run/checkpoint-12")).unwrap();
}
