//! Runs that resume with other data, another tokenizer, other arguments, or from damaged snapshots.

use std::fs;

use anyhow::Result;
use overdrive::distributed::ProcessGroup;
use overdrive::trainer::{RunFolder, TextData, TrainingArguments};

use crate::alone;
use crate::resume::{arguments, latest, train_whole};

/// A text whose most frequent pairs of letters are others than those of the runs' text.
const OTHER_TEXT: &str = "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.\n";

#[test]
fn a_run_on_changed_data_is_refused_by_name_or_resumes_with_its_tokenizer() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let first = arguments(dir.path());
    let (trained, _) = train_whole(dir.path(), &first, "run");
    trained.unwrap();
    let run = dir.path().join("run");
    let written =
        || ["metrics.jsonl", "training_args.json"].map(|name| fs::read(run.join(name)).unwrap());
    let before = written();

    // Other pairs of letters are now the most frequent ones: a new tokenizer of the same size has other ids.
    fs::write(dir.path().join("text/60.txt"), OTHER_TEXT.repeat(200)).unwrap();
    let resumed = TrainingArguments {
        resume_from_checkpoint: latest(),
        max_steps: 14,
        ..first
    };
    let (refused, _) = train_whole(dir.path(), &resumed, "run");
    let error = refused.unwrap_err().to_string();
    for part in [
        "checkpoint-12 was saved with other inputs: `data` was ",
        "--resume-with-changes",
    ] {
        assert!(error.contains(part), "{error}");
    }
    assert!(!error.contains("`tokenizer`"), "{error}");
    assert!(written() == before, "a refused run was changed");

    let changed = TrainingArguments {
        resume_with_changes: true,
        ..resumed.clone()
    };
    let (trained, _) = train_whole(dir.path(), &changed, "run");
    assert_eq!(trained.unwrap().resumed_step, 12);
    let tokenizer = |step| fs::read(run.join(format!("checkpoint-{step}/tokenizer.json"))).unwrap();
    assert!(
        tokenizer(12) == tokenizer(14),
        "the ids of the tokens changed"
    );
    // The new snapshot is one of the changed data.
    let longer = TrainingArguments {
        max_steps: 15,
        ..resumed
    };
    let (trained, _) = train_whole(dir.path(), &longer, "run");
    assert_eq!(trained.unwrap().resumed_step, 14);
}

