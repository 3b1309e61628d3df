//! Trains an encoder-decoder model on source and target pairs, and reports how many held-out targets it generates
//! exactly. Without `--data` and `--model`, a small T5 from scratch learns to reverse words; that takes seconds.
//!
//! ```text
//! cargo xtask example seq2seq --out runs/reverse
//! cargo xtask example seq2seq --model google/flan-t5-small --data pairs.jsonl --out runs/mine --learning-rate 1e-4
//! cargo xtask example generate --model runs/reverse --prompt abcde
//! ```

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::{Parser, builder::RangedU64ValueParser};
use overdrive::core::OutputFolder;
use overdrive::datasets::prelude::*;
use overdrive::datasets::{Seq2SeqExample, copy_tokenizer, load_tokenizer, save_tokenizer};
use overdrive::distributed::ProcessGroup;
use overdrive::optim::LrSchedulerType;
use overdrive::trainer::{
    RunOptions, Seq2SeqPair, TrainingArguments, TrainingRun, exact_matches, load_seq2seq,
    print_line, run_main,
};
use overdrive::transformer::{LoadOptions, SaveOptions, Seq2SeqLm};
use overdrive_examples::local_model;
use overdrive_examples::words::{END, small_model, words_to_reverse};
use tch::Device;

/// Trains an encoder-decoder model (T5, BART) on source and target pairs
#[derive(Debug, Parser)]
pub(crate) struct Flags {
    /// Output folder for the trained model
    #[arg(long)]
    pub(crate) out: PathBuf,
    /// Folder or hub name of a T5 or BART to start from, with its tokenizer [default: a small T5 from scratch]
    #[arg(long, requires = "data")]
    pub(crate) model: Option<PathBuf>,
    /// File of pairs, with `--model`: CSV or JSON (or Parquet, with the feature `parquet`) with `source` and `target` [default: words to reverse]
    #[arg(long, requires = "model")]
    pub(crate) data: Option<PathBuf>,
    /// Number of optimizer steps
    #[arg(long, default_value_t = 500)]
    pub(crate) steps: usize,
    /// Number of pairs in a batch
    #[arg(long, default_value_t = 32)]
    pub(crate) batch_size: usize,
    /// Initial learning rate, which decays linearly to 0
    #[arg(long, allow_negative_numbers = true, default_value_t = 2e-3)]
    pub(crate) learning_rate: f64,
    /// Number of held-out pairs
    #[arg(long, default_value_t = 200, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    pub(crate) held_out: usize,
    /// Seed of the weights, the words and their order
    #[arg(long, default_value_t = 42)]
    pub(crate) seed: u64,
}

fn main() -> ExitCode {
    run_main(|| run(&Flags::parse()).map(drop))
}

/// Trains, saves, and returns the share of held-out targets that the model writes exactly.
pub(crate) fn run(flags: &Flags) -> Result<f64> {
    let folder = flags.model.as_deref().map(local_model).transpose()?;
    let input = folder.as_deref().map(|model| ("--model", model));
    let output = OutputFolder::check("seq2seq", "--out", &flags.out, input.as_slice())?;
    let device = Device::cuda_if_available();
    let (mut model, tokenizer) = match &folder {
        Some(folder) => {
            let options = LoadOptions {
                device,
                ..LoadOptions::default()
            };
            let model = Seq2SeqLm::from_pretrained(folder, &options)?;
            (model, load_tokenizer(folder)?)
        }
        None => small_model(flags.seed, device)?,
    };
    let pairs = match &flags.data {
        Some(path) => Seq2SeqPair::read(path)?,
        None => words_to_reverse(flags.seed, 4000),
    };
    let needed = flags.held_out + flags.batch_size;
    ensure!(
        pairs.len() >= needed,
        "{} pairs are too few: --held-out and --batch-size need {needed}",
        pairs.len()
    );
    let examples = pairs.iter().map(|pair| pair.encode(&tokenizer));
    let examples = examples.collect::<overdrive::trainer::Result<Vec<_>>>()?;
    let (trained, held_out) = examples.split_at(examples.len() - flags.held_out);
    train(&mut model, trained, flags, device)?;
    let exact = exact_matches(&model, held_out)? as f64 / held_out.len() as f64;
    let (percent, all) = (100.0 * exact, held_out.len());
    print_line(format!("{percent:.1}% of {all} held-out targets are exact"));
    let output = output.begin()?;
    model.save_pretrained(output.path(), &SaveOptions::default())?;
    match &folder {
        Some(folder) => drop(copy_tokenizer(folder, output.path())?),
        None => save_tokenizer(output.path(), &tokenizer, Some(END), 512)?,
    }
    output.finish()?;
    Ok(exact)
}

/// Trains for `--steps` steps with a learning rate that falls linearly to 0.
fn train(
    model: &mut Seq2SeqLm,
    examples: &[Seq2SeqExample],
    flags: &Flags,
    device: Device,
) -> Result<()> {
    let arguments = TrainingArguments {
        max_steps: i64::try_from(flags.steps)?,
        logging_steps: 100.0,
        learning_rate: flags.learning_rate,
        lr_scheduler_type: LrSchedulerType::Linear,
        seed: flags.seed,
        ..TrainingArguments::default()
    };
    arguments.apply()?;
    let options = DataLoaderOptions {
        batch_size: flags.batch_size,
        shuffle: true,
        seed: flags.seed,
        ..DataLoaderOptions::default()
    };
    let pad = model.config().pad_token_id();
    let pad = pad.context("the model has no pad_token_id")?;
    let mut loader = load_seq2seq(examples, pad, options, device)?;
    model.set_requires_grad(true)?;
    model.set_training(true)?;
    let (group, parameters) = (ProcessGroup::single(), model.named_parameters());
    let options = RunOptions::default();
    let mut run = TrainingRun::start(&arguments, &group, parameters, &mut loader, options)?;
    while let Some(batches) = run.next_batches(&mut loader)? {
        for batch in batches {
            batch.check_ids(model.config().vocab_size())?;
            run.forward_backward(batch, |batch| {
                let mask = batch.attention_mask.as_ref();
                let loss = model.loss(&batch.input_ids, mask, &batch.labels)?;
                anyhow::Ok(loss.sum)
            })?;
        }
        run.step()?;
        run.save_if_due()?;
    }
    run.finish()?;
    Ok(model.set_training(false)?)
}
