//! Writes a Chrome trace of one data parallel training step, in which the all-reduces of the buckets overlap with the
//! backward pass. Open `overlap-rank-0.json` at <https://ui.perfetto.dev>.
//!
//! ```text
//! cargo build --release -p overdrive-examples --examples
//! target/release/examples/launch --nproc 2 overlap_trace --out FOLDER
//! ```

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use overdrive::distributed::{
    DdpConfig, DistributedDataParallel, Error, GroupConfig, RankLog, init_process_group,
};
use overdrive::profiling::{ProfilerConfig, TraceEvent, profile, record_function};
use tch::nn::Module;
use tch::{Kind, Tensor, nn};

const WIDTH: i64 = 1024;
const LAYERS: usize = 8;

/// Writes a Chrome trace of one data parallel training step
#[derive(Parser)]
struct Flags {
    /// Output folder for the traces, one file per rank
    #[arg(long, default_value = ".")]
    out: PathBuf,
}

fn main() -> ExitCode {
    overdrive_examples::run_main(|| run(&Flags::parse()))
}

fn run(flags: &Flags) -> Result<()> {
    let group = init_process_group(GroupConfig::default())?;
    let store = nn::VarStore::new(group.device());
    let mut model = nn::seq();
    for layer in 0..LAYERS {
        let path = store.root() / format!("layer{layer}");
        model = model.add(nn::linear(path, WIDTH, WIDTH, Default::default()));
        model = model.add_fn(Tensor::relu);
    }
    let config = DdpConfig {
        // Two layers per bucket.
        bucket_cap_mb: 9.0,
        ..DdpConfig::default()
    };
    let ddp = DistributedDataParallel::from_var_store(&group, &store, config)?;
    let input = Tensor::randn([64, WIDTH], (Kind::Float, group.device()));
    let forward =
        || ddp.forward(|| Ok::<_, Error>(model.forward(&input).square().mean(Kind::Float)));
    // The buckets are rebuilt after the first backward, in the order of its gradients.
    for _ in 0..2 {
        ddp.backward(&forward()?)?;
    }
    let (done, mut trace) = profile(ProfilerConfig::default(), || {
        let loss = forward()?;
        let _range = record_function("backward");
        ddp.backward(&loss)
    })?;
    done?;
    let events = trace.events();
    let named = |name: &'static str| events.iter().filter(move |event| event.name == name);
    let ms = |from: u64, to: u64| (to as f64 - from as f64) * 1e-6;
    let log = RankLog::new(&group);
    if let Some(backward) = named("backward").next() {
        let reduced: Vec<&TraceEvent> = named("gloo:all_reduce").collect();
        let work = ms(backward.start_ns, backward.end_ns);
        log.main(format!("backward: {work:.2} ms, {} buckets", reduced.len()));
        for (number, event) in reduced.iter().enumerate() {
            log.main(format!(
                "  bucket {number}: all-reduce from {:.2} to {:.2} ms",
                ms(backward.start_ns, event.start_ns),
                ms(backward.start_ns, event.end_ns)
            ));
        }
    }
    let path = flags
        .out
        .join(format!("overlap-rank-{}.json", group.rank()));
    trace.save_chrome_trace(&path)?;
    log.main(format!("written: {}", path.display()));
    group.barrier()?;
    Ok(())
}
