//! Starts a program on this machine as several processes that train together.
//!
//! ```text
//! cargo run --release -p overdrive-distributed --example launch -- --nproc 2 target/release/examples/ranks
//! ```
//!
//! Each line of output has its rank before it; when one process fails, the others are ended, and the first
//! error is the one that is shown. `--max-restarts N` starts all again.
//!
//! SIGTERM and Ctrl-C are passed on: the processes may save and end within `--stop-grace SECONDS` (30). If they
//! have, and end with 75, so does this. A second signal ends all at once.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};
use overdrive_distributed::{Ended, Launch};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

const USAGE: &str =
    "usage: launch [--nproc N] [--max-restarts N] [--stop-grace SECONDS] PROGRAM [ARGUMENT…]";

fn main() -> ExitCode {
    match run() {
        Ok(Ended::Finished) => ExitCode::SUCCESS,
        Ok(Ended::Saved) => ExitCode::from(Ended::SAVED_EXIT_CODE),
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> anyhow::Result<Ended> {
    let mut arguments = std::env::args_os().skip(1);
    let (mut nproc, mut restarts, mut stop_grace) = (1, 0, 30);
    let program = loop {
        let argument = arguments.next().context(USAGE)?;
        let target = match argument.to_str() {
            Some("--nproc" | "--nproc-per-node") => &mut nproc,
            Some("--max-restarts") => &mut restarts,
            Some("--stop-grace") => &mut stop_grace,
            Some(flag) if flag.starts_with("--") => bail!("{flag} is unknown; {USAGE}"),
            _ => break argument,
        };
        let value = arguments.next().context(USAGE)?;
        let value = value.to_string_lossy();
        *target = value
            .parse()
            .with_context(|| format!("{value}: expected a number; {USAGE}"))?;
    };
    let (stop, kill) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicBool::new(false)),
    );
    let mut signals = Signals::new([SIGTERM, SIGINT])?;
    let flags = [Arc::clone(&stop), Arc::clone(&kill)];
    std::thread::spawn(move || {
        for (_, flag) in signals.forever().zip(flags) {
            flag.store(true, Ordering::SeqCst);
        }
    });
    let launch = Launch::new(program)
        .args(arguments)
        .stop_when(stop)
        .kill_when(kill)
        .stop_grace(Duration::from_secs(stop_grace as u64))
        .nproc(nproc)
        .max_restarts(restarts);
    Ok(launch.run()?)
}
