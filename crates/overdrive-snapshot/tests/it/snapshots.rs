//! Writing, finding, rotating and refusing snapshots.

use std::fs;
use std::path::Path;

use crate::common::{check, failures, litter, open, state, steps, weights};
use overdrive_optim::{
    AdamW, AdamWConfig, EarlyStopping, EarlyStoppingConfig, Optimizer, decay_groups,
};
use overdrive_snapshot::{
    Best, Contents, Error, RunState, Scope, Snapshot, SnapshotManager, SnapshotOptions,
};
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

#[test]
fn a_snapshot_is_restored_bit_for_bit_though_training_continues_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let mut manager = open(dir.path(), None, None);
    let live = weights(1, 1 << 20);
    for step in 1..=3u64 {
        let mut saved = Contents::at(step);
        let handles = live
            .iter()
            .map(|(name, tensor)| (name.clone(), tensor.shallow_clone()));
        saved.tensors("model", Scope::Run, handles).unwrap();
        saved.document("trainer_state", Scope::Run, &step).unwrap();
        manager.save(saved).unwrap();
        // The next step, while the last one is still being written.
        for (_, tensor) in &live {
            let next = &weights(step + 1, 1 << 20);
            let own = next
                .iter()
                .find(|(_, other)| other.kind() == tensor.kind())
                .unwrap();
            tensor.shallow_clone().copy_(&own.1);
        }
    }
    assert_eq!(failures(manager.wait().unwrap()).len(), 0);
    assert_eq!(steps(&manager), [3, 2, 1]);
    for snapshot in manager.list().unwrap() {
        check(&Snapshot::open(snapshot.path()).unwrap(), 1 << 20);
    }
    assert_eq!(manager.latest().unwrap().unwrap().step(), 3);
    assert!(litter(dir.path()).is_empty());
}

#[test]
fn a_run_that_resumes_is_bit_equal_to_one_that_never_stopped() {
    let _generator = crate::generator();
    let dir = tempfile::tempdir().unwrap();
    let target = Tensor::arange(12, F32).view([3, 4]);
    let new_run = || {
        let weight = Tensor::zeros([3, 4], F32).set_requires_grad(true);
        let groups = decay_groups([("weight".to_owned(), weight.shallow_clone())], 0.1);
        (weight, AdamW::new(groups, AdamWConfig::default()).unwrap())
    };
    let step = |weight: &Tensor, optimizer: &mut AdamW| {
        let noise = Tensor::randn([3, 4], F32) * 0.1;
        let loss = (weight - &target + noise).square().mean(Kind::Float);
        loss.backward();
        optimizer.step().unwrap();
        optimizer.zero_grad().unwrap();
        loss.double_value(&[])
    };
    tch::manual_seed(3);
    let (weight, mut optimizer) = new_run();
    let mut manager = open(dir.path(), None, None);
    let mut losses = Vec::new();
    for done in 1..=20 {
        losses.push(step(&weight, &mut optimizer));
        if done == 12 {
            let mut saved = Contents::at(done);
            let named = [("weight".to_owned(), weight.shallow_clone())];
            saved.tensors("model", Scope::Run, named).unwrap();
            saved
                .state("optimizer", Scope::Run, optimizer.state_dict().unwrap())
                .unwrap();
            let random = overdrive_autograd::random::state(Device::Cpu).unwrap();
            saved
                .tensors("random", Scope::Rank, [("cpu".to_owned(), random)])
                .unwrap();
            manager.save(saved).unwrap();
        }
    }
    drop(manager);

    let manager = open(dir.path(), None, None);
    let snapshot = manager.latest().unwrap().unwrap();
    let (weight, mut optimizer) = new_run();
    let named = [("weight".to_owned(), weight.shallow_clone())];
    snapshot.copy_into("model", Scope::Run, 0, named).unwrap();
    optimizer
        .load_state_dict(&snapshot.state("optimizer", Scope::Run, 0).unwrap())
        .unwrap();
    let random = snapshot.tensors("random", Scope::Rank, 0).unwrap();
    let random = random
        .tensor("cpu")
        .unwrap()
        .copy_to_tensor(None, Device::Cpu)
        .unwrap();
    overdrive_autograd::random::set_state(Device::Cpu, &random).unwrap();
    let again: Vec<f64> = (0..8).map(|_| step(&weight, &mut optimizer)).collect();
    assert_eq!(again, losses[12..]);
}

