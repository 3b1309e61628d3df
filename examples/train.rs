//! Trains a small Llama on real text: by default the Rust sources that Cargo keeps on this machine.
//! In about five minutes on two CPU cores the validation loss falls from 8.3 to about 4.5 nats a
//! token, and the model writes something that looks like Rust.
//!
//! ```text
//! cargo run --release -p overdrive-examples --example train              # or: cargo xtask train
//! cargo run --release -p overdrive-examples --example train -- --preset small --data book.txt --bf16
//! cargo run --release -p overdrive-examples --example train -- --data rows.csv --text-column body --packing
//! cargo xtask train --nproc 2                                            # or: torchrun --no-python …
//! ```
//!
//! The run folder gets snapshots (`--save-steps N`), from which `--resume-from-checkpoint true` goes on bit for
//! bit after a Ctrl-C, a SIGTERM (both end it with code 75) or a kill; metrics.jsonl, TensorBoard events,
//! report.html and a Hugging Face model.

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use overdrive::distributed::ProcessGroup;
use overdrive::precision::Precision;
use overdrive::trainer::{
    Evaluation, Part, RunFolder, Saving, TextData, TrainArgs, TrainingArguments, TrainingLoop,
    TrainingSummary, evaluate_in,
};
use overdrive::transformer::CausalLm;

/// Trains a small Llama on real text
#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    train: TrainArgs,
}

fn main() -> ExitCode {
    overdrive_examples::exit_or_go_on(run(&Flags::parse()))
}

/// Whether it was interrupted.
fn run(flags: &Flags) -> Result<bool> {
    let mut notes = Vec::new();
    let arguments = flags
        .train
        .resolve_telling(|note| notes.push(note.to_owned()))?;
    // The processes that torchrun or `cargo xtask train --nproc N` has started; most often one.
    let group = arguments.init_process_group()?;
    let say = |line: &str| {
        if group.is_main() {
            println!("{line}");
        }
    };
    notes.iter().for_each(|note| say(note));
    let (device, precision) = (arguments.device_in(&group), arguments.apply()?);
    let data = TextData::prepare(&arguments, say)?;
    let mut model = arguments.new_model(&data, device)?;
    say(&format!(
        "model       {:.2}M weights on {}, {precision}",
        model.num_parameters() as f64 / 1e6,
        match group.world_size() {
            1 => format!("{device:?}"),
            processes => format!("{device:?}, {processes} processes"),
        }
    ));
    if let Some(warning) = precision.warning(device) {
        say(&format!("            warning: {warning}"));
    }
    let memory = arguments.memory_plan(data.vocab_size()).estimate()?;
    say(&format!(
        "memory      about {} MiB of tensors at most, by estimate",
        memory.peak >> 20
    ));
    // Made when nothing can be wrong with data and model any more: no empty run is left behind.
    let run = RunFolder::open_or_create_in(&group, &arguments)?;
    say(&format!("run folder  {}", run.root().display()));

    let training = Training {
        arguments: &arguments,
        group: &group,
        run: &run,
        data: &data,
        precision,
    };
    let summary = training.run(&mut model)?;
    if !group.is_main() {
        return Ok(summary.interrupted);
    }
    println!("{summary}{}", run.write_results(&arguments, &data, &model)?);
    println!(
        "report {}\nmodel  {}",
        run.report().display(),
        run.model().display()
    );
    if summary.interrupted {
        let folder = run.root().display();
        println!("go on with `--out {folder} --resume-from-checkpoint true`");
    }
    Ok(summary.interrupted)
}

/// What a run is made of beside its model.
struct Training<'a> {
    arguments: &'a TrainingArguments,
    group: &'a ProcessGroup,
    run: &'a RunFolder,
    data: &'a TextData,
    precision: Precision,
}

impl Training<'_> {
    /// Micro-batches into steps; the loop itself is [`TrainingLoop::run`].
    fn run(&self, model: &mut CausalLm) -> Result<TrainingSummary> {
        let (arguments, group, run) = (self.arguments, self.group, self.run);
        let part = Part::of(group, model.device());
        let saving = Saving::of_model(arguments, group, run, model, self.data)?;
        if group.is_main() {
            println!("{}", saving.goes_on());
        }
        let mut batches = self.data.train_loader(arguments, part)?;
        let weights = model.named_parameters();
        let training = TrainingLoop {
            arguments,
            plan: arguments.plan(batches.batches_per_epoch() as u64)?,
            precision: self.precision,
            optimizer: arguments.new_optimizer(model)?,
            data_parallel: arguments.data_parallel(group, weights)?,
            trackers: run.trackers_in(group, arguments, saving.resumed_step())?,
            saving: Some(saving),
            shows_progress: group.is_main(),
        };
        let evaluate = |model: &CausalLm| {
            let batches = self.data.validation_loader(arguments, part)?;
            let loss = evaluate_in(group, model, batches, self.precision)?;
            Ok(Evaluation {
                loss,
                bits_per_byte: self.data.validation.bits_per_byte(loss),
            })
        };
        Ok(training.run(model, &mut batches, &mut { evaluate })?)
    }
}
