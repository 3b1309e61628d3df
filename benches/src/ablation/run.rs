use std::ffi::OsString;

use serde::{Deserialize, Serialize};

use super::Program;
use crate::{StepResult, median};

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
    program: Program,
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
        let steps = steps.to_string();
        let shared = ["--steps", &steps, "--samples", "0", "--eval-steps", &steps];
        let shared = shared.into_iter().map(OsString::from);
        Ok(Self {
            program: Program::build("train")?,
            shared: shared.chain(further.iter().cloned()).collect(),
            warmup,
        })
    }

    /// Trains once in a separate process.
    ///
    /// # Errors
    /// An error with the output of the run if it fails.
    pub fn run(&self, flags: &[&str]) -> StepResult<Measurement> {
        let folder = tempfile::tempdir()?;
        let flags = flags.iter().map(OsString::from);
        let flags: Vec<_> = self.shared.iter().cloned().chain(flags).collect();
        let records = self.program.run(&flags, &folder.path().join("run"))?;
        let seconds: Vec<f64> = records
            .iter()
            .skip(self.warmup)
            .filter_map(|step| step.time_by_phase().map(|phases| phases.total()))
            .collect();
        if seconds.is_empty() {
            return Err("the run has no step after the warm-up: give more --steps".into());
        }
        let eval_loss = records.iter().rev().find_map(|step| step.eval_loss);
        Ok(Measurement {
            step_seconds: median(seconds),
            peak_memory_bytes: records
                .iter()
                .map(|step| step.peak_memory_bytes)
                .max()
                .unwrap_or(0),
            eval_loss: eval_loss.ok_or("the run was not evaluated")?,
        })
    }
}
