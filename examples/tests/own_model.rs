//! The example `own_model`: a killed and resumed run equals an uninterrupted one, with one process and with two.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use overdrive::distributed::Launch;
use overdrive::safetensors::MappedFile;
use overdrive::snapshot::Snapshot;
use overdrive::tracking::read_metrics;
use rustix::process::{Pid, Signal, kill_process};

/// The program, which Cargo builds with the tests of this package.
fn program() -> PathBuf {
    let here = std::env::current_exe().unwrap();
    let target = here.parent().and_then(Path::parent).unwrap();
    let program = target.join("examples/own_model");
    assert!(
        program.is_file(),
        "build it: cargo build -p overdrive-examples --examples"
    );
    program
}

/// Starts the program in `out` with `processes` processes, each of which writes its process id to a file.
fn launch(out: &Path, processes: usize, steps: usize) -> Launch {
    let script = "echo $$ > \"$0-pid-$RANK\"; exec \"$@\"";
    Launch::new("sh")
        .args(["-c", script])
        .args([out, &program(), Path::new("--out"), out])
        .args(["--steps", &steps.to_string(), "--save-steps", "7"])
        .args(["--resume-from-checkpoint", "true"])
        .env("OMP_NUM_THREADS", "1")
        .nproc(processes)
}

fn losses(out: &Path) -> Vec<(u64, f64)> {
    let records = read_metrics(out.join("metrics.jsonl")).unwrap().records;
    records.iter().map(|step| (step.step, step.loss)).collect()
}

fn lines(out: &Path) -> usize {
    let text = fs::read(out.join("metrics.jsonl")).unwrap_or_default();
    text.iter().filter(|&&byte| byte == b'\n').count()
}

fn pid(out: &Path, rank: usize) -> Pid {
    let file = format!("{}-pid-{rank}", out.display());
    let number = fs::read_to_string(file).unwrap();
    Pid::from_raw(number.trim().parse().unwrap()).unwrap()
}

/// Kills all processes of a run once it has a number of lines of metrics.
fn run_and_kill(out: &Path, processes: usize, at: usize) {
    std::thread::scope(|scope| {
        let killer = scope.spawn(|| {
            let begun = Instant::now();
            while lines(out) < at {
                assert!(begun.elapsed() < Duration::from_secs(120), "it hangs");
                std::thread::sleep(Duration::from_micros(200));
            }
            for rank in 0..processes {
                // The others may have ended already, for want of the first.
                let _ = kill_process(pid(out, rank), Signal::KILL);
            }
        });
        // It would never end by itself, however late the kill comes.
        let ended = launch(out, processes, 1_000_000)
            .grace(Duration::from_millis(500))
            .run();
        killer.join().unwrap();
        assert!(ended.is_err(), "it was killed");
    });
}

fn equal_snapshots(one: &Path, other: &Path, steps: usize) {
    let tensors = |out: &Path, part: &str| {
        let snapshot = Snapshot::open(out.join(format!("checkpoint-{steps}"))).unwrap();
        MappedFile::open(snapshot.path().join(format!("{part}.safetensors"))).unwrap()
    };
    for part in ["model", "ema", "optimizer"] {
        let (one, other) = (tensors(one, part), tensors(other, part));
        for tensor in one.tensors() {
            let other = other.tensor(tensor.name()).unwrap();
            assert_eq!(tensor.data(), other.data(), "{part}: {}", tensor.name());
        }
    }
}

#[test]
fn a_run_that_is_killed_and_resumed_is_bit_equal_to_one_that_never_stopped() {
    for processes in [1, 2] {
        let dir = tempfile::tempdir().unwrap();
        let (whole, killed) = (dir.path().join("whole"), dir.path().join("killed"));
        for further in [9, 8] {
            run_and_kill(&killed, processes, lines(&killed) + further);
        }
        // The learning rate is constant, so the number of steps need not be known before.
        let steps = lines(&killed) + 10;
        launch(&killed, processes, steps).run().unwrap();
        launch(&whole, processes, steps).run().unwrap();
        assert_eq!(losses(&whole).len(), steps);
        assert_eq!(losses(&killed), losses(&whole), "{processes} processes");
        equal_snapshots(&killed, &whole, steps);
    }
}

#[test]
fn without_an_interval_only_the_last_step_is_saved() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let output = Command::new(program())
        .args([Path::new("--out"), &out])
        .args(["--steps", "3", "--save-steps", "0"])
        .env("OMP_NUM_THREADS", "1")
        .output()
        .unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{said}");
    let saved = Snapshot::list(&out).unwrap();
    assert_eq!(saved.iter().map(Snapshot::step).collect::<Vec<_>>(), [3]);
}

/// Changes a byte of the weights of a snapshot.
fn damage(out: &Path, step: usize) {
    let path = out.join(format!("checkpoint-{step}/model.safetensors"));
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
}

#[test]
fn a_damaged_snapshot_is_reported_and_without_a_complete_one_the_program_fails() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let run = |steps: usize, selection: &str| {
        let output = Command::new(program())
            .args([Path::new("--out"), &out])
            .args(["--steps", &steps.to_string(), "--save-steps", "2"])
            .args(["--resume-from-checkpoint", "true"])
            .env("OMP_NUM_THREADS", "1")
            .env("RUST_LOG", selection)
            .output()
            .unwrap();
        // Without the lines of the run.
        let said = String::from_utf8(output.stderr).unwrap();
        let said = said
            .lines()
            .filter(|line| line.contains("WARN ") || line.starts_with("error"));
        let said: String = said.map(|line| format!("{line}\n")).collect();
        (output.status.code(), said)
    };
    let (code, said) = run(4, "");
    assert_eq!((code, said.as_str()), (Some(0), ""));
    let whole = losses(&out);

    damage(&out, 4);
    let (code, said) = run(4, "");
    assert_eq!(code, Some(0), "{said}");
    for part in [
        "WARN ",
        "checkpoint-4 is damaged (model.safetensors: its bytes were changed) and is skipped",
        "the newest complete snapshot is ",
        "checkpoint-2\n",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert_eq!(losses(&out), whole);

    damage(&out, 4);
    let (code, said) = run(4, "error");
    assert_eq!((code, said.as_str()), (Some(0), ""));

    damage(&out, 2);
    damage(&out, 4);
    let metrics = fs::read(out.join("metrics.jsonl")).unwrap();
    let (code, said) = run(6, "");
    assert_eq!(code, Some(1), "{said}");
    assert!(
        said.starts_with("error: no snapshot in ") && said.contains("checkpoint-2 ("),
        "{said}"
    );
    assert_eq!(fs::read(out.join("metrics.jsonl")).unwrap(), metrics);
}
