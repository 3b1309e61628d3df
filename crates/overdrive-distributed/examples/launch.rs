//! Starts a program on this machine as several processes that train together.
//!
//! ```text
//! cargo run --release -p overdrive-distributed --example launch -- --nproc 2 target/release/examples/ranks
//! ```
//!
//! Each line of output has its rank before it; when one process fails, the others are ended, and the first
//! error is the one that is shown. `--max-restarts N` starts all again.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, bail};
use overdrive_distributed::Launch;

const USAGE: &str = "usage: launch [--nproc N] [--max-restarts N] PROGRAM [ARGUMENT…]";

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> anyhow::Result<()> {
    let mut arguments = std::env::args_os().skip(1);
    let (mut nproc, mut restarts) = (1, 0);
    let program = loop {
        let argument = arguments.next().context(USAGE)?;
        let target = match argument.to_str() {
            Some("--nproc" | "--nproc-per-node") => &mut nproc,
            Some("--max-restarts") => &mut restarts,
            Some(flag) if flag.starts_with("--") => bail!("{flag} is unknown; {USAGE}"),
            _ => break argument,
        };
        let value = arguments.next().context(USAGE)?;
        let value = value.to_string_lossy();
        *target = value
            .parse()
            .with_context(|| format!("{value}: expected a number; {USAGE}"))?;
    };
    // Whoever ends the launcher ends what it has started.
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    Launch::new(program)
        .args(arguments)
        .stop_when(stop)
        .nproc(nproc)
        .max_restarts(restarts)
        .run()?;
    Ok(())
}
