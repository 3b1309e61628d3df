//! Finds the micro-batch size, accumulation, precision, checkpointing and number of workers that train fastest on this
//! machine, for a given effective batch size and within a memory limit: `cargo xtask tune`. Settings whose estimated
//! memory exceeds the limit are skipped; the others are measured in short runs of `train`.
//!
//! ```text
//! cargo xtask tune                                                # the default run, 9/10 of the free memory
//! cargo xtask tune --preset small --effective-batch 64 --memory-limit 2GiB
//! cargo xtask train --config runs/tune/config.json
//! ```

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Parser;
use overdrive::accumulation::BatchPlan;
use overdrive::core::{OutputFolder, files, units};
use overdrive::precision::Precision;
use overdrive::profiling::Machine;
use overdrive::trainer::{
    DecoderShape, DeviceFacts, Interrupt, RecommendedSettings, Task, TextData, TrainArgs,
    TrainingArguments, Trials, TuneOptions, Tuning, print_line, run_main, usable_memory,
};
use overdrive_examples::{MemoryLimit, local_data};
use tch::Device;

/// Finds the fastest settings of `train` for this machine and writes them as a configuration
#[derive(Parser)]
pub(crate) struct Flags {
    #[command(flatten)]
    train: TrainArgs,
    /// Limit of the tensors' peak memory, such as 6GiB or 800MB [default: nine tenths of the free memory]
    #[arg(long, value_name = "SIZE", help_heading = "Search")]
    memory_limit: Option<MemoryLimit>,
    /// Number of sequences in an optimizer step [default: micro-batch times accumulation of the configuration]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Search")]
    effective_batch: Option<u64>,
    /// Number of measured steps in each trial
    #[arg(long, value_name = "N", default_value_t = 4, help_heading = "Search")]
    trial_steps: u64,
    /// Number of warm-up steps before them in each trial
    #[arg(long, value_name = "N", default_value_t = 2, help_heading = "Search")]
    trial_warmup: u64,
    /// Maximum number of trials
    #[arg(long, value_name = "N", default_value_t = 24, help_heading = "Search", value_parser = clap::value_parser!(u16).range(1..))]
    max_trials: u16,
    /// Output folder for config.json, tune.md and tune.json
    #[arg(
        long,
        value_name = "DIR",
        default_value = "runs/tune",
        help_heading = "Search"
    )]
    results: PathBuf,
}

fn main() -> ExitCode {
    run_main(|| {
        let flags = Flags::parse();
        // A signal ends the trial that runs, which is a program of its own, and removes its folder.
        Interrupt::install()?;
        let trials = Trials::new(train_program()?, flags.trial_steps, flags.trial_warmup);
        tune(&flags, &trials).map(drop)
    })
}

/// Returns the program `train` beside this one, as Cargo places examples.
fn train_program() -> Result<PathBuf> {
    let here = std::env::current_exe().context("this program has no path")?;
    let program = here.with_file_name(format!("train{}", std::env::consts::EXE_SUFFIX));
    if !program.is_file() {
        bail!(
            "{} does not exist; build it with `cargo build --release -p overdrive-examples --example train`, or run \
             `cargo xtask tune`",
            program.display()
        );
    }
    Ok(program)
}

