//! The example `classify` learns from a file, from scratch and from a folder, and writes one that transformers loads.

use std::fs;
use std::path::Path;
use std::process::Command;

use clap::Parser;
use overdrive::transformer::{EncoderConfig, SequenceClassifier};

use crate::alone;
use crate::classify_example::{Flags, run};

/// Writes 240 sentences whose verb decides the label.
fn write_data(path: &Path) {
    let good = ["loved", "enjoyed", "praised", "admired"];
    let bad = ["hated", "disliked", "mocked", "left"];
    let things = [
        "the film",
        "this book",
        "that song",
        "our meal",
        "the play",
        "her talk",
    ];
    let people = ["We", "They", "My friends", "Most people", "The critics"];
    let mut text = "text,label\n".to_owned();
    for (verbs, label) in [(good, "good"), (bad, "bad")] {
        for verb in verbs {
            for thing in things {
                for who in people {
                    text += &format!("\"{who} {verb} {thing}, as you know.\",{label}\n");
                }
            }
        }
    }
    fs::write(path, text).unwrap();
}

fn flags(data: &Path, out: &Path, more: &[&str]) -> Flags {
    let paths = [
        "--data",
        data.to_str().unwrap(),
        "--out",
        out.to_str().unwrap(),
    ];
    Flags::parse_from(["classify"].iter().chain(&paths).chain(more))
}

#[test]
fn a_classifier_learns_from_scratch_and_by_lora_and_transformers_agrees() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let (data, first) = (dir.path().join("rows.csv"), dir.path().join("first"));
    write_data(&data);
    let accuracy = run(&flags(&data, &first, &["--epochs", "6"])).unwrap();
    assert!(accuracy > 0.95, "{accuracy}");
    // The same flags give the same weights.
    let again = dir.path().join("again");
    assert_eq!(
        run(&flags(&data, &again, &["--epochs", "6"])).unwrap(),
        accuracy
    );
    let weights = |out: &Path| fs::read(out.join("model.safetensors")).unwrap();
    assert!(weights(&first) == weights(&again));
    let config = EncoderConfig::from_dir(&first).unwrap();
    assert_eq!(config.id2label, ["bad", "good"]);

    // The folder is a model that LoRA starts from, and what it writes is a plain model again.
    let second = dir.path().join("second");
    let more = [
        "--model",
        first.to_str().unwrap(),
        "--lora",
        "4",
        "--epochs",
        "1",
    ];
    let accuracy = run(&flags(&data, &second, &more)).unwrap();
    assert!(accuracy > 0.95, "{accuracy}");
    let merged = SequenceClassifier::from_pretrained(&second, &Default::default()).unwrap();
    assert_eq!(merged.load_report(), &Default::default());
    assert!(weights(&second) != weights(&first));
    transformers_agrees(&[&first, &second]);
}

/// Checks that transformers' pipeline names the classes of two sentences.
fn transformers_agrees(folders: &[&Path]) {
    let python = std::env::var("OVERDRIVE_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let probe = Command::new(&python)
        .args(["-c", "import transformers, torch"])
        .output();
    if !probe.is_ok_and(|output| output.status.success()) {
        eprintln!(
            "SKIPPED: {python} cannot import transformers and torch; set OVERDRIVE_PYTHON to one that can"
        );
        return;
    }
    let script = r#"
import sys, transformers
for folder in sys.argv[1:]:
    pipe = transformers.pipeline("text-classification", model=folder)
    names = [result["label"] for result in pipe(["They praised the film, as you know.", "We hated it."], batch_size=2)]
    assert names == ["good", "bad"], names
"#;
    let output = Command::new(&python)
        .arg("-c")
        .arg(script)
        .args(folders)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn a_file_that_does_not_fit_is_refused() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("rows.csv");
    fs::write(&data, "title,label\nx,1\n").unwrap();
    let error = run(&flags(&data, dir.path(), &[])).unwrap_err().to_string();
    assert!(
        error.contains("`column` is text; it must be one of title, label"),
        "{error}"
    );
}
