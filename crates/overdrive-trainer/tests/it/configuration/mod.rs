//! Presets, files in three formats and flags, and the errors about invalid ones.

use std::fs;
use std::path::Path;

use clap::Parser;
use overdrive_trainer::{TrainArgs, TrainingArguments};

mod data;
mod files;
mod flags;
mod guides;
mod hugging_face;
mod mistakes;
mod written;

#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    train: TrainArgs,
}

/// Returns the configuration of a command line.
fn resolve(flags: &[&str]) -> overdrive_trainer::Result<TrainingArguments> {
    let flags = ["train"].iter().chain(flags);
    Flags::try_parse_from(flags)
        .expect("the flags parse")
        .train
        .resolve()
}

/// Creates a configuration file in a temporary folder.
fn file(name: &str, text: &str) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join(name);
    fs::write(&path, text).expect("writes");
    let path = path.display().to_string();
    (folder, path)
}

/// Returns the error of a YAML file, without the folder's name.
fn error(text: &str) -> String {
    let (_folder, path) = file("run.yaml", text);
    let error = resolve(&["--config", &path]).expect_err("the file is wrong");
    let folder = Path::new(&path)
        .parent()
        .expect("a folder")
        .display()
        .to_string();
    error.to_string().replace(&format!("{folder}/"), "")
}
