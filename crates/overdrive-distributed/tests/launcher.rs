#![allow(clippy::unwrap_used, reason = "a test may panic")]
//! Signals to a launcher, and its exit code. A test target of its own, because it waits for processes by
//! the clock, and its ranks register signal handlers.

#[path = "it/common.rs"]
mod common;

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{scenario, worker_arguments};
use overdrive_distributed::{Error, Launch, LaunchOutcome};

/// The program of a rank; the file that it writes tells the test that it runs, and whether it saved.
#[test]
fn worker() {
    let Some(scenario) = scenario() else { return };
    let rank: usize = std::env::var("RANK").unwrap().parse().unwrap();
    let terminated = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(signal_hook::consts::SIGTERM, Arc::clone(&terminated)).unwrap();
    common::write_as(rank, "running");
    let wait = || {
        let start = Instant::now();
        while !terminated.load(Ordering::SeqCst) {
            assert!(
                start.elapsed() < Duration::from_secs(30),
                "no SIGTERM arrived"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    match scenario.as_str() {
        "saves" => {
            wait();
            common::write_as(rank, "saved");
            std::process::exit(75);
        }
        // The ranks end at different moments, and one of them had nothing to save.
        "one_saves" => {
            wait();
            std::thread::sleep(Duration::from_millis(300 * rank as u64));
            std::process::exit(if rank == 0 { 75 } else { 0 });
        }
        "fails_to_save" => {
            wait();
            std::process::exit(if rank == 0 { 75 } else { 3 });
        }
        "stubborn" => std::thread::sleep(Duration::from_secs(60)),
        other => panic!("no scenario {other}"),
    }
}

struct Started {
    folder: tempfile::TempDir,
    launch: Launch,
    stop: Arc<AtomicBool>,
    kill: Arc<AtomicBool>,
}

fn start(scenario: &str) -> Started {
    let folder = tempfile::tempdir().unwrap();
    let (stop, kill) = (Arc::default(), Arc::default());
    let launch = Launch::new(std::env::current_exe().unwrap())
        .args(worker_arguments(module_path!()))
        .nproc(2)
        .stop_when(Arc::clone(&stop))
        .kill_when(Arc::clone(&kill))
        .env("OD_SCENARIO", scenario)
        .env("OD_FOLDER", folder.path());
    Started {
        folder,
        launch,
        stop,
        kill,
    }
}

fn wait_for(folder: &std::path::Path) {
    let start = Instant::now();
    while !(0..2).all(|rank| folder.join(rank.to_string()).is_file()) {
        assert!(
            start.elapsed() < Duration::from_secs(30),
            "the ranks do not start"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Runs the launch and sets the flags once both ranks run.
fn stopped(
    started: &Started,
    flags: &[&AtomicBool],
) -> overdrive_distributed::Result<LaunchOutcome> {
    std::thread::scope(|scope| {
        let running = scope.spawn(|| started.launch.run());
        wait_for(started.folder.path());
        for flag in flags {
            flag.store(true, Ordering::SeqCst);
        }
        running.join().unwrap()
    })
}

#[test]
fn a_stopped_launch_lets_the_ranks_save_and_returns_saved() {
    let started = start("saves");
    assert_eq!(
        stopped(&started, &[&started.stop]).unwrap(),
        LaunchOutcome::Saved
    );
    for rank in ["0", "1"] {
        let text = std::fs::read_to_string(started.folder.path().join(rank)).unwrap();
        assert_eq!(text, "saved");
    }
}

#[test]
fn one_rank_that_saved_is_enough() {
    let started = start("one_saves");
    assert_eq!(
        stopped(&started, &[&started.stop]).unwrap(),
        LaunchOutcome::Saved
    );
}

#[test]
fn a_rank_that_fails_to_save_is_named() {
    let started = start("fails_to_save");
    let error = stopped(&started, &[&started.stop]).unwrap_err();
    let Error::Launched { rank, status, .. } = &error else {
        panic!("{error}")
    };
    assert_eq!((*rank, status.as_str()), (1, "exit status: 3"));
}

#[test]
fn ranks_that_do_not_end_in_their_grace_time_are_killed() {
    let mut started = start("stubborn");
    started.launch = started.launch.stop_grace(Duration::from_millis(500));
    let begun = Instant::now();
    let error = stopped(&started, &[&started.stop]).unwrap_err();
    assert!(error.to_string().contains("signal: 9"), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(30));
}

#[test]
fn a_second_signal_kills_all_ranks_at_once() {
    let started = start("stubborn");
    let begun = Instant::now();
    let error = stopped(&started, &[&started.stop, &started.kill]).unwrap_err();
    assert!(error.to_string().contains("signal: 9"), "{error}");
    assert!(
        begun.elapsed() < Duration::from_secs(25),
        "it did not wait for the grace time"
    );
}

/// The path of the launcher example, which cargo builds with the tests.
fn launcher() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let examples = test.parent().unwrap().parent().unwrap().join("examples");
    let path = examples.join("launch");
    assert!(
        path.is_file(),
        "cargo builds {} with the tests",
        path.display()
    );
    path
}

#[test]
fn the_launcher_forwards_sigterm_and_ctrl_c_and_exits_with_75() {
    use rustix::process::{Pid, Signal, kill_process};
    for signal in [Signal::TERM, Signal::INT] {
        let folder = tempfile::tempdir().unwrap();
        let mut child = Command::new(launcher())
            .args(["--nproc", "2"])
            .arg(std::env::current_exe().unwrap())
            .args(worker_arguments(module_path!()))
            .env("OD_SCENARIO", "saves")
            .env("OD_FOLDER", folder.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        wait_for(folder.path());
        kill_process(Pid::from_child(&child), signal).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(75));
    }
}
