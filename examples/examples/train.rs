//! Trains a small Llama on real text: by default the Rust sources that Cargo keeps on this machine.
//! In about five minutes on two CPU cores the validation loss falls from 8.3 to about 4.5 nats a
//! token, and the model writes something that looks like Rust.
//!
//! ```text
//! cargo run --release -p overdrive-examples --example train              # or: cargo xtask train
//! cargo run --release -p overdrive-examples --example train -- --preset small --data book.txt --bf16
//! cargo run --release -p overdrive-examples --example train -- --data rows.csv --text-column body --packing
//! ```
//!
//! The run folder gets metrics.jsonl, TensorBoard events, report.html and a Hugging Face model.

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use overdrive::precision::Precision;
use overdrive::profiling::{JsonLines, TensorBoard, Trackers};
use overdrive::trainer::{
    Evaluation, ReportTo, RunFolder, TextData, TrainArgs, TrainingArguments, TrainingLoop, evaluate,
};
use overdrive::transformer::CausalLm;

/// Trains a small Llama on real text
#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    train: TrainArgs,
}

fn main() -> ExitCode {
    overdrive_examples::exit(run(&Flags::parse()))
}

fn run(flags: &Flags) -> Result<()> {
    let arguments = flags.train.resolve()?;
    let (device, precision) = (arguments.device(), arguments.apply()?);
    let data = TextData::prepare(&arguments, |line| println!("{line}"))?;
    let mut model = arguments.new_model(&data, device)?;
    println!(
        "model       {:.2}M weights on {device:?}, {precision}",
        model.num_parameters() as f64 / 1e6
    );
    if let Some(warning) = precision.warning(device) {
        println!("            warning: {warning}");
    }
    let memory = arguments.memory_plan(data.vocab_size()).estimate()?;
    println!(
        "memory      about {} MiB of tensors at most, by estimate",
        memory.peak >> 20
    );
    // Made when nothing can be wrong with data and model any more: no empty run is left behind.
    let run = RunFolder::create(&arguments)?;
    println!("run folder  {}\n", run.root().display());

    train(&arguments, &run, &data, &mut model, precision)?;
    println!("{}", run.write_results(&arguments, &data, &model)?);
    println!(
        "report {}\nmodel  {}",
        run.report().display(),
        run.model().display()
    );
    Ok(())
}

/// Micro-batches into steps; the loop itself is [`TrainingLoop::run`].
fn train(
    arguments: &TrainingArguments,
    run: &RunFolder,
    data: &TextData,
    model: &mut CausalLm,
    precision: Precision,
) -> Result<()> {
    let device = model.device();
    let plan = arguments.plan(data.micro_batches_per_epoch(arguments))?;
    let mut trackers = Trackers::new().with(JsonLines::create(run.metrics())?);
    if arguments.reports_to(ReportTo::TensorBoard) {
        trackers = trackers.with(TensorBoard::create(run.tensorboard())?);
    }
    let training = TrainingLoop {
        arguments,
        plan,
        precision,
        optimizer: arguments.new_optimizer(model)?,
        trackers,
        shows_progress: true,
    };
    let mut batches = data.train_loader(arguments, device)?;
    let summary = training.run(model, &mut batches, &mut |model| {
        let batches = data.validation_loader(arguments, device)?;
        let loss = evaluate(model, batches, precision)?;
        Ok(Evaluation {
            loss,
            bits_per_byte: data.validation.bits_per_byte(loss),
        })
    })?;
    if summary.padding() > 0.0 {
        println!(
            "{:.1}% of the places were padding",
            100.0 * summary.padding()
        );
    }
    if let Some(loading) = summary.data_loading {
        println!("{loading}");
    }
    if let Some(bottleneck) = summary.bottleneck {
        println!("{bottleneck}");
    }
    Ok(())
}
