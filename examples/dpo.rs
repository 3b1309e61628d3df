//! Trains a model on preferences by Direct Preference Optimization (Rafailov et al. 2023, arXiv:2305.18290), as TRL's
//! `DPOTrainer` does: of two answers to a prompt, the chosen one becomes likelier and the rejected one less likely,
//! each relative to the model before training. With a model from `finetune` and the data in this repository:
//!
//! ```text
//! cargo run --release -p overdrive-examples --example dpo -- --model runs/mine/merged \
//!     --data examples/data/preferences.jsonl --steps 50 --learning-rate 5e-5 --out runs/preferred
//! ```
//!
//! A record has `prompt`, `chosen` and `rejected`, each a text or a list of messages. The flags are those of `finetune`:
//! the reference model is the model without its adapter, or with `--full` a second copy. The `rewards` lines show TRL's
//! metrics, averaged over the steps since the previous line. The loop is that of `train`.

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use overdrive::distributed::ProcessGroup;
use overdrive::trainer::{
    DpoConfig, DpoLossType, FinetuneArgs, FinetuneArguments, Finetuned, PreferenceTask,
    RewardTotals, RunEnd, RunOptions, TrainingRun, exit_or_resume, find_executable_batch_size,
    print_line,
};
use overdrive_examples::{local_data, local_model, model_name, repository};

/// Trains a model on preferences: pairs of a chosen and a rejected answer
#[derive(Parser)]
pub(crate) struct Flags {
    #[command(flatten)]
    finetune: FinetuneArgs,
    /// Weight of the deviation from the reference model: larger values keep the model closer to it
    #[arg(long, allow_negative_numbers = true, default_value_t = 0.1)]
    beta: f64,
    /// Loss function of a preference pair
    #[arg(long, value_enum, default_value = "sigmoid")]
    loss_type: DpoLossType,
    /// Probability that the labels of a pair are swapped, for `--loss-type robust`
    #[arg(long, allow_negative_numbers = true, default_value_t = 0.0)]
    label_smoothing: f64,
}

#[allow(dead_code, reason = "the tests include this file")]
fn main() -> ExitCode {
    exit_or_resume(|| run(&Flags::parse()))
}

/// Trains and writes the results; retries with smaller micro-batches if memory runs out.
pub(crate) fn run(flags: &Flags) -> Result<RunEnd> {
    let (mut arguments, notes) = flags.finetune.resolve_with_notes()?;
    let config = DpoConfig {
        beta: flags.beta,
        loss_type: flags.loss_type,
        label_smoothing: flags.label_smoothing,
        ..DpoConfig::default()
    };
    // The processes that torchrun or the example `launch` has started; usually one.
    let group = arguments.training.init_process_group()?;
    let mut say = |line: &str| {
        if group.is_main() {
            print_line(line);
        }
    };
    notes.iter().for_each(|note| say(note));
    arguments.model_name_or_path = local_model(&arguments.model_name_or_path)?;
    arguments.training.data = local_data(&arguments.training.data)?;
    let tuned = find_executable_batch_size(&mut arguments, &group, &mut say, |arguments, say| {
        train(arguments, &config, &group, say)
    })?;
    let end = tuned.summary.end();
    if group.is_main() {
        let name = model_name(&tuned.arguments.model_name_or_path);
        if let Some(results) = tuned.write(&name)? {
            print_line(results);
        }
    }
    Ok(end)
}

/// Trains the stored model, or resumes.
pub(crate) fn train(
    arguments: &mut FinetuneArguments,
    config: &DpoConfig,
    group: &ProcessGroup,
    say: &mut dyn FnMut(&str),
) -> Result<Finetuned> {
    let base_model = repository(&arguments.model_name_or_path);
    let mut task =
        PreferenceTask::prepare(arguments, config.clone(), base_model, group, &mut *say)?;
    let folder = arguments.open_or_create_folder(group)?;
    say(&format!("run folder  {}", folder.root().display()));
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
        run.save_if_due()?;
        if run.plan().log_due(run.steps()) {
            run.print(rewards.take_mean(group)?);
        }
    }
    let (summary, averages) = run.finish()?;
    Ok(task.finish(arguments, Some(folder), summary, averages)?)
}
