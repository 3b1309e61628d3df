//! Many ranks and one folder. The ranks are threads here: only the folder and `all_gather` connect them.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::Duration;

use crate::common::{check, failures, litter, open, state, weights};
use overdrive_optim::{StateDict, StateError, Stateful};
use overdrive_snapshot::{
    Contents, Error, Ranks, RunState, Scope, Snapshot, SnapshotManager, SnapshotOptions,
};

/// A rank of a run whose ranks are threads.
struct Thread {
    rank: usize,
    slots: Arc<Mutex<Vec<Vec<u64>>>>,
    barrier: Arc<Barrier>,
    posted: Arc<Mutex<HashMap<String, String>>>,
    lost: Arc<Mutex<Vec<usize>>>,
}

impl Thread {
    fn run(world_size: usize) -> Vec<Thread> {
        let slots = Arc::new(Mutex::new(vec![Vec::new(); world_size]));
        let barrier = Arc::new(Barrier::new(world_size));
        let (posted, lost) = (Arc::default(), Arc::default());
        let ranks = 0..world_size;
        ranks
            .map(|rank| Thread {
                rank,
                slots: Arc::clone(&slots),
                barrier: Arc::clone(&barrier),
                posted: Arc::clone(&posted),
                lost: Arc::clone(&lost),
            })
            .collect()
    }
}

impl Ranks for Thread {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.slots.lock().unwrap().len()
    }

    fn all_gather(&self, own: &[u64]) -> io::Result<Vec<Vec<u64>>> {
        self.slots.lock().unwrap()[self.rank] = own.to_vec();
        self.barrier.wait();
        let all = self.slots.lock().unwrap().clone();
        self.barrier.wait();
        Ok(all)
    }

    fn post(&self, key: &str, value: &str) -> io::Result<()> {
        let mut posted = self.posted.lock().unwrap();
        posted.insert(key.to_owned(), value.to_owned());
        Ok(())
    }

    fn posted(&self, key: &str) -> io::Result<Option<String>> {
        Ok(self.posted.lock().unwrap().get(key).cloned())
    }

    fn lost(&self) -> Vec<usize> {
        self.lost.lock().unwrap().clone()
    }
}

/// Runs `body` as each rank, and returns what each gave.
fn each<T: Send>(world_size: usize, body: impl Fn(Thread) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let threads: Vec<_> = Thread::run(world_size)
            .into_iter()
            .map(|rank| scope.spawn(|| body(rank)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    })
}

fn manager(folder: &Path, options: SnapshotOptions, rank: Thread) -> SnapshotManager {
    SnapshotManager::with_ranks(folder, options, Box::new(rank)).unwrap()
}

fn sharded(step: u64, rank: usize) -> Contents {
    let mut saved = state(step, 64);
    saved
        .tensors(
            "optimizer",
            Scope::Rank,
            weights(step + 100 * rank as u64, 32),
        )
        .unwrap();
    saved
}

#[test]
fn each_rank_writes_its_entries_of_one_snapshot_and_all_agree_on_the_newest() {
    let dir = tempfile::tempdir().unwrap();
    let newest = each(3, |own| {
        let rank = own.rank;
        let options = SnapshotOptions {
            total_limit: Some(2),
            ..SnapshotOptions::default()
        };
        let mut manager = manager(dir.path(), options, own);
        for step in 1..=4 {
            manager.save(sharded(step, rank)).unwrap();
        }
        assert!(failures(manager.wait().unwrap()).is_empty());
        manager.latest().unwrap().unwrap().step()
    });
    assert_eq!(newest, [4, 4, 4]);
    assert!(litter(dir.path()).is_empty());
    let reader = open(dir.path(), None, None);
    assert_eq!(crate::common::steps(&reader), [4, 3]);
    let snapshot = reader.latest().unwrap().unwrap();
    assert_eq!(snapshot.world_size(), 3);
    check(&snapshot, 64);
    for rank in 0..3 {
        let targets = weights(0, 32);
        let handles = targets
            .iter()
            .map(|(name, tensor)| (name.clone(), tensor.shallow_clone()));
        snapshot
            .copy_into("optimizer", Scope::Rank, rank, handles)
            .unwrap();
        assert_eq!(targets, weights(4 + 100 * rank as u64, 32), "rank {rank}");
    }
}

#[test]
fn a_rank_may_wait_for_the_others_without_a_limit() {
    let dir = tempfile::tempdir().unwrap();
    each(2, |own| {
        let rank = own.rank;
        let options = SnapshotOptions {
            peer_timeout: Duration::MAX,
            ..SnapshotOptions::default()
        };
        let mut manager = manager(dir.path(), options, own);
        manager.save(sharded(1, rank)).unwrap();
        assert!(failures(manager.wait().unwrap()).is_empty());
    });
    assert_eq!(crate::common::steps(&open(dir.path(), None, None)), [1]);
}

