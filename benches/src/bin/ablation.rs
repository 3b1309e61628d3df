//! Trains the same model in each configuration and prints the effect of each technique on this machine:
//! `cargo xtask ablation`. Writes ablation.md, ablation.json and ablation.svg.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Parser;
use overdrive::profiling::Machine;
use overdrive_benches::StepResult;
use overdrive_benches::ablation::{
    Configuration, Measurement, Precisions, Row, Table, Trainer, write_picture,
};
use tch::Device;

/// Measures default, + mixed precision, + flash attention, + activation checkpointing, + fused kernels,
/// all: speed, peak memory and validation loss
#[derive(Parser)]
struct Flags {
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

fn main() -> StepResult<()> {
    let flags = Flags::parse();
    let on_cpu = flags
        .trainer
        .iter()
        .any(|flag| flag == "--cpu" || flag == "--use-cpu");
    let device = if on_cpu {
        Device::Cpu
    } else {
        Device::cuda_if_available()
    };
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
        machine: format!(
            "{}, {} threads, libtorch {} ({}), {device:?}",
            machine.cpu, machine.threads, machine.libtorch, machine.cpu_capability
        ),
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
