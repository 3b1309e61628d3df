#![allow(dead_code, reason = "each test file uses its part")]

use std::path::Path;

use overdrive_snapshot::{
    Best, Contents, Error, SaveOutcome, Scope, Snapshot, SnapshotManager, SnapshotOptions,
};
use tch::{Device, Kind, Tensor};

/// Numbers that tell the step and the place.
pub(crate) fn weights(step: u64, elements: i64) -> Vec<(String, Tensor)> {
    let numbers = Tensor::arange(elements, (Kind::Float, Device::Cpu)) + step as f64 * 0.25;
    vec![
        ("layer.weight".to_owned(), numbers.view([2, -1])),
        ("layer.bias".to_owned(), numbers.to_kind(Kind::BFloat16)),
    ]
}

pub(crate) fn state(step: u64, elements: i64) -> Contents {
    let mut state = Contents::at(step);
    state
        .tensors("model", Scope::Run, weights(step, elements))
        .unwrap();
    state.document("trainer_state", Scope::Run, &step).unwrap();
    state
}

/// Checks that everything in the snapshot is that of its step.
pub(crate) fn check(snapshot: &Snapshot, elements: i64) {
    let step = snapshot.step();
    let targets: Vec<(String, Tensor)> = weights(0, elements);
    snapshot
        .copy_into(
            "model",
            Scope::Run,
            0,
            targets.iter().map(|(n, t)| (n.clone(), t.shallow_clone())),
        )
        .unwrap();
    assert_eq!(targets, weights(step, elements), "step {step}");
    assert_eq!(
        snapshot
            .document::<u64>("trainer_state", Scope::Run, 0)
            .unwrap(),
        step
    );
}

pub(crate) fn open(
    folder: &Path,
    total_limit: Option<usize>,
    best: Option<Best>,
) -> SnapshotManager {
    let options = SnapshotOptions {
        total_limit,
        best,
        ..SnapshotOptions::default()
    };
    SnapshotManager::open(folder, options).unwrap()
}

pub(crate) fn steps(manager: &SnapshotManager) -> Vec<u64> {
    manager.list().unwrap().iter().map(Snapshot::step).collect()
}

/// Returns the names in the folder that are not snapshots.
pub(crate) fn litter(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names
        .filter(|name| !name.starts_with("checkpoint-") && name != ".lock")
        .collect()
}

pub(crate) fn failures(outcomes: Vec<SaveOutcome>) -> Vec<Error> {
    outcomes
        .into_iter()
        .filter_map(|outcome| outcome.result.err())
        .collect()
}
