//! Offline runs of W&B, written and resumed.

use std::fs;
use std::path::Path;

use overdrive_tracking::{StepMetrics, Tracker, Wandb, WandbOptions};
use serde_json::json;

fn step(step: u64) -> StepMetrics {
    StepMetrics {
        step,
        loss: 8.0 / step as f64,
        ..StepMetrics::default()
    }
}

fn options() -> WandbOptions {
    WandbOptions {
        project: Some("tiny".to_owned()),
        config: json!({ "seed": 42 }).as_object().unwrap().clone(),
        ..WandbOptions::default()
    }
}

fn runs(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder.join("wandb")).unwrap();
    entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

/// Returns the number of times that a text is in a file.
fn count(path: &Path, text: &str) -> usize {
    let bytes = fs::read(path).unwrap();
    bytes
        .windows(text.len())
        .filter(|window| *window == text.as_bytes())
        .count()
}

#[test]
fn the_folder_has_the_names_of_wandb() {
    let folder = tempfile::tempdir().unwrap();
    let tracker = Wandb::create(folder.path(), options()).unwrap();
    let id = tracker.run_id().to_owned();
    assert!(
        id.len() == 8 && id.bytes().all(|byte| byte.is_ascii_alphanumeric()),
        "{id}"
    );
    let names = runs(folder.path());
    let [name] = &names[..] else {
        panic!("one run")
    };
    let time = name
        .strip_prefix("offline-run-")
        .unwrap()
        .strip_suffix(&format!("-{id}"))
        .unwrap();
    let (date, clock) = time.split_once('_').unwrap();
    assert_eq!((date.len(), clock.len()), (8, 6), "{name}");
    assert!(
        date.bytes()
            .chain(clock.bytes())
            .all(|byte| byte.is_ascii_digit()),
        "{name}"
    );
    assert!(tracker.path().ends_with(format!("{name}/run-{id}.wandb")));
}

#[test]
fn a_resumed_run_continues_its_file_and_drops_what_follows_the_step() {
    let folder = tempfile::tempdir().unwrap();
    let mut tracker = Wandb::create(folder.path(), options()).unwrap();
    for number in 1..=4 {
        tracker.log(&step(number)).unwrap();
    }
    tracker.finish().unwrap();
    let whole = fs::read(tracker.path()).unwrap();
    // After `finish`, a record replaces the end of the run, which follows again.
    tracker.log(&step(5)).unwrap();
    drop(tracker);

    let mut resumed = Wandb::resume(folder.path(), 4, WandbOptions::default()).unwrap();
    let path = resumed.path().to_owned();
    let kept = fs::read(&path).unwrap();
    assert_eq!(kept, whole[..kept.len()], "all but the end of the run");
    // In the history and the summary, each time also in `train/global_step`.
    assert_eq!(count(&path, "_step"), 16, "four steps");
    resumed.log(&step(5)).unwrap();
    resumed.finish().unwrap();
    drop(resumed);
    assert_eq!(count(&path, "_step"), 20, "five steps");

    let resumed = Wandb::resume(folder.path(), 0, options()).unwrap();
    assert_eq!((runs(folder.path()).len(), count(&path, "_step")), (1, 0));
    drop(resumed);
    // A file whose beginning is damaged is left alone.
    fs::write(&path, "damaged").unwrap();
    let fresh = Wandb::resume(folder.path(), 3, options()).unwrap();
    assert_ne!(fresh.path(), path);
    assert_eq!(fs::read(&path).unwrap(), b"damaged");
}

#[test]
fn a_run_that_is_finished_twice_and_goes_on_keeps_every_step() {
    let folder = tempfile::tempdir().unwrap();
    let mut tracker = Wandb::create(folder.path(), options()).unwrap();
    tracker.log(&step(1)).unwrap();
    tracker.finish().unwrap();
    let once = fs::metadata(tracker.path()).unwrap().len();
    tracker.finish().unwrap();
    assert_eq!(fs::metadata(tracker.path()).unwrap().len(), once, "one end");
    tracker.log(&step(2)).unwrap();
    drop(tracker);

    // A resumed run reads its file up to the first end.
    let resumed = Wandb::resume(folder.path(), 2, WandbOptions::default()).unwrap();
    assert_eq!(count(resumed.path(), "_step"), 8, "two steps");
}

#[test]
fn a_folder_that_cannot_be_made_is_an_error_with_its_path() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let error = Wandb::create(file.path(), options())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains(&file.path().display().to_string()),
        "{error}"
    );
    let error = Wandb::resume(file.path(), 1, options())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains(&file.path().display().to_string()),
        "{error}"
    );
}