/// Returns the error of rank 0, whose save rank 1 never joins; nothing is left of the snapshot. With `posts` the
/// launcher says that rank 1 is lost, and with `interrupt` the run is to end.
fn lost(peer_timeout: Duration, posts: bool, interrupt: bool) -> Error {
    let dir = tempfile::tempdir().unwrap();
    let mut errors = each(2, |own| {
        let (rank, lost) = (own.rank, Arc::clone(&own.lost));
        let options = SnapshotOptions {
            peer_timeout,
            ..SnapshotOptions::default()
        };
        let mut manager = manager(dir.path(), options, own);
        if interrupt {
            manager.set_interrupt(Arc::new(AtomicBool::new(true)));
        }
        if rank == 1 {
            if posts {
                lost.lock().unwrap().push(1);
            }
            return None;
        }
        manager.save(sharded(1, rank)).unwrap();
        failures(manager.wait().unwrap()).pop()
    });
    assert!(litter(dir.path()).is_empty());
    assert!(open(dir.path(), None, None).latest().unwrap().is_none());
    let error = errors.remove(0).unwrap();
    let is_peer = matches!(
        error,
        Error::Peer {
            rank: 1,
            step: 1,
            ..
        }
    );
    assert!(is_peer, "{error}");
    error
}

#[test]
fn a_lost_rank_is_named_and_nothing_is_left_of_the_snapshot() {
    lost(Duration::from_millis(300), false, false);
}

/// A save of several ranks that fails on one of them, before or while it writes.
fn failed_save(culprit: usize, writing: bool) {
    let dir = tempfile::tempdir().unwrap();
    let errors = each(3, |own| {
        let (rank, barrier) = (own.rank, Arc::clone(&own.barrier));
        let options = SnapshotOptions {
            // Far longer than it takes to tell the others.
            peer_timeout: Duration::from_secs(60),
            ..SnapshotOptions::default()
        };
        let mut manager = manager(dir.path(), options, own);
        let mut saved = sharded(1, rank);
        if rank == culprit && writing {
            // No file system has files of such names.
            let name = "x".repeat(300);
            saved.document(&name, Scope::Rank, &1).unwrap();
        }
        // In turns: the others begin when the culprit has failed.
        if rank != culprit {
            barrier.wait();
        }
        let mut error = match rank == culprit && !writing {
            true => {
                let mut failing = Failing;
                let state = RunState::new().register_per_rank("shard", &mut failing);
                manager.save_state(1, None, state).err()
            }
            false => manager.save(saved).err(),
        };
        error = error.or(failures(manager.wait().unwrap()).pop());
        if rank == culprit {
            barrier.wait();
        }
        // Another save is one of its own.
        barrier.wait();
        manager.save(sharded(2, rank)).unwrap();
        assert!(failures(manager.wait().unwrap()).is_empty());
        error.unwrap()
    });
    for (rank, error) in errors.iter().enumerate() {
        match error {
            Error::Peer {
                rank: failed,
                reason,
                ..
            } if rank != culprit => {
                assert_eq!(*failed, culprit);
                assert_eq!(*reason, errors[culprit].to_string());
            }
            other => assert_eq!(rank, culprit, "{other}"),
        }
    }
    assert_eq!(litter(dir.path()), [""; 0]);
    let reader = open(dir.path(), None, None);
    assert_eq!(crate::common::steps(&reader), [2]);
}

/// A value without a state.
struct Failing;

impl Stateful for Failing {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        Err("it has no state".into())
    }

    fn load_state_dict(&mut self, _: &StateDict) -> Result<(), StateError> {
        Ok(())
    }
}

#[test]
fn a_save_that_fails_on_one_rank_ends_on_all_ranks_at_once() {
    for culprit in 0..3 {
        for writing in [false, true] {
            failed_save(culprit, writing);
        }
    }
}

#[test]
fn a_rank_that_is_lost_is_not_waited_for() {
    let error = lost(Duration::from_secs(60), true, false);
    assert!(
        matches!(&error, Error::Peer { reason, .. } if reason == "it is lost"),
        "{error}"
    );
}

#[test]
fn a_rank_that_is_to_end_does_not_wait_for_a_lost_one_at_all() {
    // A sixtieth of it is more than a test takes.
    let error = lost(Duration::from_secs(60 * 60 * 60), true, true);
    assert!(
        matches!(&error, Error::Peer { reason, .. } if reason == "it is lost"),
        "{error}"
    );
}

