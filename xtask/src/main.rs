//! `cargo xtask …`: sets up this workspace and runs its common commands.
//!
//! It works without libtorch, because it is the program that fetches libtorch. Every command prints the exact
//! command that it runs, so that it can be repeated and changed.

#![forbid(unsafe_code)]

mod cargo;
mod check;
mod dist;
mod doctor;
mod failure;
#[cfg(all(test, target_os = "linux", target_env = "gnu"))]
#[path = "../../faults/mod.rs"]
mod faults;
mod fuzz;
mod gpu_bundle;
mod hash;
mod kernels;
mod lock;
mod matrix;
mod progress;
mod readmes;
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
use crate::setup::Request;

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    about = "Sets up Overdrive and runs its common commands."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Find or fetch libtorch, and configure Cargo to use it
    Setup {
        /// Fetch the CUDA build (NVIDIA GPUs, Linux; about 3 GB to download)
        #[arg(long, conflicts_with = "cpu")]
        cuda: bool,
        /// Return to the CPU build after `setup --cuda`
        #[arg(long)]
        cpu: bool,
        /// Unpack libtorch again, even if it is already there
        #[arg(long)]
        force: bool,
    },
    /// Train a language model on text: cargo run --release … --example train; with `--nproc N` in N
    /// processes
    Train(Further),
    /// Find the fastest micro-batch, accumulation, precision, checkpointing and workers of `train` on this machine, within
    /// a limit of memory, and write a configuration
    Tune(Further),
    /// Run an example by name: cargo run --release … --example NAME
    Example {
        /// The name of the file in examples/ without `.rs`
        name: String,
        #[command(flatten)]
        _further: Further,
    },
    /// Run all tests: cargo test --workspace
    Test(Further),
    /// Run the benchmarks: cargo bench -p overdrive-benches
    Bench(Further),
    /// Measure the effect of each technique on this machine: default, + mixed precision, + flash attention, +
    /// checkpointing, + fused kernels, all; with `--of training`, `--of finetuning` or `--of inference`, changes on top of
    /// each other
    Ablation(Further),
    /// Collect all examples and the libraries that they need in a folder that runs on another machine without
    /// Rust
    Dist {
        /// The output folder; one that this command created before is replaced [default:
        /// target/dist/overdrive]
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
        /// Features of the examples, as in `--features parquet`
        #[arg(long, value_name = "FEATURES")]
        features: Option<String>,
    },
    /// Check and measure everything that runs on a GPU, and write a report: cargo run --release -p
    /// overdrive-gpu-check; `--device cpu` tests the program itself
    GpuCheck(Further),
    /// Make a folder with `gpu-check` that runs on a machine with the PyTorch 2.11 of its Python, without Rust and
    /// without a network
    GpuBundle {
        /// The output folder; one that this command created before is replaced [default:
        /// target/dist/gpu-check]
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
    },
    /// Report on this machine: libtorch, devices, compiler, memory, and the precision to train in
    Doctor,
    /// Let every system call of saves, caches, indexes and downloads fail in turn: cargo test --workspace … --test
    /// fault_injection
    Faults,
    /// Fuzz the readers of foreign files, guided by coverage, with AddressSanitizer (x86-64 or Arm Linux)
    Fuzz {
        /// The reader [default: all, one after the other]
        target: Option<String>,
        /// The time for each reader
        #[arg(long, default_value_t = 10.0)]
        minutes: f64,
    },
    /// Compile the GPU kernels by Triton, and run each by its interpreter (Python 3.11; neither GPU nor toolkit)
    Kernels {
        /// Only compare them with those of the repository
        #[arg(long)]
        check: bool,
    },
    /// Check the dependencies' advisories, licences and sources by deny.toml: cargo deny check
    Deny(Further),
    /// Compile each crate alone: without features, and with each feature by itself
    Matrix {
        /// The crates [default: all]
        crates: Vec<String>,
        /// Also run the tests of each crate alone
        #[arg(long)]
        tests: bool,
    },
    /// Try what publishing does: the documentation without libtorch, then cargo publish --workspace --dry-run
    PublishCheck {
        /// Only make the packages, without building each from its package
        #[arg(long)]
        no_verify: bool,
    },
    /// Write the README of each crate from the documentation of its lib.rs
    Readmes {
        /// Only compare them
        #[arg(long)]
        check: bool,
    },
    /// Format the sources: cargo fmt --all
    Fmt(Further),
    /// Lint: cargo clippy --workspace --all-targets
    Lint(Further),
    /// Build the documentation: cargo doc --workspace --no-deps
    Docs(Further),
    /// Run everything that CI runs: format, licences and sources of the dependencies, lints, documentation, a
    /// short training run, all tests
    Check,
}

