//! The table "default, + mixed precision, + flash attention, + checkpointing, + fused kernels, all".
//!
//! Each configuration is a run of the example trainer in its own process, so that its peak memory can be
//! measured, and all start from the same seed on the same data. Configurations alternate over several rounds,
//! so that a drift of the machine's speed affects all of them.
//!
//! [`Stages`] are tables of changes on top of each other: training, fine-tuning and inference from the plainest settings
//! to the fastest.

mod configuration;
mod finetuning;
mod inference;
mod picture;
mod run;
mod stages;
mod table;
mod training;

use std::ffi::OsString;

pub use configuration::{CONFIGURATIONS, Configuration, Precisions, RowPrecision};
pub use finetuning::finetuning_stages;
pub use inference::inference_stages;
pub use picture::write_picture;
pub use run::{Measurement, Trainer};
pub use stages::{Program, Stage, StageCost, Stages, median_cost};
pub use table::{Row, Table};
pub use training::training_stages;

/// The number and the length of the runs of a table of stages, and the flags that all of them share.
#[derive(Debug, Clone)]
pub struct StageRuns {
    /// The number of optimizer steps of a run.
    pub steps: u64,
    /// The number of first steps that do not count.
    pub warmup: usize,
    /// The number of rounds over the stages.
    pub rounds: usize,
    /// Further flags of the program.
    pub further: Vec<OsString>,
}

impl StageRuns {
    /// Returns the flags that all runs share: so many steps, and nothing between or after them.
    fn flags(&self) -> Vec<OsString> {
        let steps = self.steps.to_string();
        let flags = ["--steps", &steps, "--samples", "0"];
        let strategies = ["--eval-strategy", "no", "--save-strategy", "no"];
        let flags = flags.into_iter().chain(strategies).map(OsString::from);
        flags.chain(self.further.iter().cloned()).collect()
    }

    /// Returns a description of what is trained: `base`, or the further flags.
    fn described(&self, base: &str) -> String {
        let further: Vec<_> = self
            .further
            .iter()
            .map(|flag| flag.to_string_lossy())
            .collect();
        match further.is_empty() {
            true => base.to_owned(),
            false => format!("{base} with {}", further.join(" ")),
        }
    }
}
