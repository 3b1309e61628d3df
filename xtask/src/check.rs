//! `cargo xtask check`: the checks of CI.

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use overdrive_core::print_line;
use serde_json::Value;

use crate::cargo::{self, Cargo};
use crate::dist::program;
use crate::doctor;
use crate::failure::{Failure, Result};
use crate::guide;
use crate::matrix;
use crate::new;
use crate::readmes;
use crate::setup::{self, Request};

/// Long enough for a large fall of the loss of a fresh model, short enough to run for every change.
const STEPS: usize = 24;
/// The number of tokens in a sequence of this training.
const CONTEXT: usize = 128;
/// The number of sequences of a step.
const BATCH: usize = 4;
/// The number of steps of the compared means: the loss of single steps varies too much.
const MEAN_OF: usize = 5;
/// The smallest accepted fall of the loss, in nats per token. A fresh model starts at about ln(4096) = 8.3.
/// After 24 steps it knows the most frequent tokens, and the mean of the last steps was 1.2 to 1.3 below that of the
/// first. A model that learns nothing stays within a few hundredths.
const LEAST_FALL: f64 = 1.0;

/// Runs every check and stops at the first failure. `commands` are the subcommands of `cargo xtask`. The tests come
/// last, so that the log ends with their summary.
pub(crate) fn check(commands: &[String]) -> Result<()> {
    let begun = Instant::now();
    let step = |what: &str| {
        // A log shows where the time goes.
        let seconds = begun.elapsed().as_secs();
        eprintln!(
            "== {what} (after {} min {} s) ==",
            seconds / 60,
            seconds % 60
        );
    };
    step("format");
    // The cheapest check comes first, before libtorch may have to be fetched.
    cargo::fmt(&["--".into(), "--check".into()]).run()?;
    step("READMEs of the crates");
    readmes::readmes(true)?;
    step("links, blocks of code and figures of the Markdown pages");
    guide::check(commands)?;
    step("licences and sources of the dependencies");
    match deny_is_installed() {
        // Without advisories, whose database is on the network: an advisory of today must not fail the change of
        // today. `cargo xtask deny` checks them too.
        Ok(()) => cargo::deny(&["licenses", "sources", "bans"].map(OsString::from)).run()?,
        Err(failure) => eprintln!("not checked: {failure}"),
    }
    step("libtorch");
    let found = setup::setup(Request::Any, false)?;
    found.report();
    step("lints");
    cargo::lint(&[]).run()?;
    step("a crate without libtorch");
    matrix::without_libtorch()?;
    step("the manifest of a new project");
    new::resolve()?;
    step("a short training run, whose loss must fall");
    training()?;
    step("tests, and beside them the documentation");
    let gpu = doctor::has_gpu(&found.libtorch);
    cargo::run_all_tests(gpu, vec![cargo::docs_after_lint()?])
}

/// Returns an error with the remedy if `cargo deny` is not installed.
pub(crate) fn deny_is_installed() -> Result<()> {
    if Cargo::has("deny") {
        return Ok(());
    }
    Err(Failure::new("cargo-deny is not installed").remedy("cargo install --locked cargo-deny"))
}

/// Trains on this repository's own sources and checks the metrics.
fn training() -> Result<()> {
    let out = cargo::target_folder().join("xtask/training-check");
    // A run of an earlier check would make the trainer refuse the folder.
    let _ = fs::remove_dir_all(&out);
    // Not in the recommended precision, which depends on the machine, and on sources alone: what lies among the
    // fixtures of tests must not decide whether this step passes.
    let fixed = ["--no-auto-precision", "--data", "crates/*/src/**/*.rs"];
    let mut arguments: Vec<OsString> = fixed.map(OsString::from).to_vec();
    let [steps, context, batch] = [STEPS, CONTEXT, BATCH].map(|number| number.to_string());
    let sizes = [
        "--steps",
        &steps,
        "--context-length",
        &context,
        "--per-device-train-batch-size",
        &batch,
        "--out",
    ];
    arguments.extend(sizes.map(OsString::from));
    arguments.push(out.clone().into_os_string());
    let built = program::of_messages(&cargo::training_for_check().output()?)?;
    let train = built
        .iter()
        .find(|program| program.file == "train")
        .ok_or_else(|| Failure::new("cargo did not build the example `train`"))?;
    let status = Command::new(&train.built)
        .args(&arguments)
        .current_dir(cargo::workspace())
        .status()
        .map_err(|error| Failure::io("could not start", &train.built, &error))?;
    if !status.success() {
        return Err(Failure::new(format!("the training failed: {status}")));
    }
    let path = out.join("metrics.jsonl");
    let metrics = fs::read_to_string(&path).map_err(|error| {
        Failure::io("could not read the metrics of the training", &path, &error)
    })?;
    let (first, last) = judge(&metrics, &path)?;
    print_line(format_args!(
        "the loss fell from {first:.3} to {last:.3} in {STEPS} steps"
    ));
    Ok(())
}

