//! Every system call of a save, and of a resume, fails in turn.
//! It is a program of its own, since it starts itself again under a preloaded library.
#![cfg(all(target_os = "linux", target_env = "gnu"))]
#![allow(
    clippy::unwrap_used,
    reason = "tests and their helpers fail by panicking"
)]

mod common;
#[path = "../../../faults/mod.rs"]
mod faults;

use std::path::{Path, PathBuf};

use common::{failures, litter, open, steps};
use faults::{Case, Fault, Faults, contents, killed_at_every_call, under_injection};
use overdrive_optim::{AdamW, AdamWConfig, decay_groups};
use overdrive_snapshot::{RunState, SnapshotManager, SnapshotOptions};
use tch::{Device, Kind, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);
const LAST_STEP: u64 = 8;

/// A small training run with everything that a snapshot keeps: weights, moments, random states, a counter.
struct Run {
    weight: Tensor,
    optimizer: AdamW,
    steps: u64,
}

impl Run {
    fn new() -> Self {
        tch::manual_seed(5);
        let weight = Tensor::zeros([3, 4], F32).set_requires_grad(true);
        let groups = decay_groups([("weight".to_owned(), weight.shallow_clone())], 0.1);
        let optimizer = AdamW::new(groups, AdamWConfig::default()).unwrap();
        Self {
            weight,
            optimizer,
            steps: 0,
        }
    }

    fn train_to(&mut self, step: u64) {
        use overdrive_optim::Optimizer;
        while self.steps < step {
            let noise = Tensor::randn([3, 4], F32);
            (&self.weight - noise).square().mean(Kind::Float).backward();
            self.optimizer.step().unwrap();
            self.optimizer.zero_grad().unwrap();
            self.steps += 1;
        }
    }

    fn state(&mut self) -> RunState<'_> {
        let named = [("weight".to_owned(), self.weight.shallow_clone())];
        RunState::new()
            .tensors("model", named)
            .register("optimizer", &mut self.optimizer)
            .value("steps", &mut self.steps)
            .random_states()
    }

    /// Trains to the last step and returns the weights there.
    fn end(mut self) -> Vec<f32> {
        self.train_to(LAST_STEP);
        Vec::try_from(self.weight.detach().flatten(0, -1)).unwrap()
    }
}

/// Opens the folder of a run that keeps two snapshots, which are written before `save` returns.
fn manager(folder: &Path) -> SnapshotManager {
    let options = SnapshotOptions {
        total_limit: Some(2),
        background: false,
        ..SnapshotOptions::default()
    };
    SnapshotManager::open(folder, options).unwrap()
}

fn save(manager: &mut SnapshotManager, run: &mut Run) -> bool {
    let step = run.steps;
    manager.save_state(step, None, run.state()).unwrap();
    failures(manager.outcomes().unwrap()).is_empty()
}

/// Trains to step 6 with snapshots of the steps 2, 4 and 6.
fn first_steps(folder: &Path) -> (SnapshotManager, Run) {
    let (mut manager, mut run) = (manager(folder), Run::new());
    for step in [2, 4, 6] {
        run.train_to(step);
        if step < 6 {
            assert!(save(&mut manager, &mut run));
        }
    }
    (manager, run)
}

type Files = Vec<(PathBuf, Vec<u8>)>;

/// Returns the weights at the last step and the files of the snapshots of a run that nothing disturbs.
fn undisturbed(folder: &Path) -> (Vec<f32>, Files) {
    let (mut manager, mut run) = first_steps(folder);
    assert!(save(&mut manager, &mut run));
    (run.end(), snapshots(folder))
}

/// Returns the files of all snapshots with their bytes.
fn snapshots(folder: &Path) -> Files {
    let mut files = contents(folder, &[]);
    files.retain(|(name, _)| name.to_string_lossy().starts_with("checkpoint-"));
    files
}

fn save_with_a_fault(faults: &Faults, case: &Case, (end, files): &(Vec<f32>, Files)) {
    let (mut writer, mut run) = first_steps(&case.folder);
    let (saved, call) = faults.during(case, || save(&mut writer, &mut run));
    let place = format!("{case:?}, {call:?}");
    if call.is_none() || case.fault == Fault::Short {
        assert!(saved, "{place}");
    }
    // The run itself goes on as if nothing had happened.
    assert_eq!(&run.end(), end, "{place}");
    drop(writer);

    starts_again(&case.folder, saved, &place, (end, files));
}

