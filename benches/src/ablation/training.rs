use overdrive::precision::Precision;

use super::configuration::precision_flag;
use super::stages::{Program, Stages};
use super::{Precisions, StageRuns};
use crate::StepResult;

/// Returns the stages: each is a change of the one before it. All take optimizer steps of 8 sequences.
fn stages(precisions: &Precisions) -> Vec<(&'static str, Vec<&'static str>)> {
    let full = precision_flag(Precision::Fp32);
    let of = |micro, steps, attention, workers, further: &[&'static str]| {
        let flags = [
            "--micro-batch-size",
            micro,
            "--gradient-accumulation-steps",
            steps,
            "--attn-implementation",
            attention,
            "--dataloader-num-workers",
            workers,
        ];
        [&flags, further].concat()
    };
    let unfused = ["--no-fused-kernels", full];
    let flash = "flash_attention_2";
    let mut stages = vec![
        (
            "one sequence at a time",
            of("1", "8", "eager", "0", &unfused),
        ),
        ("+ micro-batches of 8", of("8", "1", "eager", "0", &unfused)),
        ("+ flash attention", of("8", "1", flash, "0", &unfused)),
        ("+ fused kernels", of("8", "1", flash, "0", &[full])),
        (
            "+ a thread that loads data",
            of("8", "1", flash, "1", &[full]),
        ),
    ];
    if precisions.recommended != Precision::Fp32 {
        let low = precision_flag(precisions.recommended);
        stages.push(("+ mixed precision", of("8", "1", flash, "1", &[low])));
    }
    stages
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
    Ok(Stages {
        machine,
        work: format!(
            "The time of a million training tokens in steps of 8 sequences, by {} steps of {}, medians of {} runs \
             in turn",
            runs.steps,
            runs.described("the default preset"),
            runs.rounds
        ),
        stages: program.stages(runs, &[], &stages(precisions))?,
        notes: vec![
            "Each stage has the changes of those before it; all train the same sequences with the same gradients.".to_owned(),
            match precisions.recommended {
                Precision::Fp32 => format!("There is no stage of mixed precision: {}.", precisions.reason),
                low => format!("Mixed precision is {low}: {}.", precisions.reason),
            },
        ],
    })
}
