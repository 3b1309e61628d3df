//! Fine-tunes a model on prompts and responses: LoRA, QLoRA with `--qlora` (4-bit weights), or all weights
//! with `--full`. With a model from `cargo xtask train` and the data in this repository:
//!
//! ```text
//! cargo xtask train --out runs/base
//! cargo run --release -p overdrive-examples --example finetune -- \
//!     --model runs/base/model --data examples/data/arithmetic.jsonl --steps 100 --qlora --out runs/mine
//! cargo run --release -p overdrive-examples --example finetune -- --config qlora.yaml
//! ```
//!
//! The output folder contains `adapter_config.json` and `adapter_model.safetensors`, which PEFT and `generate --adapter
//! DIR` load, the tokenizer, metrics.jsonl and report.html. `--compare` trains with each method in turn and prints the
//! costs. The loop is that of `train`.

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use overdrive::distributed::ProcessGroup;
use overdrive::trainer::{
    FinetuneArgs, FinetuneArguments, FinetuneTask, Finetuned, MethodComparison, RunEnd, RunFolder,
    RunOptions, TrainingRun, batch_loss, print_line, run_main, train_with_batch_that_fits,
};
use overdrive_examples::{local_data, local_model, repository, write_tuned};

/// Fine-tunes a model on prompts and responses
#[derive(Parser)]
pub(crate) struct Flags {
    #[command(flatten)]
    finetune: FinetuneArgs,
    /// Train with each method in turn (all weights, LoRA, QLoRA) and print the costs, without writing any files
    #[arg(long)]
    compare: bool,
}

#[allow(dead_code, reason = "the tests include this file")]
fn main() -> ExitCode {
    run_main(|| run(&Flags::parse()))
}

/// Fine-tunes and writes the results, or compares the methods.
pub(crate) fn run(flags: &Flags) -> Result<RunEnd> {
    let (arguments, notes) = flags.finetune.resolve_with_notes()?;
    if flags.compare {
        notes.iter().for_each(print_line);
        let compared = compare(&arguments, |line| print_line(line))?;
        print_line(format_args!("\n{compared}"));
        return Ok(RunEnd::Finished);
    }
    // The processes that torchrun or the example `launch` has started; usually one.
    let group = arguments.training.init_process_group()?;
    let say = |line: &str| {
        if group.is_main() {
            print_line(line);
        }
    };
    notes.iter().for_each(|note| say(note));
    write_tuned(finetune(&arguments, &group, true, say)?, &group)
}

/// Trains with each method in turn, always starting from the stored model, without writing any files.
pub(crate) fn compare(
    arguments: &FinetuneArguments,
    say: impl FnMut(&str),
) -> Result<MethodComparison> {
    MethodComparison::run(arguments, say, |arguments| {
        finetune(arguments, &ProcessGroup::single(), false, |_| {})
    })
}

/// Fine-tunes with all processes of `group`; if `writes` is `true`, snapshots and metrics are written to the run's folder.
pub(crate) fn finetune(
    arguments: &FinetuneArguments,
    group: &ProcessGroup,
    writes: bool,
    mut say: impl FnMut(&str),
) -> Result<Finetuned> {
    let mut arguments = arguments.clone();
    arguments.model_name_or_path = local_model(&arguments.model_name_or_path)?;
    arguments.training.data = local_data(&arguments.training.data)?;
    arguments.training.check_metric(&[])?;
    match writes {
        true => RunFolder::check(&arguments)?,
        // Without a folder there are no snapshots.
        false => arguments.training.resume_from_checkpoint = None,
    }
    train_with_batch_that_fits(&mut arguments, group, &mut say, |arguments, say| {
        train(arguments, group, writes, say)
    })
}

/// Trains the stored model, or resumes.
fn train(
    arguments: &mut FinetuneArguments,
    group: &ProcessGroup,
    writes: bool,
    say: &mut dyn FnMut(&str),
) -> Result<Finetuned> {
    let base_model = repository(&arguments.model_name_or_path);
    let mut task = FinetuneTask::prepare(arguments, base_model, group, &mut *say)?;
    let mut folder = None;
    if writes {
        let opened = RunFolder::open_or_create(group, arguments)?;
        say(&format!("run folder  {}", opened.root().display()));
        arguments.training.continue_in(&opened);
        folder = Some(opened);
    }
    let mut loader = task.train_loader(arguments)?;
    let options = RunOptions {
        precision: Some(task.precision),
        folder: folder.clone(),
        fingerprints: Some(task.fingerprints.clone()),
        flops: Some(task.model.flops()),
        ..RunOptions::default()
    };
    let parameters = task.model.parameters();
    let mut run = TrainingRun::start(&arguments.training, group, parameters, &mut loader, options)?;

    task.model.model.set_training(true)?;
    run.evaluate_on_start(|| task.evaluate(arguments, group))?;
    while let Some(batches) = run.next_batches(&mut loader)? {
        for batch in batches {
            let loss = |batch: &_| batch_loss(&task.model.model, batch).map(|loss| loss.sum);
            run.forward_backward(batch, loss)?;
        }
        run.step()?;
        run.evaluate_if_due(|| task.evaluate(arguments, group))?;
        run.save_if_due()?;
    }
    let (summary, averages) = run.finish()?;
    Ok(task.finish(arguments, folder, summary, averages)?)
}
