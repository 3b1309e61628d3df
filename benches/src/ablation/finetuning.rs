use std::ffi::OsString;
use std::path::{Path, PathBuf};

use overdrive::precision::Precision;

use super::stages::{Program, Stage, Stages, cost_of_tokens, median_cost};
use super::{Precisions, StageRuns};
use crate::StepResult;

/// The tokens whose time is the work.
const TOKENS: f64 = 1e6;

/// A stage: its name and its flags.
type Named = (&'static str, Vec<&'static str>);

/// Returns the stages: each is a change of the one before it. Eight padded questions have about as many tokens as one
/// packed row of the default model.
fn stages(precisions: &Precisions) -> Vec<Named> {
    let padded = ["--micro-batch-size", "8"];
    let packed = ["--qlora", "--packing", "--micro-batch-size", "1"];
    let with = |first: &[&'static str], further: &[&'static str]| [first, further].concat();
    let mut stages = vec![
        ("all weights, padded rows", with(&["--full"], &padded)),
        ("adapters (LoRA)", with(&[], &padded)),
        ("+ 4-bit weights (QLoRA)", with(&["--qlora"], &padded)),
        ("+ packing", packed.to_vec()),
    ];
    match precisions.recommended {
        Precision::Bf16 => stages.push(("+ bf16", with(&packed, &["--bf16"]))),
        Precision::Fp16 => stages.push(("+ fp16", with(&packed, &["--fp16"]))),
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
    let settings = stages(precisions);
    let mut rounds = vec![Vec::new(); settings.len()];
    for round in 1..=runs.rounds {
        for ((name, own), measured) in settings.iter().zip(&mut rounds) {
            let folder = tempfile::tempdir()?;
            let mut flags = runs.flags();
            flags.extend(["--model".into(), model.clone().into_os_string()]);
            flags.extend(["--data".into(), data.clone().into_os_string()]);
            flags.extend(own.iter().map(OsString::from));
            let records = program.run(&flags, &folder.path().join("run"))?;
            let cost = cost_of_tokens(&records, runs.warmup, TOKENS)?;
            println!("round {round}  {name:28} {:.1} s", cost.seconds);
            measured.push(cost);
        }
    }
    let stages = settings
        .iter()
        .zip(&rounds)
        .map(|((name, flags), rounds)| Stage {
            name: (*name).to_owned(),
            flags: flags.iter().map(ToString::to_string).collect(),
            cost: median_cost(rounds),
        });
    Ok(Stages {
        machine,
        work: format!(
            "The time of a million tokens (without padding) of short questions, by {} steps of {}, medians of {} runs in \
             turn",
            runs.steps,
            runs.described(&described),
            runs.rounds
        ),
        stages: stages.collect(),
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
