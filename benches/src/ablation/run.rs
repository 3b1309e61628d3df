use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;

use overdrive::tracking::read_metrics;
use serde::{Deserialize, Serialize};

use crate::StepResult;

/// The result of a run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    /// The time of the median step in seconds: data, forward, backward, optimizer.
    pub step_seconds: f64,
    /// The peak memory of tensors in bytes.
    pub peak_memory_bytes: u64,
    /// The validation loss at the end, in nats per token.
    pub eval_loss: f64,
}

/// The example trainer and the flags that all runs share.
#[derive(Debug)]
pub struct Trainer {
    program: PathBuf,
    shared: Vec<OsString>,
    /// The number of first steps that do not count, because caches fill and kernels are compiled.
    warmup: usize,
}

impl Trainer {
    /// Builds the trainer beside this program.
    ///
    /// # Errors
    /// An error if Cargo cannot build it.
    pub fn build(steps: u64, warmup: usize, further: &[OsString]) -> StepResult<Self> {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let build = [
            "build",
            "--release",
            "-p",
            "overdrive-examples",
            "--example",
            "train",
        ];
        println!("$ cargo {}", build.join(" "));
        let status = Command::new(cargo).args(build).status()?;
        if !status.success() {
            return Err(
                "the trainer could not be built; run `cargo xtask setup` if libtorch is missing"
                    .into(),
            );
        }
        let here = std::env::current_exe()?;
        let folder = here
            .parent()
            .ok_or("the path of this program has no parent folder")?;
        let name = format!("train{}", std::env::consts::EXE_SUFFIX);
        let mut shared: Vec<OsString> = ["--steps", &steps.to_string(), "--samples", "0"]
            .map(OsString::from)
            .to_vec();
        shared.extend(["--eval-steps".into(), steps.to_string().into()]);
        shared.extend(further.iter().cloned());
        Ok(Self {
            program: folder.join("examples").join(name),
            shared,
            warmup,
        })
    }

    /// Trains once in a separate process.
    ///
    /// # Errors
    /// An error with the output of the run if it fails.
    pub fn run(&self, flags: &[&str]) -> StepResult<Measurement> {
        let folder = tempfile::tempdir()?;
        let out = folder.path().join("run");
        let output = Command::new(&self.program)
            .args(&self.shared)
            .args(flags)
            .arg("--out")
            .arg(&out)
            .output()?;
        if !output.status.success() {
            return Err(format!(
                "train {} failed:\n{}",
                flags.join(" "),
                String::from_utf8_lossy(&output.stderr)
            )
            .into());
        }
        let records = read_metrics(out.join("metrics.jsonl"))?.records;
        let mut seconds: Vec<f64> = records
            .iter()
            .skip(self.warmup)
            .filter_map(|step| step.time_by_phase().map(|phases| phases.total()))
            .collect();
        seconds.sort_by(f64::total_cmp);
        let eval_loss = records.iter().rev().find_map(|step| step.eval_loss);
        Ok(Measurement {
            step_seconds: *seconds
                .get(seconds.len() / 2)
                .ok_or("the run has no step after the warm-up: give more --steps")?,
            peak_memory_bytes: records
                .iter()
                .map(|step| step.peak_memory_bytes)
                .max()
                .unwrap_or(0),
            eval_loss: eval_loss.ok_or("the run was not evaluated")?,
        })
    }
}
