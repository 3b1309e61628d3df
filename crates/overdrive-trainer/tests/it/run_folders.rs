//! Run folders that are new, that exist already, or that another program has written.

use std::fs;
use std::path::Path;

use overdrive_distributed::ProcessGroup;
use overdrive_trainer::{
    DpoArguments, Error, FinetuneArguments, Layers, Preset, ResumeFromCheckpoint, RunFolder,
    TrainingArguments,
};

fn arguments(root: &Path) -> TrainingArguments {
    TrainingArguments {
        output_dir: Some(root.to_owned()),
        ..Preset::Tiny.arguments()
    }
}

#[test]
fn a_run_folder_knows_its_files_and_holds_the_configuration() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let root = folder.path().join("a/b");
    let run = RunFolder::create(&arguments(&root)).expect("made");
    assert_eq!(run.root(), root);
    let names = [
        (run.metrics(), "metrics.jsonl"),
        (run.report(), "report.html"),
        (run.loss(), "loss.svg"),
        (run.tensorboard(), "tensorboard"),
        (run.model(), "model"),
    ];
    for (path, name) in names {
        assert_eq!(path, root.join(name));
        assert!(!path.exists(), "{name} is the program's to write");
    }
    let stored = Layers::new(Preset::Small)
        .file(run.arguments())
        .expect("reads");
    assert_eq!(stored.resolve().expect("valid"), arguments(&root));
    assert_eq!(RunFolder::open(&root).expect("there").root(), run.root());
}

#[test]
fn a_folder_that_holds_a_run_is_kept_unless_told_otherwise() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let root = folder.path().join("mine");
    let run = RunFolder::create(&arguments(&root)).expect("made");
    fs::write(run.metrics(), "{}\n").expect("writes");
    fs::create_dir(run.model()).expect("made");
    fs::write(run.model().join("config.json"), "{}").expect("writes");
    fs::write(root.join("notes.txt"), "mine").expect("writes");

    let error = RunFolder::create(&arguments(&root)).expect_err("it is there");
    let text = error.to_string();
    assert!(
        text.contains("already holds a run; choose another folder with `--out DIR`"),
        "{text}"
    );
    assert!(text.contains("`--overwrite`"), "{text}");
    assert!(run.metrics().exists(), "nothing was touched");
    // That run has ended.
    drop(run);

    let overwriting = TrainingArguments {
        overwrite_output_dir: true,
        ..arguments(&root)
    };
    let run = RunFolder::create(&overwriting).expect("replaced");
    assert!(!run.metrics().exists() && !run.model().exists());
    assert!(run.arguments().is_file());
    assert_eq!(
        fs::read_to_string(root.join("notes.txt")).expect("kept"),
        "mine"
    );
}

#[test]
fn files_of_others_are_never_replaced() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let model = folder.path().join("model");
    fs::create_dir(&model).expect("made");
    for overwrite_output_dir in [false, true] {
        let arguments = TrainingArguments {
            overwrite_output_dir,
            ..arguments(folder.path())
        };
        let error = RunFolder::create(&arguments).expect_err("a model is in the way");
        assert!(
            matches!(&error, Error::InTheWay { path } if *path == model),
            "{error:?}"
        );
    }
    assert!(model.is_dir());
}

#[test]
fn snapshots_of_another_program_are_never_replaced() {
    for name in ["checkpoint-500", "abandoned-1"] {
        let folder = tempfile::tempdir().expect("temporary folder");
        let snapshot = folder.path().join(name);
        fs::create_dir(&snapshot).expect("made");
        fs::write(snapshot.join("trainer_state.json"), "{}").expect("writes");
        for overwrite_output_dir in [false, true] {
            let arguments = TrainingArguments {
                overwrite_output_dir,
                ..arguments(folder.path())
            };
            let error = RunFolder::create(&arguments).expect_err("a snapshot is in the way");
            assert!(
                matches!(&error, Error::InTheWay { path } if *path == snapshot),
                "{error:?}"
            );
        }
        // Nothing else was written: no lock, no configuration.
        let names: Vec<_> = contents(folder.path()).into_iter().collect();
        assert_eq!(names, [(name.to_owned(), Vec::new())]);
        assert!(snapshot.join("trainer_state.json").is_file());
    }
}