#[test]
fn the_newest_and_the_best_snapshot_are_kept() {
    for (limit, best, kept) in [
        (1, None, vec![6]),
        (2, None, vec![6, 5]),
        (1, Some(Best::Lowest), vec![6, 2]),
        (3, Some(Best::Lowest), vec![6, 5, 2]),
        (2, Some(Best::Highest), vec![6, 5]),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let mut manager = open(dir.path(), Some(limit), best);
        for (step, metric) in [
            (1, 3.0),
            (2, 1.0),
            (3, f64::NAN),
            (4, 2.0),
            (5, 1.5),
            (6, 9.0),
        ] {
            let mut saved = state(step, 8);
            saved.metric(metric);
            manager.save(saved).unwrap();
        }
        let outcomes = manager.wait().unwrap();
        assert!(outcomes.iter().all(|outcome| outcome.result.is_ok()));
        assert_eq!(steps(&manager), kept, "limit {limit}, {best:?}");
        let expected = best.map(|best| if best == Best::Lowest { 2 } else { 6 });
        assert_eq!(manager.best().unwrap().map(|own| own.step()), expected);
        assert!(litter(dir.path()).is_empty());
    }
}

#[test]
fn a_snapshot_of_another_model_is_refused_with_every_difference_named() {
    let dir = tempfile::tempdir().unwrap();
    let mut manager = open(dir.path(), None, None);
    manager.save(state(1, 8)).unwrap();
    manager.wait().unwrap();
    let snapshot = manager.latest().unwrap().unwrap();
    let weight = Tensor::zeros([2, 5], F32);
    let targets = [
        ("layer.weight".to_owned(), weight.shallow_clone()),
        ("head.weight".to_owned(), Tensor::zeros([3], F32)),
    ];
    let error = snapshot
        .copy_into("model", Scope::Run, 0, targets)
        .unwrap_err()
        .to_string();
    for part in [
        "`layer.bias` is in the snapshot only",
        "`layer.weight` is [2, 4] in the snapshot and [2, 5] here",
        "`head.weight` is missing in the snapshot",
        "Nothing was loaded",
    ] {
        assert!(error.contains(part), "{error}");
    }
    assert_eq!(weight, Tensor::zeros([2, 5], F32));
    let error = snapshot
        .document::<u64>("other", Scope::Run, 0)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("no entry `other.json`") && error.contains("model.safetensors"),
        "{error}"
    );
}

#[test]
fn names_that_cannot_be_files_are_refused() {
    let mut state = Contents::at(1);
    for name in ["", "a/b", "..", "ä", ".hidden"] {
        let error = state.document(name, Scope::Run, &1).unwrap_err();
        assert!(matches!(error, Error::BadName { .. }), "{name}");
    }
    assert!(state.document("manifest", Scope::Run, &1).is_err());
    state.document("one", Scope::Run, &1).unwrap();
    let error = state.file("one.json", Vec::new()).unwrap_err().to_string();
    assert!(error.contains("another entry"), "{error}");
}

#[test]
fn a_value_that_cannot_be_restored_is_not_saved() {
    let dir = tempfile::tempdir().unwrap();
    let mut manager = open(dir.path(), None, None);
    for mut losses in [vec![1.0, f64::NAN], vec![f64::INFINITY]] {
        let state = RunState::new().value("losses", &mut losses);
        let error = manager.save_state(1, None, state).unwrap_err().to_string();
        let start =
            "`losses` cannot be saved: it could not be read back from JSON, which has no NaN";
        assert!(error.starts_with(start), "{error}");
    }
    assert_eq!(manager.list().unwrap().len(), 0);
    let mut losses = vec![Some(1.0), None];
    let state = RunState::new().value("losses", &mut losses);
    manager.save_state(1, None, state).unwrap();
    assert_eq!(failures(manager.wait().unwrap()).len(), 0);
}

#[test]
fn two_runs_do_not_write_into_one_folder() {
    let dir = tempfile::tempdir().unwrap();
    let first = open(dir.path(), None, None);
    let error = SnapshotManager::open(dir.path(), SnapshotOptions::default()).unwrap_err();
    assert!(matches!(error, Error::Locked { .. }), "{error}");
    // Not "`kill …` ends it": it is this process.
    let error = error.to_string();
    assert!(
        error.contains("(this process has held the lock for "),
        "{error}"
    );
    assert!(
        error.contains("; drop the value that holds it first)"),
        "{error}"
    );
    drop(first);
    SnapshotManager::open(dir.path(), SnapshotOptions::default()).unwrap();
}

