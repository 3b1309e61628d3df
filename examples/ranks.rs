//! Every rank says who it is and what the sum of all ranks is: to see that a launcher's variables work.
//!
//! ```text
//! torchrun --no-python --nproc-per-node 2 target/release/examples/ranks
//! mpirun -n 2 target/release/examples/ranks
//! target/release/examples/launch --nproc 2 ranks
//! ```

use std::time::Duration;

use overdrive::distributed::{GroupConfig, RankLog, init_process_group};

fn main() -> anyhow::Result<()> {
    let config = GroupConfig::default().with_timeout(Duration::from_secs(60));
    let group = init_process_group(config)?;
    let sum = group.sum(group.rank() as f64)?;
    let place = group.rendezvous();
    RankLog::new(&group).every(format!(
        "of {}, local rank {} of {}, start {}, by {:?}: the ranks add up to {sum}",
        group.world_size(),
        group.local_rank(),
        group.local_world_size(),
        place.restart_count,
        place.launcher
    ));
    // `ranks fail` shows what a launcher does about it: rank 1 fails in the first start.
    let fails = std::env::args().nth(1).as_deref() == Some("fail");
    if fails && group.rank() == 1 && place.restart_count == 0 {
        anyhow::bail!("rank 1 fails, as asked");
    }
    group.barrier()?;
    Ok(())
}
