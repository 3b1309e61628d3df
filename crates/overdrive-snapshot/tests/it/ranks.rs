//! Many ranks and one folder. The ranks are threads here: only the folder and `all_gather` connect them.

use std::io;
use std::path::Path;
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::Duration;

use crate::common::{check, failures, litter, open, state, weights};
use overdrive_snapshot::{
    Contents, Error, Ranks, Scope, Snapshot, SnapshotManager, SnapshotOptions,
};

/// A rank of a run whose ranks are threads.
struct Thread {
    rank: usize,
    slots: Arc<Mutex<Vec<Vec<u64>>>>,
    barrier: Arc<Barrier>,
}

impl Thread {
    fn run(world_size: usize) -> Vec<Thread> {
        let slots = Arc::new(Mutex::new(vec![Vec::new(); world_size]));
        let barrier = Arc::new(Barrier::new(world_size));
        let ranks = 0..world_size;
        ranks
            .map(|rank| Thread {
                rank,
                slots: Arc::clone(&slots),
                barrier: Arc::clone(&barrier),
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

fn short() -> SnapshotOptions {
    SnapshotOptions {
        peer_timeout: Duration::from_millis(300),
        ..SnapshotOptions::default()
    }
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
fn a_lost_rank_is_named_and_nothing_is_left_of_the_snapshot() {
    let dir = tempfile::tempdir().unwrap();
    let errors = each(2, |own| {
        let rank = own.rank;
        let mut manager = manager(dir.path(), short(), own);
        if rank == 1 {
            return None;
        }
        manager.save(sharded(1, rank)).unwrap();
        failures(manager.wait().unwrap()).pop()
    });
    let error = errors[0].as_ref().unwrap();
    assert!(
        matches!(
            error,
            Error::Peer {
                rank: 1,
                step: 1,
                ..
            }
        ),
        "{error}"
    );
    assert!(litter(dir.path()).is_empty());
    assert!(open(dir.path(), None, None).latest().unwrap().is_none());
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
