#![allow(clippy::unwrap_used, reason = "a test may panic")]
//! A peer that is killed, stopped, asleep or in another collective: every survivor gets an error that names the
//! peer and the collective, in time. A test target of its own, because it measures time.

#[path = "it/common.rs"]
mod common;

use std::ffi::OsStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{Outcome, group, launch, launch_with_grace, launch_within, scenario, write, write_as};
use overdrive_distributed::{
    DdpConfig, DistributedDataParallel, Error, GroupConfig, ProcessGroup, ReduceOp, Rendezvous,
};
use overdrive_snapshot::{Contents, Scope, SnapshotManager, SnapshotOptions};
use overdrive_sys::hook;
use tch::{Device, Kind, Tensor, nn};

/// The timeout of every collective.
const TIMEOUT_S: f64 = 3.0;
/// A timeout, four heartbeats of an eighth of it, half a second, and slack for a busy machine.
const SLACK_S: f64 = 12.0;

#[test]
fn worker() {
    let Some(scenario) = scenario() else { return };
    if scenario == "absent" {
        return absent();
    }
    let group = group(TIMEOUT_S);
    if scenario.starts_with("inside_backward") {
        return inside_backward(&group, &scenario);
    }
    if scenario.starts_with("saving") {
        return saving(&group, &scenario);
    }
    let culprit = usize::from(!scenario.ends_with("main"));
    let tensor = Tensor::ones([1000], (Kind::Float, Device::Cpu));
    group.all_reduce(&tensor, ReduceOp::Sum).unwrap();
    group.barrier().unwrap();
    if group.rank() == culprit {
        match scenario.trim_end_matches("_main") {
            "killed" | "killed_backward" => signal(rustix::process::Signal::KILL),
            "stopped" => signal(rustix::process::Signal::STOP),
            "asleep" => std::thread::sleep(Duration::from_secs(20)),
            "left" => return drop(group),
            "other_collective" => {
                let _ = group.broadcast(&tensor, 0);
                return;
            }
            other => panic!("no scenario {other}"),
        }
        return;
    }
    let start = Instant::now();
    let stopped = scenario.starts_with("stopped");
    let error = if scenario.starts_with("killed_backward") {
        backward(&group)
    } else {
        group.all_reduce(&tensor, ReduceOp::Sum).unwrap_err()
    };
    let took = start.elapsed().as_secs_f64();
    let Error::Collective { ranks, message } = &error else {
        panic!("another error: {error}");
    };
    let explained = group.explain(&error).unwrap().to_string();
    assert_eq!(explained, *message);
    // Later calls wait for no timeout of their own, and have the same message.
    let again = Instant::now();
    let later = group.barrier().unwrap_err().to_string();
    assert!(again.elapsed().as_secs_f64() < TIMEOUT_S / 2.0);
    assert!(later.contains("the group has failed"), "{later}");
    write(&group, &format!("{took}\n{ranks:?}\n{message}"));
    if stopped {
        // The launcher kills a stopped process only after another has failed.
        std::process::exit(1);
    }
}

fn signal(signal: rustix::process::Signal) {
    rustix::process::kill_process(rustix::process::getpid(), signal).unwrap();
    std::thread::sleep(Duration::from_secs(30));
}

/// The peer is lost while this rank waits for it in the middle of backward.
fn backward(group: &ProcessGroup) -> Error {
    let store = nn::VarStore::new(Device::Cpu);
    let weight = store.root().ones("weight", &[8]);
    let made = DistributedDataParallel::from_var_store(group, &store, DdpConfig::default());
    match made {
        // Rank 1 was killed before it could describe its model.
        Err(error) => error,
        Ok(ddp) => {
            let loss = ddp
                .forward(|| Ok::<_, Error>(weight.sum(Kind::Float)))
                .unwrap();
            ddp.backward(&loss).unwrap_err()
        }
    }
}

/// Returns every survivor's message, after the checks that hold for all.
fn survivors(outcome: &Outcome, culprit: usize, ranks: usize) -> Vec<String> {
    let survivors = (0..ranks).filter(|rank| *rank != culprit);
    let words = survivors.map(|rank| {
        let mut lines = outcome.rank(rank).splitn(3, '\n');
        let took: f64 = lines.next().unwrap().parse().unwrap();
        assert!(took < TIMEOUT_S + SLACK_S, "rank {rank} took {took} s");
        assert_eq!(
            lines.next().unwrap(),
            format!("[{culprit}]"),
            "{}",
            outcome.rank(rank)
        );
        let message = lines.next().unwrap().to_owned();
        assert!(
            message.contains(&format!(" on rank {rank} of {ranks}: ")),
            "{message}"
        );
        message
    });
    words.collect()
}

