use std::ffi::OsString;
use std::path::{Path, PathBuf};

use overdrive::precision::Precision;

use super::configuration::precision_flag;
use super::stages::{Program, Stages};
use super::{Precisions, StageRuns};
use crate::StepResult;

/// Returns the stages: each is a change of the one before it. Eight padded questions have about as many tokens as one
/// packed row of the default model.
fn stages(precisions: &Precisions) -> Vec<(&'static str, Vec<&'static str>)> {
    let padded = ["--micro-batch-size", "8"];
    let packed = ["--qlora", "--packing", "--micro-batch-size", "1"];
    let with = |first: &[&'static str], further: &[&'static str]| [first, further].concat();
    let mut stages = vec![
        ("all weights, padded rows", with(&["--full"], &padded)),
        ("adapters (LoRA)", with(&[], &padded)),
        ("+ 4-bit weights (QLoRA)", with(&["--qlora"], &padded)),
        ("+ packing", packed.to_vec()),
    ];
    let low = precisions.recommended;
    match low {
        Precision::Bf16 => stages.push(("+ bf16", with(&packed, &[precision_flag(low)]))),
        Precision::Fp16 => stages.push(("+ fp16", with(&packed, &[precision_flag(low)]))),
        _ => {}
    }
    stages
}

/// Measures fine-tuning from all weights in fp32 on, one change after the other, on a model of `model`, or one that is
/// trained for a step.
///
/// # Errors
/// An error of a run.
pub fn finetuning_stages(
    runs: &StageRuns,
    machine: String,
    precisions: &Precisions,
    model: Option<&Path>,
) -> StepResult<Stages> {
    let base = tempfile::tempdir()?;
    let (model, described) = match model {
        Some(model) => (model.to_owned(), model.display().to_string()),
        None => (
            new_model(base.path())?,
            "a new model of the preset small".to_owned(),
        ),
    };
    let program = Program::build("finetune")?;
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/data/arithmetic.jsonl");
    let shared = [
        "--model".into(),
        model.into_os_string(),
        "--data".into(),
        data.into_os_string(),
    ];
    Ok(Stages {
        machine,
        work: format!(
            "The time of a million tokens (without padding) of short questions, by {} steps of {}, medians of {} runs in \
             turn",
            runs.steps,
            runs.described(&described),
            runs.rounds
        ),
        stages: program.stages(runs, &shared, &stages(precisions))?,
        notes: vec![
            "Each stage has the changes of those before it. Padded rows come in micro-batches of 8, packed ones alone: \
             both have about as many tokens."
                .to_owned(),
        ],
    })
}

/// Trains a model for one step, so that there is one with a tokenizer.
fn new_model(folder: &Path) -> StepResult<PathBuf> {
    let out = folder.join("base");
    let flags = [
        "--preset",
        "small",
        "--steps",
        "1",
        "--samples",
        "0",
        "--save-strategy",
        "no",
    ];
    Program::build("train")?.run(&flags.map(OsString::from), &out)?;
    Ok(out.join("model"))
}
