//! Checks and measures everything that Overdrive does on a GPU, and writes a report. On a CPU it runs the same
//! code with small sizes, as a test of itself.
//!
//! ```text
//! cargo xtask gpu-check                                   # on the GPU, if there is one
//! cargo xtask gpu-check --device cpu --section doctor tiny
//! ```

//!
//! A section is one file in `sections/`. The runner starts each section in its own process with a time limit, so that a
//! crash, a hang or exhausted memory ends only that section. Every result is written to the report as soon as it is
//! available.

#![forbid(unsafe_code)]

mod context;
mod finding;
mod line;
mod models;
mod parity;
mod peer;
mod report;
mod runner;
mod sections;
mod summary;
mod timing;
mod training;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::{Parser, Subcommand};
use overdrive::core::print_line;

use runner::Options;
use sections::{Kind, MACHINERY, SECTIONS, Section, Target, Work};

/// Checks and measures everything that Overdrive does on a GPU
#[derive(Parser)]
#[command(name = "gpu-check", args_conflicts_with_subcommands = true)]
struct Flags {
    /// Device [default: cuda if libtorch can use one or OVERDRIVE_REQUIRE_GPU=1 is set, else cpu]
    #[arg(long, value_enum)]
    device: Option<Target>,
    /// Path of the JSON report; the Markdown report is written beside it
    #[arg(long, value_name = "FILE", default_value = "gpu-check.json")]
    report: PathBuf,
    /// Sections to run, in this order; `correctness` and `figures` select all sections of a kind [default: all]
    #[arg(long, value_name = "NAME", num_args = 1..)]
    section: Vec<String>,
    /// Minutes for all sections together; sections that do not fit are reported as skipped
    #[arg(long, default_value_t = 9.0)]
    minutes: f64,
    /// Print the sections with their planned and their greatest seconds on a GPU
    #[arg(long)]
    list: bool,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Runs a section in this process
    #[command(hide = true)]
    RunSection {
        name: String,
        #[arg(long, value_enum)]
        device: Target,
        #[arg(long)]
        first: usize,
        #[arg(long)]
        seconds: f64,
    },
    /// Runs the work of the section `start`
    #[command(name = "run-start", hide = true)]
    Start {
        #[arg(long, value_enum)]
        device: Target,
        #[arg(long, value_enum)]
        work: Work,
        #[arg(long)]
        model: PathBuf,
        #[arg(long)]
        began: u64,
    },
    /// Runs one process of the section `distributed`
    #[command(hide = true)]
    RunRank {
        #[arg(long, value_enum)]
        device: Target,
    },
}

fn main() -> ExitCode {
    match run(Flags::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(flags: Flags) -> Result<ExitCode> {
    match flags.command {
        Some(Command::RunSection {
            name,
            device,
            first,
            seconds,
        }) => {
            let limit = Duration::try_from_secs_f64(seconds)?;
            sections::run_here(section(&name)?, device, first, limit, |line| {
                print_line(format_args!("{}", line.to_text()));
            });
            return Ok(ExitCode::SUCCESS);
        }
        Some(Command::Start {
            device,
            work,
            model,
            began,
        }) => {
            sections::run_start(device, work, &model, began)?;
            return Ok(ExitCode::SUCCESS);
        }
        Some(Command::RunRank { device }) => {
            sections::run_rank(device)?;
            return Ok(ExitCode::SUCCESS);
        }
        None => {}
    }
    if flags.list {
        for section in SECTIONS {
            let (planned, most) = (section.planned_seconds, section.cuda_seconds);
            let (name, about) = (section.name, section.about);
            print_line(format_args!("{name:14} {planned:4} {most:4}  {about}"));
        }
        return Ok(ExitCode::SUCCESS);
    }
    if !flags.minutes.is_finite() || flags.minutes <= 0.0 {
        bail!("`--minutes` is {}; it must be positive", flags.minutes);
    }
    let is_wished = std::env::var("OVERDRIVE_REQUIRE_GPU").is_ok_and(|value| value == "1");
    if is_wished && flags.device == Some(Target::Cpu) {
        bail!("`--device` is cpu, but OVERDRIVE_REQUIRE_GPU=1 requires a GPU; unset one of them");
    }
    let target = match flags.device {
        Some(target) => target,
        None if is_wished || tch::Cuda::is_available() => Target::Cuda,
        None => Target::Cpu,
    };
    let chosen: Vec<&'static Section> = match flags.section.as_slice() {
        [] => SECTIONS.iter().collect(),
        names => named(names)?,
    };
    let report = runner::run(&Options {
        target,
        sections: chosen,
        report: flags.report.clone(),
        budget: Duration::try_from_secs_f64(flags.minutes * 60.0)?,
        is_gpu_required: target == Target::Cuda,
    })?;
    print_line(format_args!(
        "== {:.0} s; report: {} ==",
        report.seconds,
        flags.report.display()
    ));
    for line in summary::lines(&report) {
        print_line(format_args!("{line}"));
    }
    Ok(match report.failed {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    })
}

/// Returns the sections of these names.
fn named(names: &[String]) -> Result<Vec<&'static Section>> {
    let mut chosen = Vec::new();
    for name in names {
        match Kind::of_name(name) {
            Some(kind) => chosen.extend(SECTIONS.iter().filter(|section| section.kind == kind)),
            None => chosen.push(section(name)?),
        }
    }
    Ok(chosen)
}

fn section(name: &str) -> Result<&'static Section> {
    let mut all = SECTIONS.iter().chain(MACHINERY);
    let found = all.find(|section| section.name == name);
    let names: Vec<&str> = SECTIONS.iter().map(|section| section.name).collect();
    match found {
        Some(section) => Ok(section),
        None => bail!(
            "`--section` is {name}; it must be correctness, figures or one of {}",
            names.join(", ")
        ),
    }
}
