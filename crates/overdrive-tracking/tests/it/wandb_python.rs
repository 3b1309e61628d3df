//! An offline run of W&B, read and uploaded by the Python package `wandb`.

use std::path::Path;
use std::process::Command;

use overdrive_tracking::{StepMetrics, Tracker, Wandb, WandbOptions};
use serde_json::{Value, json};

use crate::on_python::python;

fn step(step: u64) -> StepMetrics {
    StepMetrics {
        step,
        loss: 8.3 / step as f64,
        learning_rate: 1e-3 / 3.0,
        grad_norm: (step == 2).then_some(f64::INFINITY),
        eval_loss: step.is_multiple_of(10).then_some(2.5 / step as f64),
        ..StepMetrics::default()
    }
}

fn row(metrics: &StepMetrics) -> Value {
    let mut row: serde_json::Map<_, _> = metrics
        .scalars()
        .into_iter()
        .map(|(tag, value)| (tag, json!(value)))
        .collect();
    row.insert("train/global_step".to_owned(), json!(metrics.step));
    row.insert("_step".to_owned(), json!(metrics.step));
    row.into()
}

#[test]
#[ignore = "needs Python with wandb"]
fn the_python_package_reads_and_uploads_what_was_logged_on_python() {
    let python = python(&["wandb"]);
    let folder = tempfile::tempdir().unwrap();
    let options = |config: Value| WandbOptions {
        project: Some("tiny".to_owned()),
        name: Some("tiny-001".to_owned()),
        group: Some("group".to_owned()),
        job_type: Some("train".to_owned()),
        notes: Some("Zwei Wörter".to_owned()),
        tags: vec!["a".to_owned(), "b".to_owned()],
        config: config.as_object().unwrap().clone(),
        ..WandbOptions::default()
    };
    let config =
        json!({ "seed": 42, "model": { "hidden_size": 256, "rope": [1.5, null] }, "bf16": false });
    let mut tracker = Wandb::create(folder.path(), options(config)).unwrap();
    // Enough steps for several blocks, which records cross.
    for number in 1..=400 {
        tracker.log(&step(number)).unwrap();
    }
    tracker.finish().unwrap();
    drop(tracker);
    // The run resumes from step 300 with another option.
    let mut tracker = Wandb::resume(folder.path(), 300, options(json!({ "seed": 43 }))).unwrap();
    for number in 301..=500 {
        tracker.log(&step(number)).unwrap();
    }
    let sample = "fn main() { println!(\"…\") }\n".repeat(3000);
    tracker.log_text(500, "sample", &sample).unwrap();
    tracker.finish().unwrap();

    let steps: Vec<StepMetrics> = (1..=500).map(step).collect();
    let mut summary = serde_json::Map::new();
    for metrics in &steps {
        summary.extend(row(metrics).as_object().unwrap().clone());
    }
    summary.insert("sample".to_owned(), sample.into());
    let expected = json!({
        "run_id": tracker.run_id(), "project": "tiny", "entity": "", "display_name": "tiny-001", "run_group": "group",
        "job_type": "train", "notes": "Zwei Wörter", "tags": ["a", "b"], "exit_code": 0, "summary": summary,
        "config": { "seed": 43, "model": { "hidden_size": 256, "rope": [1.5, null] }, "bf16": false },
        "history": steps.iter().map(row).collect::<Vec<_>>(),
    });
    let file = folder.path().join("expected.json");
    std::fs::write(&file, expected.to_string()).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python/wandb_run.py");
    let run = tracker.path().parent().unwrap();
    let output = Command::new(&python)
        .arg(script)
        .arg(run)
        .arg(file)
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}{errors}");
    println!("{printed}");
    assert!(printed.contains("all values agree with wandb"), "{printed}");
}
