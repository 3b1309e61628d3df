//! Runs that go back to an earlier snapshot, copies that a user makes, and the lock on the folder.

use std::fs;
use std::path::Path;

use crate::common::{check, failures, litter, open, state, steps};
use overdrive_snapshot::{Error, FolderLock, RunState, Snapshot, SnapshotManager, SnapshotOptions};

/// Saves a snapshot of each step, with `elements` elements, which tell the branches apart.
fn save(manager: &mut SnapshotManager, saved: &[u64], elements: i64) {
    for step in saved {
        manager.save(state(*step, elements)).unwrap();
    }
    assert_eq!(failures(manager.wait().unwrap()).len(), 0);
}

fn saved_run(folder: &Path, saved: &[u64]) {
    let mut manager = open(folder, None, None);
    for step in saved {
        manager
            .save_state(*step, None, counted(&mut step.clone()))
            .unwrap();
    }
    assert_eq!(failures(manager.wait().unwrap()).len(), 0);
}

fn counted(counter: &mut u64) -> RunState<'_> {
    RunState::new().value("counter", counter)
}

/// Resumes from the snapshot in `from` and returns its counter.
fn resume(manager: &SnapshotManager, from: &Path) -> u64 {
    let mut counter = 0;
    let snapshot = Snapshot::open(from).unwrap();
    manager
        .load_state(&snapshot, counted(&mut counter))
        .unwrap();
    counter
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_run_that_goes_back_sets_the_abandoned_snapshots_aside_and_keeps_its_new_ones() {
    let dir = tempfile::tempdir().unwrap();
    saved_run(dir.path(), &[10, 20, 30, 40]);

    let mut manager = open(dir.path(), Some(2), None);
    assert_eq!(resume(&manager, &dir.path().join("checkpoint-10")), 10);
    // At once, before anything new is saved: the next start with the newest snapshot continues from 10.
    assert_eq!(steps(&manager), [10]);
    assert_eq!(manager.latest().unwrap().unwrap().step(), 10);
    let aside = dir.path().join("abandoned-1");
    let abandoned = ["checkpoint-20", "checkpoint-30", "checkpoint-40"];
    assert_eq!(names(&aside), abandoned);
    for name in abandoned {
        Snapshot::open(aside.join(name)).unwrap();
    }

    save(&mut manager, &[20], 8);
    assert_eq!(steps(&manager), [20, 10]);
    save(&mut manager, &[30], 8);
    assert_eq!(steps(&manager), [30, 20]);
    check(&manager.latest().unwrap().unwrap(), 8);
    assert_eq!(names(&aside), abandoned, "rotation deletes none of them");
    drop(manager);

    // A second way back gets a folder of its own.
    let mut manager = open(dir.path(), Some(2), None);
    assert_eq!(resume(&manager, &aside.join("checkpoint-40")), 40);
    assert!(steps(&manager).is_empty(), "none of them led to that one");
    assert_eq!(
        names(&dir.path().join("abandoned-2")),
        ["checkpoint-20", "checkpoint-30"]
    );
    save(&mut manager, &[50], 8);
    assert_eq!(steps(&manager), [50]);
}

#[test]
fn a_run_that_continues_from_its_newest_snapshot_moves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    saved_run(dir.path(), &[10, 20]);
    let mut manager = open(dir.path(), None, None);
    // By a path with detours.
    let path = dir.path().join("checkpoint-10/../checkpoint-20");
    assert_eq!(resume(&manager, &path), 20);
    save(&mut manager, &[30], 8);
    assert_eq!(steps(&manager), [30, 20, 10]);
    assert!(litter(dir.path()).is_empty());
}

#[test]
fn a_run_that_begins_anew_beside_old_snapshots_sets_them_aside_with_its_first_one() {
    let dir = tempfile::tempdir().unwrap();
    saved_run(dir.path(), &[10, 20, 30]);
    let mut manager = open(dir.path(), Some(1), None);
    save(&mut manager, &[10], 8);
    assert_eq!(steps(&manager), [10]);
    check(&manager.latest().unwrap().unwrap(), 8);
    assert_eq!(
        names(&dir.path().join("abandoned-1")),
        ["checkpoint-10", "checkpoint-20", "checkpoint-30"]
    );
}

#[test]
fn a_copy_under_another_name_is_neither_deleted_nor_the_newest() {
    let dir = tempfile::tempdir().unwrap();
    saved_run(dir.path(), &[10, 20]);
    let path = |name: &str| dir.path().join(name);
    let copies = [
        "checkpoint-10-keep",
        "checkpoint-20.old",
        "checkpoint-020",
        "checkpoint-7",
    ];
    for name in copies {
        copy(&path("checkpoint-20"), &path(name));
    }
    let mut manager = open(dir.path(), Some(1), None);
    assert_eq!(steps(&manager), [20, 10]);
    assert_eq!(resume(&manager, &path("checkpoint-10")), 10);
    assert_eq!(manager.latest().unwrap().unwrap().step(), 10);
    save(&mut manager, &[11, 12], 8);
    assert_eq!(steps(&manager), [12]);
    for name in copies {
        assert_eq!(Snapshot::open(path(name)).unwrap().step(), 20, "{name}");
    }
    // It can still be resumed from, by its name.
    drop(manager);
    let manager = open(dir.path(), Some(1), None);
    assert_eq!(resume(&manager, &path("checkpoint-10-keep")), 20);
}

#[test]
fn a_lock_that_the_program_holds_already_is_used_and_outlives_the_manager() {
    let dir = tempfile::tempdir().unwrap();
    let locked = |outcome: Result<FolderLock, Error>| {
        let error = outcome.expect_err("another one holds it");
        assert!(matches!(error, Error::Locked { .. }), "{error}");
    };
    let lock = FolderLock::acquire(dir.path()).unwrap();
    assert!(lock.is_exclusive());
    locked(FolderLock::acquire(dir.path()));
    let options = SnapshotOptions {
        lock: Some(lock.clone()),
        ..SnapshotOptions::default()
    };
    let manager = SnapshotManager::open(dir.path(), options).unwrap();
    drop(manager);
    locked(FolderLock::acquire(dir.path()));
    drop(lock);
    // A lock on another folder is no lock on this one.
    let other = tempfile::tempdir().unwrap();
    let options = SnapshotOptions {
        lock: Some(FolderLock::acquire(other.path()).unwrap()),
        ..SnapshotOptions::default()
    };
    let _manager = SnapshotManager::open(dir.path(), options).unwrap();
    locked(FolderLock::acquire(dir.path()));
}
