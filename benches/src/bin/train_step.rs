//! Times Overdrive's training step and prints one JSON line, as `pytorch/train_step.py` does for PyTorch's;
//! `pytorch/compare.py` alternates both. With `--save` it trains the model that both measure.

use std::path::PathBuf;
use std::time::Instant;

use clap::Parser;
use overdrive::profiling::MemoryUsage;
use overdrive::sys::denormals::set_flush_denormals;
use overdrive::sys::{build_info, memory, threads};
use overdrive::trainer::Preset;
use overdrive_benches::{Shape, Step, StepResult, Trained, median};
use tch::Device;

/// Times the training step
#[derive(Parser)]
struct Flags {
    #[arg(long, value_enum, default_value = "small")]
    preset: Preset,
    #[arg(long, default_value_t = 10)]
    steps: usize,
    /// Number of warm-up steps
    #[arg(long, default_value_t = 2)]
    warmup: usize,
    /// Number of threads inside one operator [default: libtorch's choice]
    #[arg(long)]
    threads: Option<usize>,
    /// Run single operators instead of fused kernels
    #[arg(long)]
    unfused: bool,
    /// Let libtorch's operators compute with subnormal numbers, as `flush_denormals: false` does
    #[arg(long)]
    keep_denormals: bool,
    /// Folder of the weights and the batches [default: random ones]
    #[arg(long, value_name = "DIR", conflicts_with = "save")]
    model: Option<PathBuf>,
    /// Train the preset on text, write the weights and the next batches to this folder, and exit
    #[arg(long, value_name = "DIR")]
    save: Option<PathBuf>,
    /// Number of training steps with `--save`
    #[arg(long, default_value_t = 300)]
    trained_steps: usize,
    /// Text files or folders to train on with `--save` [default: those of `train`]
    #[arg(long, value_name = "PATH")]
    data: Vec<PathBuf>,
}

fn main() -> StepResult<()> {
    let flags = Flags::parse();
    if let Some(count) = flags.threads {
        threads::set_intra_op(count)?;
    }
    set_flush_denormals(!flags.keep_denormals);
    tch::manual_seed(0);
    if let Some(folder) = &flags.save {
        let trained = Trained::new(flags.preset, &flags.data, flags.trained_steps)?;
        trained.save(folder)?;
        let parameters = trained.step.parameters();
        println!("{}", serde_json::json!({"parameters": parameters}));
        return Ok(());
    }
    let shape = Shape::of(flags.preset);
    let (mut step, batches) = match &flags.model {
        Some(folder) => {
            let Trained { step, batches } = Trained::load(folder, shape)?;
            (step, batches)
        }
        None => (Step::new(shape, Device::Cpu)?, Vec::new()),
    };
    if flags.unfused {
        step = step.unfused();
    }
    let (mut seconds, mut losses) = (Vec::new(), Vec::new());
    for index in 0..flags.warmup + flags.steps.max(1) {
        let batch = match batches.get(index % batches.len().max(1)) {
            Some((inputs, labels)) => (inputs.shallow_clone(), labels.shallow_clone()),
            None => step.batch()?,
        };
        let start = Instant::now();
        losses.push(step.run(&batch)?);
        if index >= flags.warmup {
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
    let median = median(seconds);
    let line = serde_json::json!({
        "side": format!("Overdrive on libtorch {}", build_info::libtorch_version()?),
        "parameters": step.parameters(),
        "threads": threads::intra_op(),
        "step_seconds": median,
        "tokens_per_second": shape.tokens() as f64 / median,
        "max_rss_bytes": MemoryUsage::of(Device::Cpu).peak_resident_bytes,
        "peak_allocated_bytes": memory::stats(Device::Cpu)?.peak_allocated_bytes,
        "first_loss": losses.first(),
        "last_loss": losses.last(),
    });
    println!("{line}");
    Ok(())
}
