//! Trains a small Llama on text, by default the Rust sources that Cargo keeps. In about five minutes on two CPU cores the
//! validation loss falls from 8.3 to about 4.5 nats per token, and the generated samples look like Rust.
//!
//! ```text
//! cargo run --release -p overdrive-examples --example train              # or: cargo xtask train
//! cargo run --release -p overdrive-examples --example train -- --preset small --data book.txt --bf16
//! cargo run --release -p overdrive-examples --example train -- --data rows.csv --text-column body --packing
//! cargo xtask train --nproc 2                                            # or: torchrun --no-python …
//! cargo xtask train --check                                              # what would fail or be slow
//! ```
//!
//! The run folder contains snapshots (`--save-steps N`), metrics.jsonl, TensorBoard events, report.html and a Hugging
//! Face model. `--resume-from-checkpoint true` resumes from the last snapshot, bit for bit, after Ctrl-C or SIGTERM
//! (which save and exit with code 75) or a kill. `own_model` trains another model with the same loop.

use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Parser;
use overdrive::distributed::ProcessGroup;
use overdrive::hub::{HubOptions, data_paths};
use overdrive::precision::Precision;
use overdrive::trainer::{
    self, DataShard, Evaluation, RunEnd, RunFolder, RunOptions, Severity, TextData, TrainArgs,
    TrainingArguments, TrainingRun, batch_loss, describe_model, evaluate, model_flops, new_model,
    print_line, run_main, snapshot_files, train_with_batch_that_fits, write_results,
};
use overdrive::transformer::CausalLm;

/// Trains a small Llama on text
#[derive(Parser)]
pub(crate) struct Flags {
    #[command(flatten)]
    train: TrainArgs,
    /// Check data, disk, memory, precision, processes and threads, and print what to change, without training; the exit
    /// code is 1 if the run would fail
    #[arg(long)]
    check: bool,
}

#[allow(dead_code, reason = "the tests include this file")]
fn main() -> ExitCode {
    run_main(|| run(&Flags::parse()))
}

/// Prepares the data and trains; retries with smaller micro-batches if memory runs out.
pub(crate) fn run(flags: &Flags) -> Result<RunEnd> {
    let (mut arguments, notes) = flags.train.resolve_with_notes()?;
    // The processes that torchrun or `cargo xtask train --nproc N` has started; usually one.
    let group = arguments.init_process_group()?;
    let say = |line: &str| {
        if group.is_main() {
            print_line(line);
        }
    };
    notes.iter().for_each(|note| say(note));
    arguments.find_data(|data| data_paths(data, &HubOptions::from_env()?))?;
    #[cfg(feature = "remote")] // Files at https://, s3:// and gs://.
    {
        use overdrive::remote::{RemoteOptions, data_paths};
        arguments.find_data(|data| data_paths(data, &RemoteOptions::from_env()?))?;
    }
    let device = arguments.device(&group);
    if let Some(choice) = arguments.choose_precision(&group, device)? {
        say(&format!("precision   {choice}"));
    }
    if flags.check {
        let found = arguments.check_run(device, group.world_size())?;
        say(&found.to_string());
        match found.count(Severity::Failure) {
            0 => return Ok(RunEnd::Finished),
            failures => bail!("{failures} of the findings would make the run fail"),
        }
    }
    RunFolder::check(&arguments)?;
    arguments.check_metric(&["bits_per_byte"])?;
    let precision = arguments.apply()?;
    let data = TextData::prepare(&arguments, say)?;
    let shape = arguments.memory_plan(data.vocab_size(), precision).shape;
    if let Some(line) = arguments.fit_batch(shape, precision, device, &group)? {
        say(&line);
    }
    for finding in arguments.start_warnings(&data, device, group.world_size())? {
        say(&format!("warning     {}; {}", finding.what, finding.remedy));
    }
    train_with_batch_that_fits(&mut arguments, &group, say, |arguments, say| {
        train(arguments, &data, precision, &group, say)
    })
}

/// Trains a new model, or resumes, and writes the results unless the run was interrupted.
fn train(
    arguments: &mut TrainingArguments,
    data: &TextData,
    precision: Precision,
    group: &ProcessGroup,
    say: &mut dyn FnMut(&str),
) -> Result<RunEnd> {
    let device = arguments.device(group);
    let shard = DataShard::of(group, device);
    // The processes compare theirs before one of them writes anything.
    let fingerprints = data.fingerprints(arguments, group)?;
    let mut model = new_model(arguments, data, device)?;
    describe_model(&model, arguments, precision, group, &mut *say)?;
    // Created after all checks of data and model, so that a failed start leaves no empty run.
    let folder = RunFolder::open_or_create(group, arguments)?;
    say(&format!("run folder  {}", folder.root().display()));
    arguments.continue_in(&folder);

    let parameters = model.named_parameters();
    let mut loader = data.train_loader(arguments, shard)?;
    let options = RunOptions {
        precision: Some(precision),
        folder: Some(folder.clone()),
        fingerprints: Some(fingerprints),
        files: snapshot_files(&model, data, arguments)?,
        flops: Some(model_flops(&model, &parameters)),
        ..RunOptions::default()
    };
    let mut run = TrainingRun::start(arguments, group, parameters, &mut loader, options)?;
    let validation_loss = |model: &mut CausalLm| -> trainer::Result<Evaluation> {
        let batches = data.validation_loader(arguments, shard)?;
        model.set_training(false)?;
        let loss = evaluate(model, batches, precision, group)?;
        model.set_training(true)?;
        let bits = data.validation.bits_per_byte(loss);
        Ok(Evaluation::new(loss).with_metric("bits_per_byte", bits))
    };

    model.set_training(true)?;
    run.evaluate_on_start(|| validation_loss(&mut model))?;
    while let Some(batches) = run.next_batches(&mut loader)? {
        for batch in batches {
            run.forward_backward(batch, |batch| {
                batch_loss(&model, batch).map(|loss| loss.sum)
            })?;
        }
        run.step()?;
        run.evaluate_if_due(|| validation_loss(&mut model))?;
        run.save_if_due()?;
    }

    let (summary, averages) = run.finish()?;
    if group.is_main() && summary.end() == RunEnd::Finished {
        model.set_training(false)?;
        let results = write_results(&folder, arguments, data, &model, &summary, averages)?;
        print_line(format_args!("{summary}{results}"));
    }
    Ok(summary.end())
}
