//! A run that resumes from a snapshot before its newest one.

use std::fs;

use overdrive::snapshot::Snapshot;
use overdrive::tracking::read_metrics;
use overdrive::trainer::{ResumeFromCheckpoint, TrainingArguments};

use crate::alone;
use crate::resume::{arguments, latest, losses, train_whole};

#[test]
fn a_run_that_goes_back_keeps_its_new_snapshots_and_sets_the_old_branch_aside() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let first = TrainingArguments {
        save_steps: 3.0,
        ..arguments(dir.path())
    };
    let whole = |arguments: &TrainingArguments| train_whole(dir.path(), arguments, "run").0;
    whole(&first).unwrap();
    // The user's copy: its name is no name of the run's.
    let copy = run.join("checkpoint-3-keep");
    fs::create_dir(&copy).unwrap();
    for entry in fs::read_dir(run.join("checkpoint-3")).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), copy.join(entry.file_name())).unwrap();
    }
    let back = TrainingArguments {
        resume_from_checkpoint: Some(ResumeFromCheckpoint::Folder(run.join("checkpoint-3"))),
        save_total_limit: Some(1),
        max_steps: 8,
        ..first.clone()
    };
    assert_eq!(whole(&back).unwrap().resumed_step, 3);
    let exists = |name: &str| run.join(name).exists();
    for kept in ["checkpoint-8", "checkpoint-3-keep"] {
        Snapshot::open(run.join(kept)).unwrap();
    }
    for step in [3, 6, 9, 12] {
        assert!(!exists(&format!("checkpoint-{step}")), "{step}");
    }
    for step in [6, 9, 12] {
        Snapshot::open(run.join(format!("abandoned-1/checkpoint-{step}"))).unwrap();
    }
    let abandoned = read_metrics(run.join("abandoned-1/metrics.jsonl")).unwrap();
    assert_eq!(abandoned.records.len(), 12);
    assert_eq!(losses(dir.path(), "run").len(), 8);
    // The newest one is that of the new branch.
    let on = TrainingArguments {
        resume_from_checkpoint: latest(),
        max_steps: 10,
        ..back
    };
    assert_eq!(whole(&on).unwrap().resumed_step, 8);
    assert!(exists("abandoned-1/checkpoint-12") && !exists("abandoned-2"));
}
