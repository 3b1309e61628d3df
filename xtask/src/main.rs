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
mod figures;
mod fuzz;
mod gpu_bundle;
mod guide;
mod hash;
mod kernels;
mod lock;
mod markdown;
mod matrix;
mod new;
mod progress;
mod readmes;
mod record;
mod setup;
mod sources;
mod space;
mod torch;
mod unpack;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, CommandFactory, Parser, Subcommand};

use crate::cargo::Cargo;
use crate::failure::Result;
use crate::setup::Request;

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    about = "Sets up Overdrive and runs its common commands."
)]
struct Cli {
    /// The libtorch to build with, 2.11 or 2.13 [default: the one of the tch in Cargo.lock]
    // `torch::take_from_arguments` takes it before this parser sees it, because many commands pass their arguments on.
    #[arg(long = "torch", global = true, value_name = "VERSION")]
    _torch: Option<String>,
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
        /// Also record libtorch in this Cargo project, so that it finds libtorch without an environment variable
        #[arg(long, value_name = "DIR")]
        project: Option<PathBuf>,
    },
    /// Make a project outside this workspace that depends on single crates, trains a small model and has tests
    New(New),
    /// Train a language model on text: cargo run --release … --example train; with `--nproc N` in N
    /// processes
    Train(Further),
    /// Find the fastest micro-batch size, accumulation, precision, checkpointing and number of workers of `train` on
    /// this machine, within a memory limit, and write a configuration
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
    /// Collect all examples and the libraries they need in a folder that runs on another machine without Rust
    Dist {
        /// The output folder; a folder that this command created earlier is replaced [default: target/dist/overdrive]
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
        /// Features of the examples, as in `--features parquet`
        #[arg(long, value_name = "FEATURES")]
        features: Option<String>,
        /// Also pack the folder into overdrive-VERSION-TARGET-cpu.tar.gz (or -cuda) beside it, with its SHA-256
        #[arg(long)]
        archive: bool,
    },
    /// Check and measure everything that runs on a GPU, and write a report: cargo run --release -p
    /// overdrive-gpu-check; `--device cpu` tests the program itself
    GpuCheck(Further),
    /// Make a folder with `gpu-check` that runs on a machine with Python and PyTorch 2.11, without Rust or a network
    GpuBundle {
        /// The output folder; a folder that this command created earlier is replaced [default: target/dist/gpu-check]
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
    },
    /// Report on this machine: libtorch, devices, compiler, memory, and the recommended training precision
    Doctor,
    /// Make every system call of saves, caches, indexes and downloads fail in turn: cargo test --workspace … --test
    /// fault_injection
    Faults,
    /// Fuzz the readers of untrusted files with coverage guidance and AddressSanitizer (x86-64 or Arm Linux)
    Fuzz {
        /// The reader to fuzz [default: all, one after the other]
        target: Option<String>,
        /// The minutes per reader
        #[arg(long, default_value_t = 10.0)]
        minutes: f64,
    },
    /// Compile the GPU kernels with Triton, and run each in its interpreter (needs Python 3.11, but no GPU or CUDA
    /// toolkit)
    Kernels {
        /// Only compare the result with the committed kernels
        #[arg(long)]
        check: bool,
    },
    /// Check the dependencies' advisories, licences and sources against deny.toml: cargo deny check
    Deny(Further),
    /// Compile each crate alone: without features, and with each feature alone
    Matrix {
        /// The crates [default: all]
        crates: Vec<String>,
    },
    /// Write the README of each crate from the documentation of its lib.rs
    Readmes {
        /// Only compare the files with the documentation
        #[arg(long)]
        check: bool,
    },
    /// Format the sources: cargo fmt --all
    Fmt(Further),
    /// Lint: cargo clippy --workspace --all-targets
    Lint(Further),
    /// Build the documentation: cargo doc --workspace --no-deps
    Docs(Further),
    /// Build the guide as HTML with mdBook: `target/book/index.html`
    Book {
        /// Only check the pages: links, code blocks, commands, and the figures against the reports
        #[arg(long)]
        check: bool,
    },
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