#[cfg(unix)]
#[test]
fn a_folder_that_is_moved_is_not_made_anew() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().canonicalize().unwrap();
    let (old, new) = (dir.join("run"), dir.join("moved"));
    for background in [false, true] {
        let options = SnapshotOptions {
            background,
            ..SnapshotOptions::default()
        };
        let mut manager = SnapshotManager::open(&old, options).unwrap();
        manager.save(state(1, 8)).unwrap();
        assert!(failures(manager.wait().unwrap()).is_empty());
        fs::rename(&old, &new).unwrap();
        let error = manager.save(state(2, 8)).unwrap_err();
        assert!(
            matches!(&error, Error::Moved { folder, .. } if *folder == old),
            "{error}"
        );
        if cfg!(target_os = "linux") {
            let said = format!("was moved to {} while", new.display());
            assert!(error.to_string().contains(&said), "{error}");
        }
        assert!(!old.exists());
        // Another folder under the old path is not the run's.
        fs::create_dir(&old).unwrap();
        assert!(matches!(
            manager.save(state(2, 8)),
            Err(Error::Moved { .. })
        ));
        assert_eq!(fs::read_dir(&old).unwrap().count(), 0);
        fs::remove_dir(&old).unwrap();
        // It goes on where it is moved back.
        fs::rename(&new, &old).unwrap();
        manager.save(state(2, 8)).unwrap();
        assert!(failures(manager.wait().unwrap()).is_empty());
        fs::remove_dir_all(&old).unwrap();
        let error = manager.save(state(3, 8)).unwrap_err();
        assert!(matches!(error, Error::Moved { now: None, .. }), "{error}");
        drop(manager);
        assert!(!old.exists());
    }
}

#[test]
fn a_step_that_is_saved_again_replaces_the_earlier_snapshot() {
    let dir = tempfile::tempdir().unwrap();
    let mut manager = open(dir.path(), None, None);
    manager.save(state(7, 8)).unwrap();
    manager.save(state(7, 16)).unwrap();
    assert!(failures(manager.wait().unwrap()).is_empty());
    check(&manager.latest().unwrap().unwrap(), 16);
    assert_eq!(steps(&manager), [7]);
    assert!(litter(dir.path()).is_empty());
    drop(manager);

    // A process killed between the two renames has left the old one under another name.
    let whole = dir.path().join("checkpoint-7");
    fs::rename(&whole, dir.path().join(".checkpoint-7.replaced")).unwrap();
    let manager = open(dir.path(), None, None);
    check(&manager.latest().unwrap().unwrap(), 16);
}

#[test]
fn leftovers_of_killed_runs_are_removed_and_other_folders_kept() {
    let dir = tempfile::tempdir().unwrap();
    for name in [
        ".checkpoint-3.0000000000000001.tmp",
        ".checkpoint-2.deleted",
        "checkpoint-9",
        "logs",
        ".git",
    ] {
        fs::create_dir(dir.path().join(name)).unwrap();
        fs::write(dir.path().join(name).join("model.safetensors"), "half").unwrap();
    }
    let mut manager = open(dir.path(), None, None);
    let mut left = litter(dir.path());
    left.sort();
    assert_eq!(left, [".git", "logs"]);
    let error = manager.latest().unwrap_err().to_string();
    assert!(
        error.contains("checkpoint-9 (its manifest.json is missing)"),
        "{error}"
    );
    assert!(
        dir.path().join("checkpoint-9").exists(),
        "a name is no proof of whose it is"
    );
    manager.save(state(9, 8)).unwrap();
    assert!(failures(manager.wait().unwrap()).is_empty());
    check(&manager.latest().unwrap().unwrap(), 8);
}