#[cfg(unix)]
#[test]
fn no_rank_makes_a_folder_anew_that_was_moved() {
    let dir = tempfile::tempdir().unwrap();
    let (old, new) = (dir.path().join("run"), dir.path().join("moved"));
    let errors = each(2, |own| {
        let (rank, barrier) = (own.rank, Arc::clone(&own.barrier));
        let mut manager = manager(&old, SnapshotOptions::default(), own);
        if rank == 0 {
            std::fs::rename(&old, &new).unwrap();
        }
        barrier.wait();
        let error = manager.save(sharded(1, rank)).err();
        error.or(failures(manager.wait().unwrap()).pop())
    });
    let moved = errors[0].as_ref().unwrap();
    assert!(matches!(moved, Error::Moved { .. }), "{moved}");
    // Rank 1 fails by itself, or because rank 0 has.
    assert!(errors[1].is_some());
    assert!(!old.exists());
    assert!(litter(&new).is_empty());
}

#[test]
fn ranks_killed_at_different_moments_agree_on_the_step_that_all_have() {
    // A folder for each rank, as on nodes with disks of their own.
    let dir = tempfile::tempdir().unwrap();
    let folder = |rank: usize| dir.path().join(rank.to_string());
    for (rank, steps) in [(0, [1, 2, 3].as_slice()), (1, &[1, 2])] {
        let mut manager = open(&folder(rank), None, None);
        for step in steps {
            manager.save(state(*step, 8)).unwrap();
        }
        manager.wait().unwrap();
    }
    // And the last that both have is damaged on one of them.
    let agreed = |damaged: bool| {
        if damaged {
            std::fs::write(folder(0).join("checkpoint-2/trainer_state.json"), "3").unwrap();
        }
        each(2, |own| {
            let options = SnapshotOptions {
                shared_folder: false,
                ..SnapshotOptions::default()
            };
            let manager = manager(&folder(own.rank), options, own);
            manager.latest().unwrap().as_ref().map(Snapshot::step)
        })
    };
    assert_eq!(agreed(false), [Some(2), Some(2)]);
    assert_eq!(agreed(true), [Some(1), Some(1)]);
}

#[test]
fn a_folder_that_rank_0_cannot_open_fails_on_every_rank() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    let errors = each(2, |own| {
        SnapshotManager::with_ranks(&file, SnapshotOptions::default(), Box::new(own))
            .unwrap_err()
            .to_string()
    });
    assert!(
        errors[0].contains("cannot create the folder"),
        "{}",
        errors[0]
    );
    assert!(errors[1].contains("rank 0"), "{}", errors[1]);
}

/// Returns the number of bytes that this thread has read from files.
#[cfg(target_os = "linux")]
fn bytes_read() -> u64 {
    let counters = std::fs::read_to_string("/proc/thread-self/io").unwrap();
    let read = counters
        .lines()
        .find_map(|line| line.strip_prefix("rchar: "));
    read.unwrap().parse().unwrap()
}

#[cfg(target_os = "linux")]
#[test]
fn of_a_shared_folder_one_rank_reads_the_snapshot_that_is_resumed_from() {
    const ELEMENTS: i64 = 1 << 20;
    let dir = tempfile::tempdir().unwrap();
    let mut writer = open(dir.path(), None, None);
    for step in 1..=3 {
        writer.save(state(step, ELEMENTS)).unwrap();
    }
    writer.wait().unwrap();
    let bytes = writer.list().unwrap()[0].bytes();
    drop(writer);
    let newest = dir.path().join("checkpoint-3");
    let read = each(3, |own| {
        let manager = manager(dir.path(), SnapshotOptions::default(), own);
        let before = bytes_read();
        assert_eq!(manager.latest().unwrap().unwrap().step(), 3);
        let latest = bytes_read() - before;
        assert_eq!(manager.open_snapshot(&newest).unwrap().step(), 3);
        (latest, bytes_read() - before - latest)
    });
    for (rank, (latest, named)) in read.into_iter().enumerate() {
        for read in [latest, named] {
            match rank {
                0 => assert!((bytes..2 * bytes).contains(&read), "{read} of {bytes}"),
                _ => assert!(read < bytes / 8, "rank {rank}: {read} of {bytes}"),
            }
        }
    }
    // And all learn of damage.
    let file = newest.join("trainer_state.json");
    std::fs::write(file, "4").unwrap();
    let errors = each(2, |own| {
        let manager = manager(dir.path(), SnapshotOptions::default(), own);
        assert_eq!(manager.latest().unwrap().unwrap().step(), 2);
        manager.open_snapshot(&newest).unwrap_err()
    });
    let reasons = ["its bytes were changed", "rank 0 could not open it"];
    for (error, reason) in errors.iter().zip(reasons) {
        assert!(error.to_string().contains(reason), "{error}");
    }
}
