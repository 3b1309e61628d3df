use std::ffi::OsString;

use overdrive::precision::Precision;

use super::stages::{Program, Stage, Stages, cost_of_tokens, median_cost};
use super::{Precisions, StageRuns};
use crate::StepResult;

/// The sequences of a micro-batch from the second stage on, and of an optimizer step in all.
const BATCH: u64 = 8;
/// The tokens whose time is the work.
const TOKENS: f64 = 1e6;

/// The settings of a stage.
#[derive(Debug, Clone, Copy)]
struct Settings {
    name: &'static str,
    micro_batch: u64,
    flash: bool,
    fused: bool,
    precision: Option<Precision>,
    workers: u64,
}

const FIRST: Settings = Settings {
    name: "one sequence at a time",
    micro_batch: 1,
    flash: false,
    fused: false,
    precision: None,
    workers: 0,
};

impl Settings {
    /// Returns the stages: each is a change of the one before it.
    fn stages(precisions: &Precisions) -> Vec<Self> {
        let batch = Self {
            name: "+ micro-batches of 8",
            micro_batch: BATCH,
            ..FIRST
        };
        let flash = Self {
            name: "+ flash attention",
            flash: true,
            ..batch
        };
        let fused = Self {
            name: "+ fused kernels",
            fused: true,
            ..flash
        };
        let workers = Self {
            name: "+ a thread that loads data",
            workers: 1,
            ..fused
        };
        let mut stages = vec![FIRST, batch, flash, fused, workers];
        if precisions.recommended != Precision::Fp32 {
            stages.push(Self {
                name: "+ mixed precision",
                precision: Some(precisions.recommended),
                ..workers
            });
        }
        stages
    }

    fn flags(&self) -> Vec<String> {
        let attention = if self.flash {
            "flash_attention_2"
        } else {
            "eager"
        };
        let mut flags: Vec<String> = [
            ("--micro-batch-size", self.micro_batch.to_string()),
            (
                "--gradient-accumulation-steps",
                (BATCH / self.micro_batch).to_string(),
            ),
            ("--attn-implementation", attention.to_owned()),
            ("--dataloader-num-workers", self.workers.to_string()),
        ]
        .into_iter()
        .flat_map(|(flag, value)| [flag.to_owned(), value])
        .collect();
        if !self.fused {
            flags.push("--no-fused-kernels".to_owned());
        }
        flags.push(precision_flag(self.precision).to_owned());
        flags
    }
}

/// Returns the trainer's flag of a precision; `None` is fp32, also where another one is recommended.
fn precision_flag(precision: Option<Precision>) -> &'static str {
    match precision {
        Some(Precision::Fp16) => "--fp16",
        Some(Precision::Bf16) => "--bf16",
        Some(Precision::Tf32) => "--tf32",
        _ => "--no-auto-precision",
    }
}

/// Measures training from the plainest settings on, one change after the other.
///
/// # Errors
/// An error of a run.
pub fn training_stages(
    runs: &StageRuns,
    machine: String,
    precisions: &Precisions,
) -> StepResult<Stages> {
    let program = Program::build("train")?;
    let settings = Settings::stages(precisions);
    let mut rounds = vec![Vec::new(); settings.len()];
    for round in 1..=runs.rounds {
        for (settings, measured) in settings.iter().zip(&mut rounds) {
            let folder = tempfile::tempdir()?;
            let mut flags = runs.flags();
            flags.extend(settings.flags().into_iter().map(OsString::from));
            let records = program.run(&flags, &folder.path().join("run"))?;
            let cost = cost_of_tokens(&records, runs.warmup, TOKENS)?;
            println!("round {round}  {:28} {:.1} s", settings.name, cost.seconds);
            measured.push(cost);
        }
    }
    let stages = settings
        .iter()
        .zip(&rounds)
        .map(|(settings, rounds)| Stage {
            name: settings.name.to_owned(),
            flags: settings.flags(),
            cost: median_cost(rounds),
        });
    Ok(Stages {
        machine,
        work: format!(
            "The time of a million training tokens in steps of {BATCH} sequences, by {} steps of {}, medians of {} runs \
             in turn",
            runs.steps,
            runs.described("the default preset"),
            runs.rounds
        ),
        stages: stages.collect(),
        notes: vec![
            "Each stage has the changes of those before it; all train the same sequences with the same gradients.".to_owned(),
            match precisions.recommended {
                Precision::Fp32 => format!("There is no stage of mixed precision: {}.", precisions.reason),
                low => format!("Mixed precision is {low}: {}.", precisions.reason),
            },
        ],
    })
}