/// A run that starts again finds a whole snapshot: the new one if its save succeeded. It trains on, and saves what
/// the first one could not, byte for byte.
fn starts_again(folder: &Path, saved: bool, place: &str, (end, files): (&Vec<f32>, &Files)) {
    let mut writer = manager(folder);
    assert_eq!(litter(folder), [""; 0], "{place}");
    let latest = writer.latest().unwrap().unwrap();
    assert!(
        latest.step() == 6 || (latest.step() == 4 && !saved),
        "{place}: step {}",
        latest.step()
    );
    let mut resumed = Run::new();
    writer.load_state(&latest, resumed.state()).unwrap();
    assert_eq!(resumed.steps, latest.step(), "{place}");
    resumed.train_to(6);
    assert!(save(&mut writer, &mut resumed), "{place}");
    assert_eq!(steps(&writer), [6, 4], "{place}");
    assert!(&snapshots(folder) == files, "{place}: other bytes");
    assert_eq!(&resumed.end(), end, "{place}");
}

#[test]
fn a_run_survives_a_fault_in_every_call_of_a_save_and_resumes_bit_equal() {
    let name = "a_run_survives_a_fault_in_every_call_of_a_save_and_resumes_bit_equal";
    under_injection(name, |faults| {
        let reference = undisturbed(&faults.folder().join("reference"));
        for fault in Fault::ALL {
            let calls =
                faults.every_call(fault, |case| save_with_a_fault(faults, case, &reference));
            // Fewer would mean that the library does not see them.
            assert!(calls > 10, "{fault:?}: only {calls} calls");
        }
    });
}

#[test]
fn a_resume_with_a_fault_fails_or_is_bit_equal() {
    under_injection("a_resume_with_a_fault_fails_or_is_bit_equal", |faults| {
        let (end, _) = undisturbed(&faults.folder().join("reference"));
        for fault in [Fault::Error, Fault::Short] {
            let calls = faults.every_call(fault, |case| {
                let (mut writer, mut run) = first_steps(&case.folder);
                assert!(save(&mut writer, &mut run));
                drop(writer);
                let mut resumed = Run::new();
                let (result, call) = faults.during(case, || {
                    let options = SnapshotOptions::default();
                    let manager = SnapshotManager::open(&case.folder, options)?;
                    let latest = manager.latest()?.expect("three were written");
                    manager.load_state(&latest, resumed.state())
                });
                if call.is_none() || fault == Fault::Short {
                    assert!(result.is_ok(), "{case:?}, {call:?}: {result:?}");
                }
                if result.is_ok() {
                    assert_eq!(resumed.steps, 6, "{case:?}, {call:?}: an older snapshot");
                    assert_eq!(resumed.end(), end, "{case:?}, {call:?}");
                }
                // Nothing was harmed.
                assert_eq!(steps(&open(&case.folder, Some(2), None)), [6, 4]);
            });
            assert!(calls > 10, "{fault:?}: only {calls} calls");
        }
    });
}

#[test]
#[ignore = "a process for each call: cargo xtask faults"]
fn a_run_that_is_killed_at_any_call_of_a_resume_or_a_save_resumes_bit_equal() {
    let dir = tempfile::tempdir().unwrap();
    let (end, files) = undisturbed(dir.path());
    let killed = killed_at_every_call(
        "a_run_that_is_killed_at_any_call_of_a_resume_or_a_save_resumes_bit_equal",
        |folder| {
            let mut writer = manager(folder);
            let mut resumed = Run::new();
            let latest = writer.latest().unwrap().unwrap();
            writer.load_state(&latest, resumed.state()).unwrap();
            resumed.train_to(6);
            assert!(save(&mut writer, &mut resumed));
        },
        |folder| drop(first_steps(folder)),
        |folder, ended| {
            let place = folder.display().to_string();
            starts_again(folder, ended, &place, (&end, &files));
        },
    );
    // 0 in the process that is killed.
    assert!(killed == 0 || killed > 20, "only {killed} calls");
}
