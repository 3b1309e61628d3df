//! Run folders that are new, that exist already, or that another program has written.

use std::fs;
use std::path::Path;

use overdrive_trainer::{Error, Layers, Preset, RunFolder, TrainingArguments};

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
    assert_eq!(RunFolder::open(&root).expect("there"), run);
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
fn an_empty_folder_and_one_with_other_files_may_hold_a_run() {
    let folder = tempfile::tempdir().expect("temporary folder");
    fs::write(folder.path().join("notes.txt"), "mine").expect("writes");
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
fn a_folder_without_a_run_cannot_be_opened_as_one() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let text = RunFolder::open(folder.path())
        .expect_err("no run")
        .to_string();
    assert!(
        text.ends_with("holds no run: training_args.json is missing"),
        "{text}"
    );
}