#[test]
fn a_folder_that_is_gone_is_an_error_and_the_last_good_snapshot_stays() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("run");
    let mut manager = open(&folder, Some(1), None);
    manager.save(state(1, 8)).unwrap();
    assert!(failures(manager.wait().unwrap()).is_empty());
    let aside = dir.path().join("aside");
    fs::rename(&folder, &aside).unwrap();
    fs::write(&folder, "not a folder").unwrap();
    let error = manager.save(state(2, 8)).unwrap_err().to_string();
    assert!(
        error.contains("nothing is written under the old path anew"),
        "{error}"
    );
    fs::remove_file(&folder).unwrap();
    fs::rename(&aside, &folder).unwrap();
    assert_eq!(manager.latest().unwrap().unwrap().step(), 1);
    manager.save(state(3, 8)).unwrap();
    assert!(failures(manager.wait().unwrap()).is_empty());
    assert_eq!(steps(&manager), [3]);
}

#[test]
fn a_file_with_the_name_of_a_snapshot_is_neither_replaced_nor_taken_for_one() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("checkpoint-5");
    fs::write(&file, "weights of mine").unwrap();
    let mut manager = open(dir.path(), Some(1), None);
    assert!(manager.latest().unwrap().is_none());
    manager.save(state(4, 8)).unwrap();
    manager.save(state(5, 8)).unwrap();
    let failed = failures(manager.wait().unwrap());
    assert!(
        matches!(&failed[..], [Error::InTheWay { path }] if *path == file),
        "{failed:?}"
    );
    assert!(failed[0].to_string().contains("move the file away"));
    manager.save(state(6, 8)).unwrap();
    assert_eq!(failures(manager.wait().unwrap()).len(), 0);
    assert_eq!(steps(&manager), [6]);
    assert_eq!(fs::read_to_string(&file).unwrap(), "weights of mine");
    assert_eq!(litter(dir.path()), [""; 0]);
    let error = Snapshot::open(&file).unwrap_err().to_string();
    assert!(error.contains("it is a file and not a folder"), "{error}");
}

/// Saves the steps 1 and 2.
fn two_steps(folder: &Path) -> SnapshotManager {
    let mut manager = open(folder, None, None);
    for step in [1, 2] {
        manager.save(state(step, 8)).unwrap();
    }
    assert!(failures(manager.wait().unwrap()).is_empty());
    manager
}

/// Changes a byte of a file.
fn flip(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(path, bytes).unwrap();
}

#[test]
fn snapshots_that_are_all_damaged_are_an_error_that_names_them() {
    let dir = tempfile::tempdir().unwrap();
    let manager = two_steps(dir.path());
    flip(&dir.path().join("checkpoint-2/model.safetensors"));
    assert_eq!(manager.latest().unwrap().unwrap().step(), 1);
    flip(&dir.path().join("checkpoint-1/manifest.json"));
    let error = manager.latest().unwrap_err();
    assert!(matches!(error, Error::NoneComplete { .. }), "{error}");
    let error = error.to_string();
    for part in [
        "checkpoint-1 (its manifest.json: ",
        "checkpoint-2 (model.safetensors: its bytes were changed)",
    ] {
        assert!(error.contains(part), "{error}");
    }
}

#[cfg(unix)]
#[test]
fn a_file_that_cannot_be_read_is_not_taken_for_a_damaged_one() {
    let dir = tempfile::tempdir().unwrap();
    let manager = two_steps(dir.path());
    let newest = dir.path().join("checkpoint-2");
    for name in ["manifest.json", "model.safetensors"] {
        let path = newest.join(name);
        fs::rename(&path, dir.path().join("aside")).unwrap();
        // A circle of links is an error of the system (ELOOP) for every user, and not a missing file.
        std::os::unix::fs::symlink(&path, &path).unwrap();
        let error = manager.latest().unwrap_err();
        assert!(
            matches!(&error, Error::Common(overdrive_core::Error::Io { .. })),
            "{error}"
        );
        assert!(error.to_string().contains(name), "{error}");
        fs::remove_file(&path).unwrap();
        fs::rename(dir.path().join("aside"), &path).unwrap();
        assert_eq!(manager.latest().unwrap().unwrap().step(), 2);
    }
    drop(manager);

    // The old snapshot of a step that is replaced is kept as well.
    let replaced = dir.path().join(".checkpoint-2.replaced");
    fs::rename(&newest, &replaced).unwrap();
    let manifest = replaced.join("manifest.json");
    fs::rename(&manifest, dir.path().join("aside")).unwrap();
    std::os::unix::fs::symlink(&manifest, &manifest).unwrap();
    SnapshotManager::open(dir.path(), SnapshotOptions::default()).unwrap_err();
    assert!(replaced.join("model.safetensors").exists());
    fs::remove_file(&manifest).unwrap();
    fs::rename(dir.path().join("aside"), &manifest).unwrap();
    let manager = open(dir.path(), None, None);
    assert_eq!(manager.latest().unwrap().unwrap().step(), 2);
}