#[test]
fn a_killed_rank_is_named_as_lost_by_every_survivor() {
    let outcome = launch(module_path!(), "killed", 3);
    for message in survivors(&outcome, 1, 3) {
        assert!(message.starts_with("all_reduce #4 on rank"), "{message}");
        assert!(
            message.contains("rank 1 is lost: no heartbeat"),
            "{message}"
        );
        assert!(message.contains("its last heartbeat reports "), "{message}");
    }
    let error = outcome.launched.unwrap_err().to_string();
    assert!(
        error.starts_with("rank 1 failed first: signal: 9"),
        "{error}"
    );
}

#[test]
fn a_killed_rank_0_is_named_too() {
    for message in survivors(&launch(module_path!(), "killed_main", 3), 0, 3) {
        assert!(
            message.contains("rank 0 is lost: no heartbeat"),
            "{message}"
        );
    }
}

#[test]
fn a_rank_that_is_killed_before_backward_is_named() {
    let outcome = launch(module_path!(), "killed_backward", 2);
    assert!(survivors(&outcome, 1, 2)[0].contains("rank 1 is lost"));
}

#[test]
fn a_stopped_rank_is_named_as_lost() {
    // It never ends by itself: the launcher ends it after the survivors have.
    let started = Instant::now();
    let outcome = launch_within(module_path!(), "stopped", 2, Duration::from_secs(1));
    assert!(survivors(&outcome, 1, 2)[0].contains("rank 1 is lost"));
    assert!(started.elapsed() < Duration::from_secs(100));
}

#[test]
fn a_sleeping_rank_is_named_as_stuck_before_the_collective() {
    for message in survivors(&launch(module_path!(), "asleep", 3), 1, 3) {
        assert!(
            message
                .contains("rank 1 is stuck: its process is alive, but did not start all_reduce #4"),
            "{message}"
        );
    }
}

#[test]
fn a_rank_that_has_left_is_named() {
    for message in survivors(&launch(module_path!(), "left", 3), 1, 3) {
        assert!(message.contains("rank 1 has left the group"), "{message}");
    }
}

#[test]
fn a_rank_in_another_collective_is_named() {
    let outcome = launch(module_path!(), "other_collective", 2);
    let message = &survivors(&outcome, 1, 2)[0];
    assert!(
        message.contains("rank 1 called another collective"),
        "{message}"
    );
    assert!(
        message.contains("broadcast #4, while rank 0 called all_reduce #4"),
        "{message}"
    );
}

/// Rank 0 hosts the store, because no launcher does.
#[test]
fn a_killed_rank_0_that_hosts_the_store_is_named() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = free.local_addr().unwrap().port().to_string();
    drop(free);
    let env = [
        ("TORCHELASTIC_USE_AGENT_STORE", "False"),
        ("MASTER_PORT", &port),
    ];
    let env = env.map(|(name, value)| (name, OsStr::new(value)));
    let outcome = launch_with_grace(
        module_path!(),
        "killed_main",
        3,
        Duration::from_secs(60),
        &env,
    );
    for message in survivors(&outcome, 0, 3) {
        assert!(
            message
                .contains("rank 0 (at 127.0.0.1) is lost: the store that it hosts does not answer"),
            "{message}"
        );
    }
}

/// In backward, when the reducing of a large bucket has begun on every rank, rank 1 (or 0) is killed.
fn inside_backward(group: &ProcessGroup, scenario: &str) {
    let culprit = usize::from(!scenario.ends_with("main"));
    let store = nn::VarStore::new(Device::Cpu);
    let small = store.root().ones("small", &[4]);
    // 64 MB: some hundredths of a second on loopback.
    let large = store.root().ones("large", &[16_000_000]);
    let config = DdpConfig {
        bucket_cap_mb: 1.0,
        ..DdpConfig::default()
    };
    let ddp = DistributedDataParallel::from_var_store(group, &store, config).unwrap();
    let dies = Arc::new(AtomicBool::new(false));
    let backward = || {
        let loss = ddp
            .forward(|| {
                let early = &small * 2.0;
                let (dies, group) = (Arc::clone(&dies), group.clone());
                // The gradient comes here after that of `large` and before that of `small`.
                hook::register(&early, move |_| {
                    if dies.load(Ordering::SeqCst) {
                        let progress = group.progress().unwrap();
                        write(&group, &format!("{progress:?}"));
                        signal(rustix::process::Signal::KILL);
                    }
                    Ok(None)
                })
                .unwrap();
                Ok::<_, Error>((early.sum(Kind::Float) * &large).sum(Kind::Float))
            })
            .unwrap();
        ddp.backward(&loss)
    };
    // The first backward has one bucket; after it there are two, in the order of the gradients.
    backward().unwrap();
    dies.store(group.rank() == culprit, Ordering::SeqCst);
    let start = Instant::now();
    let error = backward().unwrap_err();
    let took = start.elapsed().as_secs_f64();
    let Error::Collective { ranks, message } = &error else {
        panic!("another error: {error}");
    };
    let later = group.barrier().unwrap_err().to_string();
    assert!(later.contains("the group has failed"), "{later}");
    write(group, &format!("{took}\n{ranks:?}\n{message}"));
}

