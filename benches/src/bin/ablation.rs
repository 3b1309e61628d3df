//! Trains the same model in each configuration and prints the effect of each technique on this machine:
//! `cargo xtask ablation`. Writes ablation.md, ablation.json and ablation.svg. `--of training`, `--of finetuning` and
//! `--of inference` are tables of changes on top of each other, with files of these names.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use overdrive::profiling::Machine;
use overdrive_benches::StepResult;
use overdrive_benches::ablation::{
    Configuration, Measurement, Precisions, Row, StageRuns, Table, Trainer, finetuning_stages,
    inference_stages, training_stages, write_picture,
};
use tch::Device;

/// Measures default, + mixed precision, + flash attention, + activation checkpointing, + fused kernels,
/// all: speed, peak memory and validation loss
#[derive(Parser)]
struct Flags {
    /// The table
    #[arg(long, value_enum, default_value_t = Of::Techniques)]
    of: Of,
    /// Model of the tables of finetuning and inference [default: a new one]
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Number of optimizer steps in each run
    #[arg(long, default_value_t = 40)]
    steps: u64,
    /// Number of first steps in each run that do not count for its speed
    #[arg(long, default_value_t = 5)]
    warmup: usize,
    /// Number of rounds over the configurations, of which the medians are printed
    #[arg(long, default_value_t = 2)]
    rounds: usize,
    /// Folder of ablation.md, ablation.json and ablation.svg
    #[arg(long, default_value = "runs/ablation")]
    out: PathBuf,
    /// Additional flags of the trainer: `-- --preset small --context-length 1024 --micro-batch-size 2`
    #[arg(last = true)]
    trainer: Vec<OsString>,
}

/// The tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Of {
    /// Each technique by itself beside the default, and all of them
    Techniques,
    /// Training from single sequences to batches, flash attention, fused kernels and mixed precision, on top of each other
    Training,
    /// Fine-tuning from all weights to 4-bit adapters, packing and mixed precision
    Finetuning,
    /// Generation from beams without a cache to greedy search, caches, batches and INT8
    Inference,
}

fn main() -> StepResult<()> {
    let flags = Flags::parse();
    match flags.of {
        Of::Techniques => techniques(&flags),
        of => stages(of, &flags),
    }
}

fn device_of(flags: &Flags) -> Device {
    let on_cpu = |flag: &OsString| flag == "--cpu" || flag == "--use-cpu";
    match flags.trainer.iter().any(on_cpu) {
        true => Device::Cpu,
        false => Device::cuda_if_available(),
    }
}

fn described(machine: &Machine, device: Device) -> String {
    format!(
        "{}, {} threads, libtorch {} ({}), {device:?}",
        machine.cpu, machine.threads, machine.libtorch, machine.cpu_capability
    )
}

/// Measures a table of changes on top of each other.
fn stages(of: Of, flags: &Flags) -> StepResult<()> {
    // Generation is measured on the CPU.
    let device = match of {
        Of::Inference => Device::Cpu,
        _ => device_of(flags),
    };
    let runs = StageRuns {
        steps: flags.steps,
        warmup: flags.warmup,
        rounds: flags.rounds.max(1),
        further: flags.trainer.clone(),
    };
    let machine = described(&Machine::detect(), device);
    let model = flags.model.as_deref();
    let (name, table) = match of {
        Of::Inference => ("inference", inference_stages(&runs, machine, model)?),
        Of::Finetuning => {
            let precisions = Precisions::of(device);
            let table = finetuning_stages(&runs, machine, &precisions, model)?;
            ("finetuning", table)
        }
        _ => {
            let precisions = Precisions::of(device);
            ("training", training_stages(&runs, machine, &precisions)?)
        }
    };
    table.write(&flags.out, name)?;
    println!("\n{}\nwritten to {}", table.markdown(), flags.out.display());
    Ok(())
}

fn techniques(flags: &Flags) -> StepResult<()> {
    let device = device_of(flags);
    let trainer = Trainer::build(flags.steps, flags.warmup, &flags.trainer)?;

    let precisions = Precisions::of(device);
    let configurations = Configuration::rows(&precisions);

    let mut rounds: Vec<Vec<Measurement>> = vec![Vec::new(); configurations.len()];
    for round in 1..=flags.rounds.max(1) {
        for (configuration, measured) in configurations.iter().zip(&mut rounds) {
            let run = trainer.run(&configuration.flags(&precisions))?;
            println!(
                "round {round}  {:28} {:>7.0} ms per step  {:>6} MiB  loss {:.3}",
                configuration.title(&precisions),
                run.step_seconds * 1e3,
                run.peak_memory_bytes >> 20,
                run.eval_loss
            );
            measured.push(run);
        }
    }

    let shape: Vec<_> = flags
        .trainer
        .iter()
        .map(|flag| flag.to_string_lossy())
        .collect();
    let shape = if shape.is_empty() {
        "the default preset".to_owned()
    } else {
        shape.join(" ")
    };
    let machine = Machine::detect();
    let rows = configurations
        .iter()
        .zip(&rounds)
        .map(|(configuration, measured)| {
            Row::new(
                &configuration.title(&precisions),
                &configuration.flags(&precisions),
                measured,
                &rounds[0],
            )
        });
    let table = Table {
        machine: described(&machine, device),
        run: format!(
            "{} steps of {shape}, medians of {} runs in turn",
            flags.steps,
            flags.rounds.max(1)
        ),
        rows: rows.collect(),
        notes: precisions.notes(),
    };
    std::fs::create_dir_all(&flags.out)?;
    std::fs::write(flags.out.join("ablation.md"), table.markdown())?;
    std::fs::write(
        flags.out.join("ablation.json"),
        serde_json::to_string_pretty(&table)?,
    )?;
    write_picture(&table, &flags.out.join("ablation.svg"))?;
    println!("\n{}\nwritten to {}", table.markdown(), flags.out.display());
    Ok(())
}