#[test]
fn a_file_with_the_name_of_a_snapshot_is_in_the_way_of_every_new_run() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let file = folder.path().join("checkpoint-500");
    fs::write(&file, "mine").expect("writes");
    let overwriting = TrainingArguments {
        overwrite_output_dir: true,
        ..arguments(folder.path())
    };
    let refused = |arguments: &TrainingArguments| {
        let error = RunFolder::create(arguments).expect_err("a file is in the way");
        assert!(
            matches!(&error, Error::InTheWay { path } if *path == file),
            "{error:?}"
        );
    };
    refused(&arguments(folder.path()));
    refused(&overwriting);
    fs::remove_file(&file).expect("removed");
    drop(RunFolder::create(&overwriting).expect("made"));
    // Beside a run too: it is not one of that run's files.
    fs::write(&file, "mine").expect("writes");
    refused(&overwriting);
    assert_eq!(fs::read(&file).expect("kept"), b"mine");
}

#[test]
fn an_empty_folder_and_one_with_other_files_may_hold_a_run() {
    let folder = tempfile::tempdir().expect("temporary folder");
    fs::write(folder.path().join("notes.txt"), "mine").expect("writes");
    fs::create_dir(folder.path().join("checkpoint-500-keep")).expect("made");
    RunFolder::create(&arguments(folder.path())).expect("made");
}

#[test]
fn a_file_in_place_of_the_folder_is_an_error_with_its_name() {
    let file = tempfile::NamedTempFile::new().expect("temporary file");
    let error = RunFolder::create(&arguments(file.path())).expect_err("a file");
    assert!(error.to_string().contains("is in the way"), "{error}");
    let below = RunFolder::create(&arguments(&file.path().join("run"))).expect_err("below a file");
    let text = below.to_string();
    assert!(
        text.starts_with("cannot write into ") && text.contains("--out DIR"),
        "{text}"
    );
}

#[test]
fn a_run_that_has_logged_no_step_gives_its_folder_to_the_next_one() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let root = folder.path().join("mine");
    let failed = RunFolder::create(&arguments(&root)).expect("made");
    fs::write(failed.metrics(), "").expect("writes");
    fs::create_dir(failed.tensorboard()).expect("made");
    let error = RunFolder::create(&arguments(&root)).expect_err("it is still running");
    assert!(error.to_string().contains("another run"), "{error}");
    drop(failed);
    let next = RunFolder::create(&arguments(&root)).expect("nothing is lost");
    assert!(!next.tensorboard().exists());
    fs::create_dir(root.join("checkpoint-1")).expect("made");
    drop(next);
    RunFolder::create(&arguments(&root)).expect_err("a snapshot may be resumed");
}

#[test]
fn what_a_run_reads_is_not_removed_with_the_run_that_it_overwrites() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let run = RunFolder::create(&arguments(folder.path())).expect("made");
    fs::create_dir(run.model()).expect("made");
    let text = run.model().join("train.jsonl");
    fs::write(&text, "{}").expect("written");
    drop(run);
    let mut overwriting = TrainingArguments {
        overwrite_output_dir: true,
        data: vec![text.clone()],
        ..arguments(folder.path())
    };
    let error = RunFolder::create(&overwriting).expect_err("it would remove the data");
    let error = error.to_string();
    assert!(
        error.contains("(`data`), which would be removed"),
        "{error}"
    );
    let tuned = FinetuneArguments {
        model_name_or_path: folder.path().join("model"),
        training: TrainingArguments {
            data: Vec::new(),
            ..overwriting.clone()
        },
        ..FinetuneArguments::default()
    };
    let error = RunFolder::create(&tuned).expect_err("it would remove the model");
    assert!(error.to_string().contains("(`model_name_or_path`)"));
    assert!(text.exists());
    overwriting.data.clear();
    RunFolder::create(&overwriting).expect("overwritten");
    assert!(!text.exists());
}

#[test]
fn a_fine_tuning_into_the_folder_of_a_model_is_refused_before_anything_is_loaded() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let [model, other] = ["model", "other"].map(|name| folder.path().join(name));
    for folder in [&model, &other] {
        fs::create_dir(folder).expect("made");
        fs::write(folder.join("config.json"), "{}").expect("written");
    }
    for (root, expected) in [
        (&model, "which it would overwrite"),
        (&other, "did not write"),
    ] {
        let tuned = FinetuneArguments {
            model_name_or_path: model.clone(),
            training: arguments(root),
            ..FinetuneArguments::default()
        };
        let preferred = DpoArguments {
            finetune: tuned.clone(),
            ..DpoArguments::default()
        };
        for refused in [RunFolder::check(&tuned), RunFolder::check(&preferred)] {
            let error = refused.expect_err("a model is there").to_string();
            assert!(error.contains(expected), "{error}");
        }
        // A run of training does not write there.
        RunFolder::check(&arguments(root)).expect("free");
        assert_eq!(contents(root).len(), 1);
    }
}

