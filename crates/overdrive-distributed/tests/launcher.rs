#![allow(clippy::unwrap_used, reason = "a test may panic")]
//! Signals to a launcher, its exit code, and its death. A test target of its own, because it waits for processes by
//! the clock, and its ranks register signal handlers.

#[path = "it/common.rs"]
mod common;

use std::fs::{File, TryLockError};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{scenario, worker_arguments};
use overdrive_distributed::{Error, Launch, RunEnd};

/// The program of a rank; the file that it writes tells the test that it runs, and whether it saved.
#[test]
fn worker() {
    let Some(scenario) = scenario() else { return };
    if scenario == "launcher" {
        return launches();
    }
    let rank: usize = std::env::var("RANK").unwrap().parse().unwrap();
    let folder = PathBuf::from(std::env::var_os("OD_FOLDER").unwrap());
    // Without a handler: SIGTERM ends it at once.
    if scenario == "alone" {
        let _lock = locked(&folder, rank);
        return std::thread::sleep(Duration::from_secs(600));
    }
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
        // One of the ranks could write its last snapshot, the other could not.
        "not_saved" => {
            wait();
            std::process::exit(if rank == 0 { 130 } else { 75 });
        }
        "ports" => {
            let group = common::group(30.0);
            let port = group.rendezvous().master_port;
            // An address that belongs to the loopback interface too: a store that listens on 127.0.0.1 does not
            // answer there, and one that listens on all interfaces does.
            let other = TcpStream::connect((Ipv4Addr::new(127, 0, 0, 2), port));
            let own = TcpStream::connect((Ipv4Addr::LOCALHOST, port));
            common::write(&group, &format!("{} {}", other.is_ok(), own.is_ok()));
            group.barrier().unwrap();
        }
        "orphan" => {
            // As on a system without the signal of a lost parent.
            #[cfg(target_os = "linux")]
            rustix::process::set_parent_process_death_signal(None).unwrap();
            let group = common::group(600.0);
            let _lock = locked(&folder, rank);
            while !terminated.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(5));
            }
            std::fs::write(folder.join(format!("terminated-{rank}")), "").unwrap();
            // It does not end by itself.
            std::thread::sleep(Duration::from_secs(600));
            drop(group);
        }
        // Rank 0 ends first, because of rank 1.
        "lost_peer" => {
            let other = folder.join("ended-0");
            if rank == 0 {
                std::fs::write(other, "").unwrap();
                std::process::exit(76);
            }
            while !other.exists() {
                std::thread::sleep(Duration::from_millis(5));
            }
            // Longer than the launcher takes to see the end of rank 0.
            std::thread::sleep(Duration::from_millis(500));
            std::process::exit(3);
        }
        "stubborn" => std::thread::sleep(Duration::from_secs(60)),
        other => panic!("no scenario {other}"),
    }
}

/// The program of a launcher that a test kills: it starts two ranks of the scenario `OD_LAUNCHED`.
fn launches() {
    let launch = Launch::new(std::env::current_exe().unwrap())
        .args(worker_arguments(module_path!()))
        .nproc(2)
        .stop_grace(Duration::from_secs(1))
        .env("OD_SCENARIO", std::env::var_os("OD_LAUNCHED").unwrap());
    launch.run().unwrap();
}

/// Returns a lock that ends with the process that holds it.
fn locked(folder: &Path, rank: usize) -> File {
    let lock = File::create(folder.join(format!("lock-{rank}"))).unwrap();
    lock.lock().unwrap();
    std::fs::write(folder.join(format!("locked-{rank}")), "").unwrap();
    lock
}

#[test]
fn a_process_that_lost_its_peer_is_not_named_as_the_cause() {
    let folder = tempfile::tempdir().unwrap();
    let launch = Launch::new(std::env::current_exe().unwrap())
        .args(worker_arguments(module_path!()))
        .nproc(2)
        .env("OD_SCENARIO", "lost_peer")
        .env("OD_FOLDER", folder.path());
    let Err(Error::Launched { rank, status, .. }) = launch.run() else {
        panic!("a process failed");
    };
    assert_eq!((rank, status.as_str()), (1, "exit status: 3"));
}

