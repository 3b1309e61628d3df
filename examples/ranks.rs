//! Prints each process's rank and the sum of all ranks, to check that a launcher sets the variables of a process
//! group.
//!
//! ```text
//! cargo build --release -p overdrive-examples --examples
//! target/release/examples/launch --nproc 2 ranks
//! target/release/examples/launch --nproc 2 --max-restarts 1 ranks --fail
//! torchrun --no-python --nproc-per-node 2 target/release/examples/ranks
//! mpirun -n 2 target/release/examples/ranks
//! ```

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Parser;
use overdrive::distributed::{GroupConfig, RankLog, init_process_group};

/// Prints each process's rank and the sum of all ranks
#[derive(Parser)]
struct Flags {
    /// Make rank 1 fail in the first start, to demonstrate a restart
    #[arg(long)]
    fail: bool,
}

fn main() -> ExitCode {
    overdrive_examples::run_main(|| run(&Flags::parse()))
}

fn run(flags: &Flags) -> Result<()> {
    let config = GroupConfig::default().with_timeout(Duration::from_secs(60));
    let group = init_process_group(config)?;
    let sum = group.sum(group.rank() as f64)?;
    let place = group.rendezvous();
    RankLog::new(&group).every(format!(
        "of {}, local rank {} of {}, start {}, launcher {:?}: the ranks add up to {sum}",
        group.world_size(),
        group.local_rank(),
        group.local_world_size(),
        place.restart_count,
        place.launcher
    ));
    if flags.fail && group.rank() == 1 && place.restart_count == 0 {
        bail!("rank 1 fails as requested by --fail");
    }
    group.barrier()?;
    Ok(())
}
