//! Fine-tunes a sequence classifier (BERT, RoBERTa, ModernBERT) on a file of texts with labels, CSV, JSON or Parquet:
//!
//! ```text
//! cargo xtask example classify --model google-bert/bert-base-uncased --data reviews.csv --out runs/reviews
//! cargo xtask example classify --data reviews.csv          # a small BERT from scratch, without a download
//! ```
//!
//! It trains on a part of the rows (with `--lora 8` only adapters and the classifier), prints the accuracy on the rest,
//! and writes a folder that transformers' `pipeline("text-classification")` loads.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use overdrive::core::OutputFolder;
use overdrive::datasets::LabeledTexts;
use overdrive::distributed::ProcessGroup;
use overdrive::lora::trainable_parameters;
use overdrive::optim::LrSchedulerType;
use overdrive::trainer::{
    ClassificationTask, IntervalStrategy, RunOptions, TrainingArguments, TrainingRun, print_line,
    run_main,
};
use overdrive_examples::local_model;
use tch::Device;

/// Fine-tunes a sequence classifier on texts with labels
#[derive(Parser)]
pub(crate) struct Flags {
    /// File with texts and labels: .csv, .tsv, .json, .jsonl, or with the feature `parquet` .parquet or .arrow
    #[arg(long, value_name = "FILE")]
    data: PathBuf,
    /// Folder or hub name of a BERT, RoBERTa or ModernBERT [default: a small BERT from scratch]
    #[arg(long)]
    model: Option<PathBuf>,
    /// Column of the texts
    #[arg(long, default_value = "text")]
    text_column: String,
    /// Column of the labels
    #[arg(long, default_value = "label")]
    label_column: String,
    /// Fraction of the rows held out to measure the accuracy
    #[arg(long, allow_negative_numbers = true, default_value_t = 0.2)]
    held_out: f64,
    #[arg(long, default_value_t = 3)]
    epochs: u64,
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..))]
    batch_size: u16,
    /// Learning rate [default: 5e-5; 1e-3 from scratch and with --lora]
    #[arg(long, allow_negative_numbers = true)]
    learning_rate: Option<f64>,
    /// Maximum number of tokens in a text; longer texts are truncated
    #[arg(long, default_value_t = 128)]
    max_length: usize,
    /// Train adapters of this rank and the classifier instead of all weights
    #[arg(long, value_name = "RANK", value_parser = clap::value_parser!(u32).range(1..))]
    lora: Option<u32>,
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Output folder
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

#[allow(dead_code, reason = "the tests include this file")]
fn main() -> ExitCode {
    run_main(|| run(&Flags::parse()).map(drop))
}

/// Trains, and returns the accuracy on the held-out texts.
pub(crate) fn run(flags: &Flags) -> Result<f64> {
    let folder = flags.model.as_deref().map(local_model).transpose()?;
    let folder = folder.as_deref();
    let input = folder.map(|model| ("--model", model));
    let check = |out| OutputFolder::check("classify", "--out", out, input.as_slice());
    let output = flags.out.as_ref().map(check).transpose()?;
    let arguments = TrainingArguments {
        seed: flags.seed,
        ..TrainingArguments::default()
    };
    arguments.apply()?; // the seed, the threads, the treatment of subnormal numbers
    let data = LabeledTexts::open(&flags.data, &flags.text_column, &flags.label_column, None)?;
    let (train, test) = data.split(flags.held_out, flags.seed)?;
    let device = Device::cuda_if_available();
    let (length, seed) = (flags.max_length, flags.seed);
    let mut task = ClassificationTask::load(folder, data, &train, length, seed, device)?;
    task.make_trainable(flags.lora)?;
    let fresh = folder.is_none() || flags.lora.is_some();
    let batch_size = usize::from(flags.batch_size);
    let arguments = TrainingArguments {
        num_train_epochs: flags.epochs as f64,
        max_steps: -1,
        logging_steps: 10.0,
        eval_strategy: IntervalStrategy::Epoch,
        per_device_train_batch_size: flags.batch_size.into(),
        learning_rate: flags
            .learning_rate
            .unwrap_or(if fresh { 1e-3 } else { 5e-5 }),
        lr_scheduler_type: LrSchedulerType::Linear,
        weight_decay: 0.01,
        ..arguments
    };
    let mut loader = task.loader(&train, batch_size, flags.seed)?;
    let (group, options) = (ProcessGroup::single(), RunOptions::default());
    let parameters = trainable_parameters(&mut task.model)?;
    let mut run = TrainingRun::start(&arguments, &group, parameters, &mut loader, options)?;
    task.model.set_training(true)?;
    while let Some(batches) = run.next_batches(&mut loader)? {
        for batch in batches {
            run.forward_backward(batch, |batch| task.loss(batch))?;
        }
        run.step()?;
        run.evaluate_if_due(|| task.evaluate(&test, batch_size))?;
        run.save_if_due()?;
    }
    run.finish()?;
    let accuracy = task.evaluate(&test, batch_size)?.metrics["accuracy"];
    task.model.set_training(false)?;
    let (of, percent) = (test.len(), 100.0 * accuracy);
    print_line(format_args!(
        "{percent:.1}% of {of} held-out texts are classified correctly"
    ));
    if let Some(output) = &output {
        let unfinished = output.begin()?;
        task.save(unfinished.path(), folder, flags.lora.is_some())?;
        unfinished.finish()?;
        print_line(format_args!("written {}", output.path().display()));
    }
    Ok(accuracy)
}