/// Kills a launcher of two ranks of the scenario with SIGKILL, and waits until both have ended. Returns the folder
/// into which they write.
fn killed_launcher(scenario: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mut launcher = Command::new(std::env::current_exe().unwrap())
        .args(worker_arguments(module_path!()))
        .env("OD_SCENARIO", "launcher")
        .env("OD_LAUNCHED", scenario)
        .env("OD_FOLDER", folder.path())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    wait_for_files(folder.path(), &["locked-0", "locked-1"]);
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    let begun = Instant::now();
    for rank in 0..2 {
        let lock = File::open(folder.path().join(format!("lock-{rank}"))).unwrap();
        while let Err(TryLockError::WouldBlock) = lock.try_lock() {
            // Far more than it takes, and far less than the ranks would sleep.
            assert!(
                begun.elapsed() < Duration::from_secs(120),
                "rank {rank} outlives its launcher"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    folder
}

#[cfg(target_os = "linux")]
#[test]
fn no_rank_outlives_a_killed_launcher() {
    killed_launcher("alone");
}

#[test]
fn a_rank_whose_launchers_store_is_gone_is_asked_to_save_and_then_ends() {
    let folder = killed_launcher("orphan");
    for rank in 0..2 {
        assert!(folder.path().join(format!("terminated-{rank}")).is_file());
    }
}

/// Loopback has more than one address on Linux only.
#[cfg(target_os = "linux")]
#[test]
fn the_store_of_ranks_on_one_machine_listens_on_loopback_only() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = free.local_addr().unwrap().port().to_string();
    drop(free);
    // The launcher hosts it, or rank 0 does.
    for variables in [
        &[][..],
        &[
            ("TORCHELASTIC_USE_AGENT_STORE", "False"),
            ("MASTER_PORT", &port),
        ],
    ] {
        let mut started = start("ports");
        for (name, value) in variables {
            started.launch = started.launch.env(name, value);
        }
        assert_eq!(started.launch.run().unwrap(), RunEnd::Finished);
        for rank in ["0", "1"] {
            let text = std::fs::read_to_string(started.folder.path().join(rank)).unwrap();
            assert_eq!(text, "false true", "rank {rank} {variables:?}");
        }
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

fn wait_for(folder: &Path) {
    wait_for_files(folder, &["0", "1"]);
}

fn wait_for_files(folder: &Path, names: &[&str]) {
    let start = Instant::now();
    while !names.iter().all(|name| folder.join(name).is_file()) {
        assert!(
            start.elapsed() < Duration::from_secs(30),
            "the ranks do not start"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Runs the launch and sets the flags once both ranks run.
fn stopped(started: &Started, flags: &[&AtomicBool]) -> overdrive_distributed::Result<RunEnd> {
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
    assert_eq!(stopped(&started, &[&started.stop]).unwrap(), RunEnd::Saved);
    for rank in ["0", "1"] {
        let text = std::fs::read_to_string(started.folder.path().join(rank)).unwrap();
        assert_eq!(text, "saved");
    }
}

#[test]
fn one_rank_that_saved_is_enough() {
    let started = start("one_saves");
    assert_eq!(stopped(&started, &[&started.stop]).unwrap(), RunEnd::Saved);
}

#[test]
fn a_rank_that_has_not_saved_makes_the_launch_one_that_has_not() {
    let started = start("not_saved");
    assert_eq!(
        stopped(&started, &[&started.stop]).unwrap(),
        RunEnd::NotSaved
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
fn the_launcher_forwards_signals_and_exits_with_the_code_of_its_ranks() {
    use rustix::process::{Pid, Signal, kill_process};
    for (signal, scenario, code) in [
        (Signal::TERM, "saves", 75),
        (Signal::INT, "saves", 75),
        (Signal::HUP, "saves", 75),
        (Signal::QUIT, "saves", 75),
        (Signal::TERM, "not_saved", 130),
    ] {
        // A signal that these tests ignore, as `nohup` makes them do, is ignored by what they start.
        if overdrive_sys::process::ignores_signal(signal.as_raw()) {
            continue;
        }
        let folder = tempfile::tempdir().unwrap();
        let mut child = Command::new(launcher())
            .args(["--nproc", "2"])
            .arg(std::env::current_exe().unwrap())
            .args(worker_arguments(module_path!()))
            .env("OD_SCENARIO", scenario)
            .env("OD_FOLDER", folder.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        wait_for(folder.path());
        kill_process(Pid::from_child(&child), signal).unwrap();
        // As a control group sends it: again, at once.
        kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
        let found = child.wait().unwrap().code();
        assert_eq!(found, Some(code), "{signal:?} {scenario}");
    }
}