#[test]
fn a_file_of_a_snapshot_is_found_without_a_lock_and_verified() {
    let dir = tempfile::tempdir().unwrap();
    let mut manager = open(dir.path(), None, None);
    for step in [1, 2] {
        let mut saved = state(step, 8);
        saved.file("tokenizer.json", b"{}".to_vec()).unwrap();
        manager.save(saved).unwrap();
    }
    manager.wait().unwrap();
    let listed = Snapshot::list(dir.path()).unwrap();
    assert_eq!(
        listed.iter().map(Snapshot::step).collect::<Vec<_>>(),
        [2, 1]
    );
    let path = listed[0].file("tokenizer.json").unwrap().unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"{}");
    assert_eq!(listed[0].file("config.json").unwrap(), None);
    flip(&path);
    let error = listed[0].file("tokenizer.json").unwrap_err();
    assert!(matches!(error, Error::Damaged { .. }), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any byte of any file that is changed, removed or added makes the snapshot incomplete.
    #[test]
    fn all_damage_is_detected(file in 0usize..4, place in any::<u32>(), change in 1u8.., cut in any::<u8>()) {
        let dir = tempfile::tempdir().unwrap();
        let mut manager = open(dir.path(), None, None);
        for step in [1, 2] {
            let mut saved = state(step, 64);
            saved.file("config.json", b"{}".to_vec()).unwrap();
            manager.save(saved).unwrap();
        }
        manager.wait().unwrap();
        let names = ["model.safetensors", "trainer_state.json", "config.json", "manifest.json"];
        let path = dir.path().join("checkpoint-2").join(names[file]);
        let whole = fs::read(&path).unwrap();
        let mut bytes = whole.clone();
        let place = place as usize % bytes.len();
        match cut % 4 {
            0 => bytes.truncate(place),
            1 => bytes.push(change),
            2 => { fs::remove_file(&path).unwrap(); }
            _ => bytes[place] ^= change,
        }
        if cut % 4 != 2 {
            fs::write(&path, &bytes).unwrap();
        }
        // White space of a list may change: it still says the same.
        check(&manager.latest().unwrap().expect("the first one is whole"), 64);
    }
}

/// Parts of a run, by name, in an order of its own.
fn registered<'a>(weight: &Tensor, parts: &[&str], counters: &'a mut [u64]) -> RunState<'a> {
    let named = [("weight".to_owned(), weight.shallow_clone())];
    let state = RunState::new().tensors("model", named);
    parts
        .iter()
        .zip(counters)
        .fold(state, |state, (part, counter)| state.value(part, counter))
}

#[test]
fn entries_of_one_side_only_are_named_and_nothing_is_loaded() {
    let _generator = crate::generator();
    let dir = tempfile::tempdir().unwrap();
    let mut manager = open(dir.path(), None, None);
    let weight = Tensor::ones([2], F32);
    let mut saved = [1, 2];
    let state = registered(&weight, &["scaler", "loader"], &mut saved).random_states();
    manager.save_state(3, Some(0.5), state).unwrap();
    assert!(failures(manager.wait().unwrap()).is_empty());
    let snapshot = manager.latest().unwrap().unwrap();
    assert_eq!((snapshot.step(), snapshot.metric()), (3, Some(0.5)));

    let other = Tensor::zeros([2], F32);
    let mut counters = [0, 0];
    let state = registered(&other, &["loader", "ema"], &mut counters).random_states();
    let error = manager.load_state(&snapshot, state).unwrap_err();
    assert!(matches!(error, Error::EntryMismatch { .. }), "{error}");
    let error = error.to_string();
    for part in [
        "`scaler` is in the snapshot and not registered here",
        "`ema` is registered and not in the snapshot",
        "Nothing was loaded",
    ] {
        assert!(error.contains(part), "{error}");
    }
    assert_eq!((counters, &other), ([0, 0], &Tensor::zeros([2], F32)));

    let state = registered(&other, &["loader", "scaler"], &mut counters).random_states();
    manager.load_state(&snapshot, state).unwrap();
    assert_eq!((counters, other), ([2, 1], weight));
}