/// Searches, prints the grid, and writes the results.
pub(crate) fn tune(flags: &Flags, trials: &Trials) -> Result<Tuning> {
    let (mut arguments, notes) = flags.train.resolve_with_notes()?;
    notes.iter().for_each(print_line);
    // The written configuration keeps the names.
    let data_names = arguments.data.clone();
    arguments.find_data(local_data)?;
    let inputs = arguments
        .tokenizer
        .as_deref()
        .map(|path| ("--tokenizer", path));
    let inputs: Vec<_> = inputs.into_iter().collect();
    let output = OutputFolder::check("tune", "--results", &flags.results, &inputs)?;
    if let Some(effective) = flags.effective_batch {
        let largest = arguments.per_device_train_batch_size.min(effective);
        let plan = BatchPlan::new(effective, 1, 1)?.with_micro_batch_at_most(largest);
        arguments.set_batch_plan(
            plan.context("the effective batch size has no valid micro-batch size")?,
        );
    }
    let group = arguments.init_process_group()?;
    if group.world_size() > 1 {
        bail!("`tune` measures a single process; start it without a launcher");
    }
    let device = arguments.device(&group);
    arguments.apply()?;
    // The trials reuse the cached tokenizer and tokens.
    let data = TextData::prepare(&arguments, |line| print_line(line))?;
    let shape = arguments
        .memory_plan(data.vocab_size(), Precision::Fp32)
        .shape;
    let limit = match flags.memory_limit {
        Some(MemoryLimit(bytes)) => bytes,
        None => usable_memory(device)
            .context("the free memory of this system is unknown; give --memory-limit SIZE")?,
    };
    describe(&arguments, device, limit, shape)?;

    let mut options = TuneOptions::new(limit, precisions(&arguments, device));
    options.device = device;
    options.max_trials = flags.max_trials.into();
    options.workers.retain(|&workers| workers <= processors());
    let tuning = arguments.tune(shape, &options, |candidate| {
        let end = trials.run(&arguments, candidate);
        if let Ok(end) = &end {
            print_line(format_args!("tried       {candidate}: {end}"));
        }
        end
    })?;
    output.create()?;
    arguments.data = data_names;
    write(flags, &arguments, &tuning, device)?;
    Ok(tuning)
}

fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, Into::into)
}

/// Returns the precisions to try: the given one, or the recommended one and fp32.
fn precisions(arguments: &TrainingArguments, device: Device) -> Vec<Precision> {
    if arguments.selects_precision() || !arguments.auto_precision {
        return vec![arguments.precision()];
    }
    match Precision::recommend(device).precision {
        Precision::Fp32 => vec![Precision::Fp32],
        recommended => vec![recommended, Precision::Fp32],
    }
}

fn describe(
    arguments: &TrainingArguments,
    device: Device,
    limit: u64,
    shape: DecoderShape,
) -> Result<()> {
    let facts = DeviceFacts::detect(device);
    let recommended =
        RecommendedSettings::of(&facts, shape, arguments.context_length, Task::Train)?;
    print_line(format_args!(
        "search      {} sequences of {} tokens a step within {} on {}",
        arguments.sequences_per_step(),
        arguments.context_length,
        units::bytes(limit),
        facts.name,
    ));
    if let Some(recommended) = recommended {
        print_line(format_args!(
            "recommended {recommended} (the guide's table, for {} sequences)",
            Task::Train.effective_batch()
        ));
    }
    Ok(())
}

/// Prints the grid, and writes it with the configuration of the chosen row.
fn write(
    flags: &Flags,
    arguments: &TrainingArguments,
    tuning: &Tuning,
    device: Device,
) -> Result<()> {
    let machine = Machine::detect();
    let text = format!(
        "{}, {} threads, libtorch {} ({}), {device:?}. {} sequences of {} tokens a step, at most {} of tensors; trials of \
         {} steps after {}.\n\n{}",
        machine.cpu,
        machine.threads,
        machine.libtorch,
        machine.cpu_capability,
        arguments.sequences_per_step(),
        arguments.context_length,
        units::bytes(tuning.limit_bytes),
        flags.trial_steps,
        flags.trial_warmup,
        tuning.markdown()
    );
    print_line(format_args!("\n{text}"));
    files::write(flags.results.join("tune.md"), text.as_bytes())?;
    let json = serde_json::to_vec_pretty(tuning)?;
    files::write(flags.results.join("tune.json"), &json)?;
    let Some(best) = tuning.best() else {
        bail!(
            "no setting fits into {}: use a larger --memory-limit, a smaller model, a shorter --context-length or \
             `--optim adamw_8bit`",
            units::bytes(tuning.limit_bytes)
        );
    };
    let config = flags.results.join("config.json");
    best.candidate.of(arguments).write(&config)?;
    print_line(format_args!(
        "written to {}; train with: cargo xtask train --config {}",
        flags.results.display(),
        config.display()
    ));
    Ok(())
}