#[derive(Args)]
struct New {
    /// The folder of the project, which must not exist
    #[arg(required_unless_present = "check")]
    folder: Option<PathBuf>,
    /// The name of the package [default: the name of the folder]
    #[arg(long)]
    name: Option<String>,
    /// Take the crates from this repository instead of this checkout
    #[arg(long, value_name = "URL", conflicts_with = "published")]
    git: Option<String>,
    /// The revision of the repository [default: the head of its default branch]
    #[arg(long, value_name = "REV", requires = "git")]
    rev: Option<String>,
    /// Take the published crates of this version from crates.io
    #[arg(long)]
    published: bool,
    /// Make a project in a temporary folder, and run its program and its tests
    #[arg(long, conflicts_with_all = ["folder", "name", "git", "rev", "published"])]
    check: bool,
    /// With `--check`: also copy the example `train`, and nothing else, into such a project, and train with it
    #[arg(long, requires = "check")]
    example: bool,
}

impl New {
    fn run(self) -> Result<()> {
        let Some(folder) = self.folder else {
            new::check()?;
            return match self.example {
                true => new::check_example(),
                false => Ok(()),
            };
        };
        let source = match self.git {
            Some(url) => new::Source::Git { url, rev: self.rev },
            None if self.published => new::Source::Registry,
            None => new::Source::Path,
        };
        new::new(&folder, self.name.as_deref(), &source)
    }
}

fn main() -> ExitCode {
    // Read before anything is written: the record as it was when Cargo created this environment.
    setup::libtorch_at_start();
    let parsed = torch::take_from_arguments().map(|words| Cli::parse_from(words).command);
    match parsed.and_then(run) {
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
        Command::Setup {
            cuda,
            cpu,
            force,
            project,
        } => {
            let wish = match (cuda, cpu) {
                (true, _) => Request::Cuda,
                (_, true) => Request::Cpu,
                _ => Request::Any,
            };
            let found = setup::setup(wish, force)?;
            found.report();
            project.map_or(Ok(()), |project| new::connect(&project, &found))
        }
        Command::New(arguments) => arguments.run(),
        Command::Train(_) => all_after_setup(cargo::train(&further(2))),
        Command::Tune(_) => all_after_setup(cargo::tune(&further(2))),
        Command::Example { name, .. } => after_setup(cargo::example(&name, &further(3))),
        Command::Test(_) => {
            let found = setup::setup(Request::Any, false)?;
            cargo::run_tests(&further(2), doctor::has_gpu(&found.libtorch))
        }
        Command::Bench(_) => after_setup(cargo::bench(&further(2))),
        Command::Ablation(_) => after_setup(cargo::ablation(&further(2))),
        Command::Dist {
            out,
            features,
            archive,
        } => {
            torch::refuse_other("dist")?;
            dist::dist(out.as_deref(), features.as_deref(), archive)
        }
        Command::GpuCheck(_) => after_setup(cargo::gpu_check(&further(2))),
        Command::GpuBundle { out } => gpu_bundle::gpu_bundle(out.as_deref()),
        Command::Doctor => doctor::doctor(),
        Command::Faults => all_after_setup(cargo::faults()),
        Command::Fuzz { target, minutes } => {
            torch::refuse_other("fuzz")?;
            fuzz::fuzz(target.as_deref(), minutes)
        }
        Command::Kernels { check } => kernels::kernels(check),
        Command::Deny(_) => {
            check::deny_is_installed()?;
            cargo::deny(&further(2)).replace_this_process()
        }
        Command::Matrix { crates } => {
            setup::setup(Request::Any, false)?;
            matrix::matrix(&crates)
        }
        Command::Readmes { check } => readmes::readmes(check),
        Command::Fmt(_) => cargo::fmt(&further(2)).replace_this_process(),
        Command::Lint(_) => after_setup(cargo::lint(&further(2))),
        Command::Docs(_) => after_setup(cargo::docs(&further(2))),
        Command::Book { check: true } => guide::check(&subcommands()),
        Command::Book { check: false } => guide::book(&subcommands()),
        Command::Check => check::check(&subcommands()),
    }
}

/// Returns the names of all subcommands.
fn subcommands() -> Vec<String> {
    let cli = Cli::command();
    let names = cli.get_subcommands().map(|command| command.get_name());
    names.map(str::to_owned).collect()
}

/// Returns the arguments after the first `words`, as they were typed. clap is not used, because it consumes a
/// first `--`, which in `cargo xtask test -- --nocapture` is meant for cargo.
fn further(words: usize) -> Vec<OsString> {
    torch::arguments().into_iter().skip(words).collect()
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