/// Returns the mean loss of the first and of the last steps, if no step is missing and the loss fell.
fn judge(metrics: &str, path: &Path) -> Result<(f64, f64)> {
    let fail = |what: String| Failure::new(format!("{}: {what}", path.display()));
    let mut losses = Vec::new();
    for (number, line) in metrics.lines().enumerate() {
        let value: Value = serde_json::from_str(line)
            .map_err(|error| fail(format!("line {} is not JSON ({error})", number + 1)))?;
        // The line of an evaluation has no training loss.
        let Some(loss) = value.get("loss") else {
            continue;
        };
        let loss = loss
            .as_f64()
            .filter(|loss| loss.is_finite())
            .ok_or_else(|| fail(format!("line {}: the loss is {loss}", number + 1)))?;
        let step = value.get("step").and_then(Value::as_u64);
        // A missing or repeated step would shift the compared means.
        if step != Some(losses.len() as u64 + 1) {
            return Err(fail(format!(
                "line {}: expected step {}, found {step:?}",
                number + 1,
                losses.len() + 1
            )));
        }
        losses.push(loss);
    }
    if losses.len() != STEPS {
        return Err(fail(format!(
            "{STEPS} steps were requested, but there are {}",
            losses.len()
        )));
    }
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / MEAN_OF as f64;
    let (first, last) = (mean(&losses[..MEAN_OF]), mean(&losses[STEPS - MEAN_OF..]));
    if first - last < LEAST_FALL {
        return Err(fail(format!(
            "the loss went from {first:.3} to {last:.3}; it must fall by at least {LEAST_FALL}"
        )));
    }
    Ok((first, last))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn metrics(loss: impl Fn(usize) -> String) -> String {
        (1..=STEPS)
            .map(|step| format!("{{\"step\":{step},\"loss\":{}}}\n", loss(step)))
            .collect()
    }

    fn judged(metrics: &str) -> std::result::Result<(f64, f64), String> {
        judge(metrics, Path::new("metrics.jsonl")).map_err(|failure| failure.to_string())
    }

    #[test]
    fn a_loss_that_falls_passes() {
        let (first, last) =
            judged(&metrics(|step| format!("{}", 8.3 - step as f64 * 0.08))).unwrap();
        assert!(
            (first - 8.06).abs() < 1e-9 && (last - 6.54).abs() < 1e-9,
            "{first} {last}"
        );
    }

    #[test]
    fn a_loss_that_stays_is_not_finite_or_ends_early_does_not_pass() {
        assert!(
            judged(&metrics(|_| "8.3".into()))
                .unwrap_err()
                .contains("must fall")
        );
        assert!(judged(&metrics(|step| format!("{}", 8.0 + step as f64))).is_err());
        let nan = metrics(|step| {
            if step == 9 {
                "null".into()
            } else {
                format!("{}", 9 - step / 10)
            }
        });
        assert!(judged(&nan).unwrap_err().contains("line 9"));
        let early: String = metrics(|step| format!("{}", 9 - step / 10))
            .lines()
            .take(12)
            .map(|l| format!("{l}\n"))
            .collect();
        assert!(
            judged(&early)
                .unwrap_err()
                .contains("24 steps were requested, but there are 12")
        );
    }

    /// Cargo skips such a test silently.
    #[test]
    fn a_library_whose_tests_are_off_has_none() {
        let root = cargo::workspace();
        let folders = fs::read_dir(root.join("crates")).unwrap();
        let mut packages: Vec<PathBuf> = folders.map(|entry| entry.unwrap().path()).collect();
        packages.extend(["examples", "benches", "gpu-check", "xtask"].map(|name| root.join(name)));
        let mut off = 0;
        for package in packages {
            let manifest = fs::read_to_string(package.join("Cargo.toml")).unwrap();
            if !manifest.contains("[lib]\ntest = false") {
                continue;
            }
            off += 1;
            for source in sources(&package.join("src")) {
                let text = fs::read_to_string(&source).unwrap();
                assert!(
                    !text.contains("#[test]"),
                    "{} has a test; its package's Cargo.toml says `[lib] test = false`",
                    source.display()
                );
            }
        }
        assert!(off > 0, "some package turns the tests of its library off");
    }

    fn sources(folder: &Path) -> Vec<PathBuf> {
        let mut found = Vec::new();
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                found.extend(sources(&path));
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
        found
    }

    #[test]
    fn a_step_that_is_missing_is_named() {
        let text = metrics(|_| "1.0".into()).replace("\"step\":7,", "\"step\":8,");
        assert!(judged(&text).unwrap_err().contains("expected step 7"));
    }
}