#[test]
fn a_rank_that_dies_inside_a_buckets_all_reduce_is_named_by_every_survivor() {
    for (scenario, culprit) in [("inside_backward", 1), ("inside_backward_main", 0)] {
        let outcome = launch(module_path!(), scenario, 3);
        let last = outcome.rank(culprit);
        assert!(
            last.contains("last: Some(\"all_reduce\")") && !last.contains("active: 0"),
            "it dies while a bucket is reduced: {last}"
        );
        for message in survivors(&outcome, culprit, 3) {
            assert!(message.starts_with("all_reduce #"), "{message}");
            let lost = format!("rank {culprit} is lost: no heartbeat");
            assert!(message.contains(&lost), "{message}");
        }
        let error = outcome.launched.unwrap_err().to_string();
        let first = format!("rank {culprit} failed first: signal: 9");
        assert!(error.starts_with(&first), "{error}");
    }
}

/// Rank 1 (or 0) is killed before it writes its entries of a snapshot, while no collective runs.
fn saving(group: &ProcessGroup, scenario: &str) {
    let folder = std::env::var_os("OD_FOLDER").unwrap();
    let folder = std::path::Path::new(&folder).join("run");
    let options = SnapshotOptions {
        // More than it takes to find the lost rank; after that it is waited for a sixtieth of it.
        peer_timeout: Duration::from_secs(60),
        ..SnapshotOptions::default()
    };
    let ranks = Box::new(group.clone());
    let mut snapshots = SnapshotManager::with_ranks(&folder, options, ranks).unwrap();
    if group.rank() == usize::from(!scenario.ends_with("main")) {
        signal(rustix::process::Signal::KILL);
    }
    let mut contents = Contents::at(1);
    contents
        .document("own", Scope::Rank, &group.rank())
        .unwrap();
    snapshots.save(contents).unwrap();
    let outcome = snapshots.wait().unwrap().remove(0);
    write(group, &outcome.result.unwrap_err().to_string());
}

#[test]
fn a_rank_that_dies_while_it_writes_a_snapshot_is_named_by_those_that_wait_for_it() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = free.local_addr().unwrap().port().to_string();
    drop(free);
    let of_rank_0 = [
        ("TORCHELASTIC_USE_AGENT_STORE", OsStr::new("False")),
        ("MASTER_PORT", OsStr::new(&port)),
    ];
    let none = &of_rank_0[..0];
    let cases = [
        ("saving", 1, none),
        ("saving_main", 0, none),
        // The store goes with it.
        ("saving_main", 0, &of_rank_0),
    ];
    for (scenario, culprit, env) in cases {
        let grace = Duration::from_secs(60);
        let outcome = launch_with_grace(module_path!(), scenario, 2, grace, env);
        let error = outcome.rank(1 - culprit);
        let expected = format!(
            "rank {culprit} did not write its entries of the snapshot of step 1: it is lost"
        );
        assert_eq!(error, expected);
    }
}

/// Rank 2 never joins.
fn absent() {
    let rendezvous = Rendezvous::from_env().unwrap();
    let rank = rendezvous.rank;
    let claimed = Rendezvous {
        world_size: 3,
        ..rendezvous
    };
    let config = GroupConfig::default().with_timeout(Duration::from_secs(2));
    write_as(
        rank,
        &ProcessGroup::new(claimed, config).unwrap_err().to_string(),
    );
}

#[test]
fn ranks_that_never_join_are_named() {
    let outcome = launch(module_path!(), "absent", 2);
    outcome.launched.as_ref().unwrap();
    for rank in 0..2 {
        let error = outcome.rank(rank);
        assert!(
            error.starts_with(&format!("rank {rank} waited 2s for the group of 3")),
            "{error}"
        );
        assert!(error.contains("missing: rank 2;"), "{error}");
    }
}

#[test]
fn an_unreachable_store_is_an_error_with_its_address() {
    let rendezvous = Rendezvous {
        rank: 1,
        world_size: 2,
        master_port: 1,
        ..Rendezvous::default()
    };
    let config = GroupConfig::default().with_timeout(Duration::from_secs(1));
    let error = ProcessGroup::new(rendezvous, config)
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("rank 1 could not reach the store at 127.0.0.1:1 within 1s"),
        "{error}"
    );
    assert!(
        error.contains("rank 0 hosts it: check that rank 0 was started"),
        "{error}"
    );
}

#[test]
fn a_program_that_cannot_be_started_is_named() {
    let error = overdrive_distributed::Launch::new("/nowhere/program")
        .run()
        .unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("cannot start /nowhere/program: "),
        "{error}"
    );
}