#[test]
fn a_run_that_cannot_start_leaves_no_folder() {
    let parent = tempfile::tempdir().expect("temporary folder");
    let root = parent.path().join("run");
    let resumed = TrainingArguments {
        resume_from_checkpoint: Some(ResumeFromCheckpoint::Folder(parent.path().join("none"))),
        ..arguments(&root)
    };
    let error = RunFolder::open_or_create(&ProcessGroup::single(), &resumed);
    let error = error.expect_err("there is no such snapshot").to_string();
    assert!(error.contains("is not a complete snapshot"), "{error}");
    assert!(!root.exists());
}

#[test]
fn a_folder_without_a_run_cannot_be_opened_as_one() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let text = RunFolder::open(folder.path())
        .expect_err("no run")
        .to_string();
    assert!(
        text.ends_with("holds no run: training_args.json is missing; give the folder of a run"),
        "{text}"
    );
}

/// Returns the names and contents of all files in the folder.
fn contents(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir(folder).expect("a folder");
    let mut found: Vec<_> = entries
        .map(|entry| {
            let path = entry.expect("an entry").path();
            let name = path.file_name().expect("a name").to_string_lossy();
            (name.into_owned(), fs::read(&path).unwrap_or_default())
        })
        .collect();
    found.sort();
    found
}

#[test]
fn a_run_that_is_still_running_is_neither_overwritten_nor_resumed() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let root = folder.path().join("mine");
    let live = RunFolder::create(&arguments(&root)).expect("made");
    fs::write(live.metrics(), "{}\n").expect("writes");
    fs::create_dir(root.join("checkpoint-5")).expect("made");
    let before = contents(&root);

    let group = ProcessGroup::single();
    let overwriting = TrainingArguments {
        overwrite_output_dir: true,
        seed: 7,
        ..arguments(&root)
    };
    let resuming = TrainingArguments {
        resume_from_checkpoint: Some(ResumeFromCheckpoint::Latest(true)),
        seed: 7,
        ..arguments(&root)
    };
    let tuning = FinetuneArguments {
        training: overwriting.clone(),
        ..FinetuneArguments::default()
    };
    // The copy of another process: it does not hold the lock.
    let opened = RunFolder::open(&root).expect("a run");
    let refused = [
        RunFolder::create(&overwriting).map(drop),
        RunFolder::open_or_create(&group, &resuming).map(drop),
        RunFolder::create(&tuning).map(drop),
        opened.snapshots(&group, &resuming).map(drop),
        opened.trackers(&group, &resuming, 0).map(drop),
    ];
    for (number, outcome) in refused.into_iter().enumerate() {
        let error = outcome.expect_err("it is still running");
        assert!(
            matches!(
                error,
                Error::Snapshot(overdrive_snapshot::Error::Locked { .. })
            ),
            "{number}: {error}"
        );
        assert_eq!(contents(&root), before, "{number}: nothing was touched");
    }

    // A clone, and the snapshots of the run itself, share its lock.
    let snapshots = live.clone().snapshots(&group, &resuming).expect("its own");
    drop(live);
    assert!(RunFolder::create(&overwriting).is_err());
    drop(snapshots);
    RunFolder::create(&overwriting).expect("it has ended");
    assert!(!root.join("checkpoint-5").exists());
}

#[test]
fn a_snapshot_of_an_abandoned_branch_belongs_to_its_run() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let root = folder.path().join("mine");
    drop(RunFolder::create(&arguments(&root)).expect("made"));
    for snapshot in ["checkpoint-5", "abandoned-1/checkpoint-9"] {
        let resuming = TrainingArguments {
            output_dir: None,
            resume_from_checkpoint: Some(ResumeFromCheckpoint::Folder(root.join(snapshot))),
            ..arguments(&root)
        };
        let run = RunFolder::open_or_create(&ProcessGroup::single(), &resuming);
        assert_eq!(run.expect("resumed").root(), root, "{snapshot}");
    }
}

