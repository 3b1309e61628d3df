//! Trains a model on preferences by Direct Preference Optimization (Rafailov et al. 2023, arXiv:2305.18290), as TRL's
//! `DPOTrainer` does: of two answers to a prompt, the chosen one becomes likelier and the rejected one less likely,
//! each relative to the model before training. With a model from `finetune` and the data in this repository:
//!
//! ```text
//! cargo run --release -p overdrive-examples --example dpo -- --model runs/mine/merged \
//!     --data examples/data/preferences.jsonl --steps 50 --learning-rate 5e-5 --out runs/preferred
//! ```
//!
//! A record has `prompt`, `chosen` and `rejected`, each a text or a list of messages. The keys and flags are those
//! of `finetune` and of TRL's `DPOConfig`; the reference model is the model without its adapter, or with `--full` a second
//! copy. The `rewards` lines and metrics.jsonl have TRL's metrics, averaged over the steps since the previous line. The loop
//! is that of `train`.

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use overdrive::distributed::ProcessGroup;
use overdrive::trainer::{
    DpoArgs, DpoArguments, Finetuned, PreferenceTask, REWARD_METRICS, RewardMetrics, RewardTotals,
    RunEnd, RunFolder, RunOptions, TrainingRun, print_line, run_main, train_with_batch_that_fits,
};
use overdrive_examples::{local_data, local_model, repository, write_tuned};

/// Trains a model on preferences: pairs of a chosen and a rejected answer
#[derive(Parser)]
pub(crate) struct Flags {
    #[command(flatten)]
    dpo: DpoArgs,
}

#[allow(dead_code, reason = "the tests include this file")]
fn main() -> ExitCode {
    run_main(|| run(&Flags::parse()))
}

/// Trains and writes the results; retries with smaller micro-batches if memory runs out.
pub(crate) fn run(flags: &Flags) -> Result<RunEnd> {
    let (mut all, notes) = flags.dpo.resolve_with_notes()?;
    // The processes that torchrun or the example `launch` has started; usually one.
    let arguments = &mut all.finetune;
    let group = arguments.training.init_process_group()?;
    let mut say = |line: &str| {
        if group.is_main() {
            print_line(line);
        }
    };
    notes.iter().for_each(|note| say(note));
    arguments.model_name_or_path = local_model(&arguments.model_name_or_path)?;
    arguments.training.data = local_data(&arguments.training.data)?;
    arguments.training.check_metric(&REWARD_METRICS)?;
    RunFolder::check(&all)?;
    let tuned = train_with_batch_that_fits(&mut all, &group, &mut say, |all, say| {
        train(all, &group, say)
    })?;
    write_tuned(tuned, &group)
}

/// Trains the stored model, or resumes.
pub(crate) fn train(
    all: &mut DpoArguments,
    group: &ProcessGroup,
    say: &mut dyn FnMut(&str),
) -> Result<Finetuned> {
    let base_model = repository(&all.finetune.model_name_or_path);
    let mut task = PreferenceTask::prepare(all, base_model, group, &mut *say)?;
    let folder = RunFolder::open_or_create(group, all)?;
    say(&format!("run folder  {}", folder.root().display()));
    let arguments = &mut all.finetune;
    arguments.training.continue_in(&folder);

    let mut loader = task.train_loader(arguments)?;
    let options = RunOptions {
        precision: Some(task.precision),
        folder: Some(folder.clone()),
        fingerprints: Some(task.fingerprints.clone()),
        ..RunOptions::default()
    };
    let parameters = task.model.parameters();
    let mut run = TrainingRun::start(&arguments.training, group, parameters, &mut loader, options)?;

    let mut rewards = RewardTotals::default();
    run.evaluate_on_start(|| task.evaluate(arguments, group))?;
    while let Some(batches) = run.next_batches(&mut loader)? {
        for batch in &batches {
            let reference = run.forward(|| task.reference_log_probs(batch))?;
            let output = run.forward(|| task.loss(batch, &reference))?;
            run.backward(&output.loss)?;
            rewards.add(&output.rewards)?;
        }
        run.step()?;
        run.evaluate_if_due(|| task.evaluate(arguments, group))?;
        let log_due = run.plan().log_due(run.steps());
        let means = log_due.then(|| rewards.take_mean(group)).transpose()?;
        run.log(means.iter().flat_map(RewardMetrics::named));
        run.save_if_due()?;
        if let Some(means) = means {
            run.print(means);
        }
    }
    let (summary, averages) = run.finish()?;
    Ok(task.finish(arguments, Some(folder), summary, averages)?)
}
