//! `cargo xtask …`: sets this workspace up and runs what is to be run in it.
//!
//! Needs no libtorch, because it is what fetches libtorch. Every command prints the exact command
//! that it runs, so that it can be run again, changed, or learned.

#![forbid(unsafe_code)]

mod cargo;
mod check;
mod dist;
mod doctor;
mod failure;
mod hash;
mod lock;
mod progress;
mod record;
mod setup;
mod sources;
mod space;
mod unpack;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

use crate::cargo::Cargo;
use crate::failure::Result;
use crate::setup::Wish;

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    about = "Sets Overdrive up and runs what is to be run in it."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Find libtorch or fetch it, and tell Cargo where it is
    Setup {
        /// Fetch the CUDA build (NVIDIA GPUs, Linux; about 3 GB to download)
        #[arg(long, conflicts_with = "cpu")]
        cuda: bool,
        /// Go back to the CPU build after `setup --cuda`
        #[arg(long)]
        cpu: bool,
        /// Unpack it anew, even where it is there already
        #[arg(long)]
        force: bool,
    },
    /// Train a language model on real text: cargo run --release … --example train; `--nproc N`: by so many
    /// processes
    Train(Further),
    /// Run an example by name: cargo run --release … --example NAME
    Example {
        /// The file's name in examples/ without `.rs`
        name: String,
        #[command(flatten)]
        _further: Further,
    },
    /// Run all tests: cargo test --workspace
    Test(Further),
    /// Run the benchmarks: cargo bench -p overdrive-benches
    Bench(Further),
    /// Measure what each technique is worth on this machine: default, + mixed precision, + flash
    /// attention, + checkpointing, + fused kernels, all
    Ablation(Further),
    /// Put all examples and the libraries that they need into a folder that runs on another machine without
    /// Rust
    Dist {
        /// The folder to make; one that this command has made before is replaced [default:
        /// target/dist/overdrive]
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
        /// Features of the examples, as in `--features parquet`
        #[arg(long, value_name = "FEATURES")]
        features: Option<String>,
    },
    /// Look at this machine: libtorch, devices, compiler, memory, and which precision suits it
    Doctor,
    /// Format the sources: cargo fmt --all
    Fmt(Further),
    /// Lint: cargo clippy --workspace --all-targets
    Lint(Further),
    /// Build the documentation: cargo doc --workspace --no-deps
    Docs(Further),
    /// Everything that CI does: format, lints, documentation, a short training, all tests
    Check,
}

/// Arguments that are passed on as they are, `--help` included. Declared for the help text; what
/// is passed on is [`further`].
#[derive(Args)]
#[command(disable_help_flag = true)]
struct Further {
    /// Passed on as they are
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "ARGS"
    )]
    _arguments: Vec<OsString>,
}

fn main() -> ExitCode {
    // Before anything is written: what the record held when Cargo made our environment.
    setup::libtorch_at_start();
    match run(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if !failure.is_silent() {
                eprintln!("error: {failure}");
            }
            ExitCode::from(failure.code)
        }
    }
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Setup { cuda, cpu, force } => {
            let wish = match (cuda, cpu) {
                (true, _) => Wish::Cuda,
                (_, true) => Wish::Cpu,
                _ => Wish::Any,
            };
            setup::setup(wish, force).map(|found| found.report())
        }
        Command::Train(_) => all_after_setup(cargo::train(&further(2))),
        Command::Example { name, .. } => after_setup(cargo::example(&name, &further(3))),
        Command::Test(_) => after_setup(cargo::test(&further(2))),
        Command::Bench(_) => after_setup(cargo::bench(&further(2))),
        Command::Ablation(_) => after_setup(cargo::ablation(&further(2))),
        Command::Dist { out, features } => dist::dist(out.as_deref(), features.as_deref()),
        Command::Doctor => doctor::doctor(),
        Command::Fmt(_) => cargo::fmt(&further(2)).replace_this_process(),
        Command::Lint(_) => after_setup(cargo::lint(&further(2))),
        Command::Docs(_) => after_setup(cargo::docs(&further(2))),
        Command::Check => check::check(),
    }
}

/// The arguments after the first `words`, as they were typed. Not from clap: it takes a first `--`
/// for itself, which in `cargo xtask test -- --nocapture` is cargo's.
fn further(words: usize) -> Vec<OsString> {
    std::env::args_os().skip(words).collect()
}

/// Makes sure that libtorch is there, then becomes `cargo`.
fn after_setup(cargo: Cargo) -> Result<()> {
    all_after_setup(vec![cargo])
}

/// The same with commands before the last one.
fn all_after_setup(mut commands: Vec<Cargo>) -> Result<()> {
    setup::setup(Wish::Any, false)?;
    let last = commands.pop();
    commands.iter().try_for_each(Cargo::run)?;
    last.map_or(Ok(()), |cargo| cargo.replace_this_process())
}