#[test]
fn an_optional_entry_of_one_side_only_is_new_or_left_out() {
    let _generator = crate::generator();
    let dir = tempfile::tempdir().unwrap();
    let mut manager = open(dir.path(), None, None);
    let weight = Tensor::ones([2], F32);
    // A value with the number of its evaluations as state.
    let tracker = |evaluations| {
        let mut tracker = EarlyStopping::new(EarlyStoppingConfig::default()).unwrap();
        for step in 0..evaluations {
            tracker.observe(step, 1.0);
        }
        tracker
    };
    fn state<'a>(weight: &Tensor, own: Option<&'a mut EarlyStopping>) -> RunState<'a> {
        let named = [("weight".to_owned(), weight.shallow_clone())];
        let registered = RunState::new().tensors("model", named);
        registered.register_optional("tracker", own)
    }
    let mut run = |step, mut own: Option<EarlyStopping>| {
        if let Some(snapshot) = manager.latest().unwrap() {
            manager
                .load_state(&snapshot, state(&weight, own.as_mut()))
                .unwrap();
        }
        manager
            .save_state(step, None, state(&weight, own.as_mut()))
            .unwrap();
        assert!(failures(manager.wait().unwrap()).is_empty());
        own.map(|tracker| tracker.state_dict().evaluations)
    };
    assert_eq!(run(1, Some(tracker(3))), Some(3));
    assert_eq!(run(2, Some(tracker(0))), Some(3));
    assert_eq!(run(3, None), None);
    assert_eq!(run(4, Some(tracker(1))), Some(1));
}

#[test]
fn a_registered_run_is_restored_with_optimizer_schedule_and_random_numbers() {
    let _generator = crate::generator();
    use overdrive_optim::{LrScheduler, LrSchedulerType, Schedule, ScheduleLength};
    let dir = tempfile::tempdir().unwrap();
    let new_run = || {
        let weight = Tensor::zeros([3, 4], F32).set_requires_grad(true);
        let groups = decay_groups([("weight".to_owned(), weight.shallow_clone())], 0.1);
        let mut optimizer = AdamW::new(groups, AdamWConfig::default()).unwrap();
        let length = ScheduleLength {
            warmup_steps: 2,
            total_steps: 12,
        };
        let linear = Schedule::new(LrSchedulerType::Linear, length, 1e-3, &Default::default());
        let schedule = LrScheduler::new(linear.unwrap(), &mut optimizer).unwrap();
        (weight, optimizer, schedule)
    };
    let step = |weight: &Tensor, optimizer: &mut AdamW, schedule: &mut LrScheduler| {
        let noise = Tensor::randn([3, 4], F32);
        (weight - noise).square().mean(Kind::Float).backward();
        optimizer.step().unwrap();
        schedule.step(optimizer).unwrap();
        optimizer.zero_grad().unwrap();
        (
            Vec::<f32>::try_from(weight.detach().view([-1])).unwrap(),
            optimizer.learning_rates(),
        )
    };
    fn state<'a>(
        (weight, optimizer, schedule): &'a mut (Tensor, AdamW, LrScheduler),
    ) -> RunState<'a> {
        RunState::new()
            .tensors("model", [("weight".to_owned(), weight.shallow_clone())])
            .register("optimizer", optimizer)
            .register("lr_scheduler", schedule)
            .random_states()
            .file("config.json", "{}")
    }
    let mut manager = open(dir.path(), None, None);
    let mut run = new_run();
    for _ in 0..4 {
        step(&run.0, &mut run.1, &mut run.2);
    }
    manager.save_state(4, None, state(&mut run)).unwrap();
    let expected: Vec<_> = (0..6)
        .map(|_| step(&run.0, &mut run.1, &mut run.2))
        .collect();
    assert!(failures(manager.wait().unwrap()).is_empty());

    let mut resumed = new_run();
    let snapshot = manager.latest().unwrap().unwrap();
    manager.load_state(&snapshot, state(&mut resumed)).unwrap();
    let again: Vec<_> = (0..6)
        .map(|_| step(&resumed.0, &mut resumed.1, &mut resumed.2))
        .collect();
    assert_eq!(again, expected);
    assert!(snapshot.path().join("config.json").is_file());
}
