//! The destinations of `report_to` in a run folder.

use std::fs;

use overdrive_trainer::{Preset, ReportTo, RunFolder, TrainingArguments};

#[test]
fn a_destination_that_was_not_built_is_an_error_that_names_the_feature() {
    for destination in ReportTo::ALL {
        let arguments = TrainingArguments {
            report_to: vec![destination],
            ..Preset::Tiny.arguments()
        };
        let name = destination.name();
        match (destination.is_built(), arguments.validate()) {
            (true, checked) => checked.expect("it was built"),
            (false, checked) => assert_eq!(
                checked.expect_err("it was not built").to_string(),
                format!(
                    "`report_to` is {name}; it must be a destination that this program was built with; build it with \
                     `--features {name}`, or leave it out"
                )
            ),
        }
    }
}

#[test]
fn files_of_trackers_are_those_of_a_run() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let root = folder.path().join("mine");
    let arguments = TrainingArguments {
        output_dir: Some(root.clone()),
        ..Preset::Tiny.arguments()
    };
    for name in ["wandb", "mlflow_run_id"] {
        fs::create_dir_all(root.join(name)).expect("made");
        let error = RunFolder::create(&arguments).expect_err(name).to_string();
        assert!(error.contains("is in the way"), "{error}");
        fs::remove_dir(root.join(name)).expect("removed");
    }
    let run = RunFolder::create(&arguments).expect("made");
    fs::create_dir(run.wandb()).expect("made");
    fs::write(run.mlflow_run_id(), "0a1b\n").expect("writes");
    drop(run);
    let run = RunFolder::create(&TrainingArguments {
        overwrite_output_dir: true,
        ..arguments
    })
    .expect("replaced");
    assert!(!run.wandb().exists() && !run.mlflow_run_id().exists());
}

#[cfg(feature = "wandb")]
#[test]
fn an_offline_run_of_wandb_has_the_configuration_and_continues_in_a_resumed_run() {
    use overdrive_distributed::ProcessGroup;
    use overdrive_tracking::{StepMetrics, Tracker};

    let folder = tempfile::tempdir().expect("temporary folder");
    let arguments = TrainingArguments {
        output_dir: Some(folder.path().join("mine")),
        report_to: vec![ReportTo::Wandb],
        ..Preset::Tiny.arguments()
    };
    let run = RunFolder::create(&arguments).expect("made");
    for resumed_step in [0, 1] {
        let group = ProcessGroup::single();
        let trackers = run.trackers(&group, &arguments, resumed_step);
        let mut trackers = trackers.expect("opened");
        let metrics = StepMetrics {
            step: resumed_step + 1,
            loss: 2.5,
            ..StepMetrics::default()
        };
        trackers.log(&metrics).expect("logged");
        trackers.finish().expect("finished");
        drop(trackers);
        let entries = fs::read_dir(run.wandb()).expect("a folder");
        let folders: Vec<_> = entries
            .map(|entry| entry.expect("an entry").path())
            .collect();
        let [folder] = &folders[..] else {
            panic!("one run: {folders:?}")
        };
        let mut files = fs::read_dir(folder).expect("a folder");
        let file = files.next().expect("a file").expect("an entry").path();
        let bytes = fs::read(file).expect("reads");
        let has = |text: &str| {
            bytes
                .windows(text.len())
                .any(|part| part == text.as_bytes())
        };
        assert!(has("learning_rate") && has("mine") && has("train/loss"));
    }
}

#[cfg(feature = "mlflow")]
#[test]
fn a_new_run_does_not_continue_the_run_of_mlflow_that_an_earlier_one_has_left() {
    use overdrive_distributed::ProcessGroup;

    let folder = tempfile::tempdir().expect("temporary folder");
    let arguments = TrainingArguments {
        output_dir: Some(folder.path().join("mine")),
        report_to: vec![ReportTo::MlFlow],
        ..Preset::Tiny.arguments()
    };
    let elsewhere = TrainingArguments {
        report_to: Vec::new(),
        ..arguments.clone()
    };
    if std::env::var_os("MLFLOW_TRACKING_URI").is_none() {
        let error = RunFolder::create(&arguments).expect_err("no address");
        assert!(error.to_string().contains("`tracking_uri` is \"\""));
        assert!(!folder.path().join("mine").exists());
    }
    let run = RunFolder::create(&elsewhere).expect("made");
    fs::write(run.mlflow_run_id(), "not an ID").expect("writes");
    // Without the variable of its address the destination is an error, which comes before the network.
    let open = |step| run.trackers(&ProcessGroup::single(), &arguments, step);
    if std::env::var_os("MLFLOW_TRACKING_URI").is_none() {
        let error = open(1).expect_err("no address").to_string();
        assert!(error.contains("`tracking_uri` is \"\""), "{error}");
        assert!(run.mlflow_run_id().exists());
        let _ = open(0).expect_err("no address");
        assert!(!run.mlflow_run_id().exists());
    }
}