#[test]
fn arguments_that_the_state_depends_on_are_refused_by_name_and_the_others_are_free() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let first = TrainingArguments {
        max_steps: 2,
        output_dir: Some(dir.path().join("run")),
        ..arguments(dir.path())
    };
    let (trained, _) = train_whole(dir.path(), &first, "run");
    trained.unwrap();
    let group = ProcessGroup::single();
    let resume = |change: &dyn Fn(&mut TrainingArguments)| -> Result<Option<u64>> {
        let mut arguments = TrainingArguments {
            resume_from_checkpoint: latest(),
            ..first.clone()
        };
        change(&mut arguments);
        let data = TextData::prepare_in(&dir.path().join("cache"), &arguments, |_| {})?;
        let fingerprints = data.fingerprints(&arguments, &group)?;
        let snapshots = RunFolder::open(dir.path().join("run"))?.snapshots(&group, &arguments)?;
        let found = arguments.snapshot_to_resume(&snapshots, &fingerprints)?;
        Ok(found.map(|snapshot| snapshot.step()))
    };
    // A tokenizer of the same size that was trained on other text.
    let other_text = dir.path().join("other.txt");
    fs::write(&other_text, OTHER_TEXT.repeat(200)).unwrap();
    let other = TrainingArguments {
        data: vec![other_text],
        ..first.clone()
    };
    let data = TextData::prepare_in(&dir.path().join("cache"), &other, |_| {}).unwrap();
    let other_tokenizer = dir.path().join("tokenizer");
    data.save_tokenizer(&other_tokenizer, &other).unwrap();
    type Change<'c> = &'c dyn Fn(&mut TrainingArguments);
    let refused: [(&str, Change<'_>); 8] = [
        ("`context_length` was 32 and is 16", &|a| {
            a.context_length = 16;
        }),
        ("`seed` was 42 and is 7", &|a| a.seed = 7),
        ("`validation_fraction` was 0.2 and is 0.3", &|a| {
            a.validation_fraction = 0.3;
        }),
        ("`packing` was false and is true", &|a| a.packing = true),
        ("`sequences` was windows and is documents", &|a| {
            a.padding_free = true;
        }),
        ("`vocab_size` was 300 and is 310", &|a| a.vocab_size = 310),
        // The weights have the same shapes with any number of heads.
        ("`model.num_attention_heads` was 2 and is 4", &|a| {
            a.model.num_attention_heads = 4;
        }),
        ("`tokenizer` was ", &|a| {
            a.tokenizer = Some(other_tokenizer.clone());
        }),
    ];
    for (expected, change) in refused {
        let error = resume(change).unwrap_err().to_string();
        assert!(error.contains(expected), "{expected}: {error}");
        let changed = resume(&|arguments| {
            change(arguments);
            arguments.resume_with_changes = true;
        });
        assert_eq!(changed.unwrap(), Some(2), "{expected}");
    }
    // The same text in a folder of another name, written now.
    let moved = dir.path().join("moved");
    fs::create_dir(&moved).unwrap();
    for entry in fs::read_dir(dir.path().join("text")).unwrap() {
        let path = entry.unwrap().path();
        let name = format!("doc-{}", path.file_name().unwrap().to_string_lossy());
        fs::write(moved.join(name), fs::read(&path).unwrap()).unwrap();
    }
    let stored = dir.path().join("run/checkpoint-2/tokenizer.json");
    let free: [Change<'_>; 6] = [
        &|_| {},
        &|a| a.data = vec![moved.clone()],
        &|a| a.tokenizer = Some(stored.clone()),
        &|a| {
            a.learning_rate = 1e-4;
            a.max_steps = 50;
            a.logging_steps = 7.0;
        },
        &|a| {
            a.per_device_train_batch_size = 1;
            a.gradient_accumulation_steps = 4;
        },
        &|a| a.dataloader_num_workers = 2,
    ];
    for (number, change) in free.into_iter().enumerate() {
        assert_eq!(resume(change).unwrap(), Some(2), "{number}");
    }

    // The snapshot that is selected is compared as well, whichever was listed before.
    let new = TrainingArguments {
        seed: 7,
        ..first.clone()
    };
    let data = TextData::prepare_in(&dir.path().join("cache"), &new, |_| {}).unwrap();
    let fingerprints = data.fingerprints(&new, &group).unwrap();
    let resumed = TrainingArguments {
        resume_from_checkpoint: latest(),
        ..new
    };
    let folder = RunFolder::open(dir.path().join("run")).unwrap();
    let snapshots = folder.snapshots(&group, &resumed).unwrap();
    let error = resumed.snapshot_to_resume(&snapshots, &fingerprints);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("`seed` was 42 and is 7"), "{error}");
}

#[test]
fn a_run_whose_snapshots_are_damaged_fails_and_keeps_its_metrics() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let resumed = TrainingArguments {
        resume_from_checkpoint: latest(),
        ..arguments(dir.path())
    };
    train_whole(dir.path(), &resumed, "run").0.unwrap();
    let run = dir.path().join("run");
    let metrics = fs::read(run.join("metrics.jsonl")).unwrap();
    for step in [5, 10, 12] {
        let path = run.join(format!("checkpoint-{step}/model.safetensors"));
        let mut bytes = fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&path, bytes).unwrap();
    }
    let (refused, _) = train_whole(dir.path(), &resumed, "run");
    let error = refused.unwrap_err().to_string();
    for part in [
        "no snapshot in ",
        "checkpoint-5 (model.safetensors: its bytes were changed)",
        "checkpoint-12 (",
    ] {
        assert!(error.contains(part), "{error}");
    }
    assert_eq!(fs::read(run.join("metrics.jsonl")).unwrap(), metrics);
}