/// Arguments that are passed on unchanged, including `--help`. They are declared for the help text; the
/// arguments that are passed on come from [`further`].
#[derive(Args)]
#[command(disable_help_flag = true)]
struct Further {
    /// Passed on unchanged
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "ARGS"
    )]
    _arguments: Vec<OsString>,
}

fn main() -> ExitCode {
    // Read before anything is written: the record as it was when Cargo created this environment.
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
                (true, _) => Request::Cuda,
                (_, true) => Request::Cpu,
                _ => Request::Any,
            };
            setup::setup(wish, force).map(|found| found.report())
        }
        Command::Train(_) => all_after_setup(cargo::train(&further(2))),
        Command::Tune(_) => all_after_setup(cargo::tune(&further(2))),
        Command::Example { name, .. } => after_setup(cargo::example(&name, &further(3))),
        Command::Test(_) => {
            let found = setup::setup(Request::Any, false)?;
            cargo::run_all(cargo::tests(&further(2), doctor::has_gpu(&found.libtorch)))
        }
        Command::Bench(_) => after_setup(cargo::bench(&further(2))),
        Command::Ablation(_) => after_setup(cargo::ablation(&further(2))),
        Command::Dist { out, features } => dist::dist(out.as_deref(), features.as_deref()),
        Command::GpuCheck(_) => after_setup(cargo::gpu_check(&further(2))),
        Command::GpuBundle { out } => gpu_bundle::gpu_bundle(out.as_deref()),
        Command::Doctor => doctor::doctor(),
        Command::Faults => all_after_setup(cargo::faults()),
        Command::Fuzz { target, minutes } => fuzz::fuzz(target.as_deref(), minutes),
        Command::Kernels { check } => kernels::kernels(check),
        Command::Deny(_) => {
            check::deny_is_installed()?;
            cargo::deny(&further(2)).replace_this_process()
        }
        Command::Matrix { crates, tests } => {
            setup::setup(Request::Any, false)?;
            matrix::matrix(&crates, tests)
        }
        Command::PublishCheck { no_verify } => {
            setup::setup(Request::Any, false)?;
            readmes::readmes(true)?;
            cargo::docs_without_libtorch().run()?;
            cargo::publish_dry_run(!no_verify).run()
        }
        Command::Readmes { check } => readmes::readmes(check),
        Command::Fmt(_) => cargo::fmt(&further(2)).replace_this_process(),
        Command::Lint(_) => after_setup(cargo::lint(&further(2))),
        Command::Docs(_) => after_setup(cargo::docs(&further(2))),
        Command::Check => check::check(),
    }
}

/// Returns the arguments after the first `words`, as they were typed. clap is not used, because it consumes a
/// first `--`, which in `cargo xtask test -- --nocapture` is meant for cargo.
fn further(words: usize) -> Vec<OsString> {
    std::env::args_os().skip(words).collect()
}

/// Makes sure that libtorch is there, then replaces this process by `cargo`.
fn after_setup(cargo: Cargo) -> Result<()> {
    all_after_setup(vec![cargo])
}

/// As [`after_setup`], with commands before the last one.
fn all_after_setup(commands: Vec<Cargo>) -> Result<()> {
    setup::setup(Request::Any, false)?;
    cargo::run_all(commands)
}
