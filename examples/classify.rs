//! Fine-tunes a sequence classifier (BERT, RoBERTa, ModernBERT) on a file of texts with labels, CSV or JSON Lines:
//!
//! ```text
//! cargo xtask example classify --model bert-base-uncased --data reviews.csv --out runs/reviews
//! cargo xtask example classify --data reviews.csv          # a small BERT from scratch, without a download
//! ```
//!
//! It trains on a part of the rows (`--lora 8`: adapters and the classifier only), prints the accuracy on the rest,
//! and writes a folder that transformers' `pipeline("text-classification")` loads.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use overdrive::core::OutputFolder;
use overdrive::datasets::{LabeledTexts, Permutation};
use overdrive::lora::trainable_parameters;
use overdrive::optim::{AdamW, AdamWConfig, ClipOptions, Optimizer, clip_grad_norm, decay_groups};
use overdrive::sys::denormals::set_flush_denormals;
use overdrive_examples::{Classification, exit, print_line};

/// Fine-tunes a sequence classifier on texts with labels
#[derive(Parser)]
pub(crate) struct Flags {
    /// File of texts and labels: .csv, .tsv, .json or .jsonl
    #[arg(long, value_name = "FILE")]
    data: PathBuf,
    /// Folder of a BERT, RoBERTa or ModernBERT [default: a small BERT from scratch]
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Column of the texts
    #[arg(long, default_value = "text")]
    text_column: String,
    /// Column of the labels
    #[arg(long, default_value = "label")]
    label_column: String,
    /// Share of the rows that only the accuracy is measured on
    #[arg(long, default_value_t = 0.2)]
    held_out: f64,
    #[arg(long, default_value_t = 3)]
    epochs: u64,
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..))]
    batch_size: u16,
    /// Learning rate [default: 5e-5; 1e-3 from scratch and with --lora]
    #[arg(long)]
    learning_rate: Option<f64>,
    /// Most tokens of a text; longer ones are cut
    #[arg(long, default_value_t = 128)]
    max_length: usize,
    /// Train adapters of this rank, and the classifier, in place of all weights
    #[arg(long, value_name = "RANK")]
    lora: Option<u32>,
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Output folder
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

#[allow(dead_code, reason = "the tests include this file")]
fn main() -> ExitCode {
    exit(|| run(&Flags::parse()).map(drop))
}

/// Trains, and returns the accuracy on the held-out texts.
pub(crate) fn run(flags: &Flags) -> Result<f64> {
    // Subnormal numbers are zero to libtorch's operators too: each takes Intel's processors a hundred cycles.
    set_flush_denormals(true);
    let inputs: Vec<_> = flags
        .model
        .iter()
        .map(|model| ("--model", model.as_path()))
        .collect();
    let check = |out| OutputFolder::check("classify", "--out", out, &inputs);
    let output = flags.out.as_ref().map(check).transpose()?;
    tch::manual_seed(flags.seed.cast_signed());
    let data = LabeledTexts::open(&flags.data, &flags.text_column, &flags.label_column, None)?;
    let (train, test) = data.split(flags.held_out, flags.seed)?;
    let folder = flags.model.as_deref();
    let mut task = Classification::load(folder, data, &train, flags.max_length, flags.seed)?;
    task.make_trainable(flags.lora)?;
    let fresh = folder.is_none() || flags.lora.is_some();
    let config = AdamWConfig {
        learning_rate: flags
            .learning_rate
            .unwrap_or(if fresh { 1e-3 } else { 5e-5 }),
        ..AdamWConfig::default()
    };
    let peak = config.learning_rate;
    let groups = decay_groups(trainable_parameters(&mut task.model)?, 0.01);
    let mut optimizer = AdamW::new(groups, config)?;
    let size = usize::from(flags.batch_size);
    let steps = flags.epochs as f64 * train.len().div_ceil(size) as f64;
    let mut step = 0.0;
    task.model.set_training(true)?;
    for epoch in 0..flags.epochs {
        let order = Permutation::new(train.len(), flags.seed, epoch);
        let order: Vec<usize> = (0..train.len()).map(|at| train[order.apply(at)]).collect();
        let mut total = 0.0;
        for batch in order.chunks(size) {
            // A linear decay to zero, the default schedule of transformers' Trainer.
            let rate = peak * (1.0 - step / steps);
            optimizer.set_learning_rates(&vec![rate; optimizer.learning_rates().len()])?;
            let (logits, classes) = task.forward(batch)?;
            let loss = task.model.loss_of_logits(&logits, &classes)?.mean()?;
            loss.f_backward()?;
            let _norm = clip_grad_norm(&optimizer.parameters(), 1.0, ClipOptions::default())?;
            optimizer.step()?;
            optimizer.zero_grad()?;
            total += loss.f_double_value(&[])? * batch.len() as f64;
            step += 1.0;
        }
        let mean = total / train.len() as f64;
        print_line(format_args!("epoch {}  loss {mean:.4}", epoch + 1));
    }
    task.model.set_training(false)?;
    let accuracy = task.accuracy(&test, size)?;
    let (of, percent) = (test.len(), 100.0 * accuracy);
    print_line(format_args!(
        "{percent:.1}% of {of} held-out texts are classified correctly"
    ));
    if let Some(output) = &output {
        output.create()?;
        task.save(output.path(), folder, flags.lora.is_some())?;
        print_line(format_args!("written {}", output.path().display()));
    }
    Ok(accuracy)
}
