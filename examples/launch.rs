//! Starts a program in several processes on this machine that train together, as torchrun does.
//!
//! ```text
//! cargo xtask train --nproc 2                                            # builds both, and does this:
//! cargo run --release -p overdrive-examples --example launch -- --nproc 2 train --steps 100
//! ```
//!
//! Each line of output is prefixed with its rank. If a process fails, the others are terminated and its error is shown;
//! `--max-restarts N` restarts all processes, so that a run with `--resume-from-checkpoint true` resumes. On Ctrl-C,
//! SIGTERM, SIGHUP and SIGQUIT all processes save, and the launcher exits with code 75, or with 130 if a process could
//! not save. Ctrl-C again, a second later, kills them.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Parser;
use overdrive::distributed::{Error, Launch};
use overdrive::trainer::Interrupt;
use overdrive_examples::{RunEnd, run_main};

/// Starts a program in several processes that train together
#[derive(Parser)]
struct Flags {
    /// Number of processes
    #[arg(
        long,
        visible_alias = "nproc-per-node",
        value_name = "N",
        default_value_t = 1
    )]
    nproc: usize,

    /// Maximum number of restarts after a failure
    #[arg(long, value_name = "N", default_value_t = 0)]
    max_restarts: usize,

    /// Seconds that the processes have to save after a signal
    #[arg(long, value_name = "S", default_value_t = 30)]
    stop_grace: u64,

    /// Example in the same folder as this program (`train`), or path of a program
    program: PathBuf,

    /// Arguments for the program
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

fn main() -> ExitCode {
    run_main(|| run(&Flags::parse()))
}

fn run(flags: &Flags) -> Result<RunEnd> {
    // The first signal lets the processes save, a second Ctrl-C kills them.
    let kill = Arc::new(AtomicBool::new(false));
    let raised = Arc::clone(&kill);
    let interrupt = Interrupt::install_with(move || raised.store(true, Ordering::SeqCst))?;
    let ended = Launch::new(beside_this_one(&flags.program))
        .args(&flags.arguments)
        .nproc(flags.nproc)
        .max_restarts(flags.max_restarts)
        .stop_grace(Duration::from_secs(flags.stop_grace))
        .stop_when(interrupt.flag())
        .kill_when(Arc::clone(&kill))
        .run();
    Ok(match ended {
        Ok(end) => end,
        // They did not fail: the second Ctrl-C has killed them.
        Err(Error::Launched { .. }) if kill.load(Ordering::SeqCst) => RunEnd::NotSaved,
        Err(Error::Common(
            error @ overdrive::core::Error::Io {
                action: "start", ..
            },
        )) => {
            bail!("{error}; it is neither a program beside `launch` nor a path of a program")
        }
        Err(error) => return Err(error.into()),
    })
}

/// Returns the program of that name in the folder of this one, if it exists.
fn beside_this_one(program: &Path) -> PathBuf {
    // A path with a folder is taken as it is.
    let is_name = program.components().count() == 1;
    let own = std::env::current_exe().ok().filter(|_| is_name);
    let beside = own.and_then(|own| Some(own.parent()?.join(program)));
    beside
        .filter(|path| path.is_file())
        .unwrap_or_else(|| program.to_owned())
}