#[test]
fn the_configuration_is_replaced_and_not_written_in_place() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let root = folder.path().join("mine");
    let group = ProcessGroup::single();
    let resuming = TrainingArguments {
        resume_from_checkpoint: Some(ResumeFromCheckpoint::Latest(true)),
        ..arguments(&root)
    };
    let written = |run: RunFolder| fs::read(run.arguments()).expect("there");
    let first = written(RunFolder::open_or_create(&group, &resuming).expect("made"));
    // A second name of the first file: its bytes stay, because the new ones are in another file.
    let old = folder.path().join("old");
    fs::hard_link(root.join("training_args.json"), &old).expect("links");
    let other = TrainingArguments {
        seed: 7,
        ..resuming
    };
    let second = written(RunFolder::open_or_create(&group, &other).expect("resumed"));
    assert_ne!(first, second);
    assert_eq!(fs::read(&old).expect("there"), first);

    let tuning = FinetuneArguments {
        training: other,
        ..FinetuneArguments::default()
    };
    fs::remove_file(&old).expect("removed");
    fs::hard_link(root.join("training_args.json"), &old).expect("links");
    let third = written(RunFolder::open_or_create(&group, &tuning).expect("resumed"));
    assert_ne!(second, third);
    assert_eq!(fs::read(&old).expect("there"), second);
}

#[cfg(unix)]
#[test]
fn a_run_whose_folder_is_moved_ends_with_an_error_and_makes_no_second_one() {
    use overdrive_datasets::{DataLoader, DataLoaderOptions, DeviceLoader, InMemory};
    use overdrive_trainer::{IntervalStrategy, RunOptions, SaveStrategy, TrainingRun};
    use tch::nn::{self, Module};
    use tch::{Device, Reduction, Tensor};

    for save_strategy in [SaveStrategy::Steps, SaveStrategy::No] {
        let folder = tempfile::tempdir().expect("temporary folder");
        let (old, new) = (folder.path().join("mine"), folder.path().join("moved"));
        let arguments = TrainingArguments {
            max_steps: 20,
            logging_steps: 2.0,
            save_strategy,
            save_steps: 4.0,
            per_device_train_batch_size: 4,
            gradient_accumulation_steps: 1,
            eval_strategy: IntervalStrategy::No,
            ..arguments(&old)
        };
        let run = RunFolder::create(&arguments).expect("made");
        let store = nn::VarStore::new(Device::Cpu);
        let model = nn::linear(store.root(), 1, 1, Default::default());
        let numbers: Vec<f32> = (0..64u8).map(|number| f32::from(number) / 64.0).collect();
        let options = DataLoaderOptions {
            batch_size: 4,
            ..Default::default()
        };
        let collate = |rows: Vec<f32>| Ok(Tensor::from_slice(&rows).view([-1, 1]));
        let loader = DataLoader::with_collate(InMemory(numbers), collate, options);
        let mut loader = DeviceLoader::new(loader.expect("a loader"), Device::Cpu);
        let parameters = store.variables().into_iter().collect();
        let options = RunOptions {
            folder: Some(run),
            interrupt: Some(overdrive_trainer::Interrupt::manual()),
            silent: true,
            ..RunOptions::default()
        };
        let group = ProcessGroup::single();
        let mut run = TrainingRun::start(&arguments, &group, parameters, &mut loader, options)
            .expect("starts");
        let error = loop {
            if run.steps() == 5 {
                fs::rename(&old, &new).expect("moves");
            }
            let batches = match run.next_batches(&mut loader) {
                Ok(batches) => batches.expect("it does not come to its end"),
                Err(error) => break error,
            };
            let x = &batches[0];
            let loss = run.forward(|| model.forward(x).f_mse_loss(x, Reduction::Mean));
            run.backward(&loss.expect("a loss")).expect("gradients");
            run.step().expect("a step");
        };
        assert!(
            matches!(
                &error,
                Error::Snapshot(overdrive_snapshot::Error::Moved { folder, .. }) if *folder == old
            ),
            "{error}"
        );
        assert_eq!(run.steps(), 6, "the next line of the log");
        drop(run);
        assert!(!old.exists());
        assert!(new.join("metrics.jsonl").exists());
    }
}
