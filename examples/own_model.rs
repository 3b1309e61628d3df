//! Trains your own model with the components of `train`: a small vision network in plain tch learns to
//! distinguish four shapes in images that this program draws (disc, square, triangle and cross at random
//! positions, sizes and contrasts, with noise). 300 steps take seconds and reach 90 % accuracy.
//!
//! ```text
//! cargo run --release -p overdrive-examples --example own_model -- --out runs/shapes
//! cargo run --release -p overdrive-examples --example own_model -- --out runs/shapes --resume-from-checkpoint true --steps 600
//! cargo run --release -p overdrive-examples --example launch -- --nproc 2 own_model --out runs/two
//! ```
//!
//! Autocast, loss scaling, gradient accumulation, activation checkpointing, averaged weights, data parallel
//! training, atomic snapshots and metrics: each is one or two lines below.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use overdrive::accumulation::{AccumulationConfig, GradientAccumulator, Window};
use overdrive::checkpointing::{CheckpointOptions, Shared, checkpoint};
use overdrive::core::OutputFolder;
use overdrive::datasets::{DataLoaderOptions, DeviceLoader};
use overdrive::distributed::{DdpConfig, DistributedDataParallel, GroupConfig, init_process_group};
use overdrive::optim::{AdamW, AdamWConfig, Ema, EmaConfig, decay_groups};
use overdrive::precision::Precision;
use overdrive::snapshot::{RunState, SnapshotManager, SnapshotOptions};
use overdrive::sys::denormals::set_flush_denormals;
use overdrive::tracking::{JsonLines, StepMetrics, Tracker, Trackers};
use overdrive::trainer::Interrupt;
use overdrive_examples::pictures::{PictureBatch, SHAPES, load_pictures};
use overdrive_examples::{RunEnd, exit_or_resume, print_line};
use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Tensor};

const MICRO_BATCHES: usize = 2;

/// Trains a small vision network in plain tch on images that it draws
#[derive(Parser)]
struct Flags {
    /// Folder of the run
    #[arg(long, default_value = "runs/own_model")]
    out: PathBuf,
    /// Number of optimizer steps
    #[arg(long, default_value_t = 300)]
    steps: u64,
    /// Seed of the weights, the images, their order and dropout
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Number of steps between snapshots, 0 for the last step only
    #[arg(long, default_value_t = 50)]
    save_steps: u64,
    /// Resume from the newest snapshot in `--out` (true), or from the one in this folder
    #[arg(long, value_name = "true|DIR")]
    resume_from_checkpoint: Option<PathBuf>,
}

/// Three convolutions and a linear layer, in plain tch.
struct Network {
    blocks: Vec<Shared<nn::Conv2D>>,
    head: nn::Linear,
}

impl Network {
    fn new(path: &nn::Path) -> Self {
        let config = nn::ConvConfig {
            stride: 2,
            padding: 1,
            ..Default::default()
        };
        let conv = |number: usize, from, to| {
            Shared::new(nn::conv2d(path / "blocks" / number, from, to, 3, config))
        };
        Self {
            blocks: vec![conv(0, 1, 16), conv(1, 16, 32), conv(2, 32, 64)],
            head: nn::linear(path / "head", 64 * 4 * 4, SHAPES, Default::default()),
        }
    }

    /// Returns the logits (B, 4). Backward recomputes the activations of the blocks.
    fn forward(&self, images: &Tensor, train: bool) -> Result<Tensor> {
        // A checkpoint gets its inputs as arguments; the closure must own the block.
        let mut hidden = images.shallow_clone();
        for block in self.blocks.clone() {
            let options = CheckpointOptions::default();
            hidden = checkpoint(&[&hidden], &options, move |inputs| {
                let convolved = block.with(|conv| conv.forward(&inputs[0]));
                Ok(convolved.f_gelu("none")?.f_dropout(0.1, train)?)
            })?;
        }
        Ok(self.head.forward(&hidden.f_flatten(1, -1)?))
    }
}

fn main() -> ExitCode {
    exit_or_resume(|| run(&Flags::parse()))
}

fn run(flags: &Flags) -> Result<RunEnd> {
    // Subnormal numbers are zero to libtorch's operators too: each takes Intel's processors a hundred cycles.
    set_flush_denormals(true);
    let group = init_process_group(GroupConfig::default())?;
    // Resuming writes into a folder of any version of this program.
    if flags.resume_from_checkpoint.is_none() {
        OutputFolder::check("own_model", "--out", &flags.out, &[])?.create()?;
    }
    let device = group.device();
    // bf16 where the device computes it fast, else fp16 or fp32.
    let precision = Precision::recommend(device).precision;
    tch::manual_seed(flags.seed.cast_signed());

    let options = DataLoaderOptions {
        batch_size: 32,
        shuffle: true,
        seed: flags.seed,
        num_workers: 1,
        rank: group.rank(),
        world_size: group.world_size(),
        ..Default::default()
    };
    let mut batches =
        DeviceLoader::new(load_pictures(flags.seed, 8192, options)?, device).endless();
    let store = VarStore::new(device);
    let network = Network::new(&store.root());
    let ddp = DistributedDataParallel::from_var_store(&group, &store, DdpConfig::default())?;
    let config = AdamWConfig {
        learning_rate: 2e-3,
        ..Default::default()
    };
    let mut optimizer = AdamW::new(decay_groups(store.variables(), 0.01), config)?;
    let mut scaler = precision.new_scaler()?;
    // The average follows the store's own tensors, without a copy of the model.
    let weights = store.variables().into_iter().collect();
    let mut ema = Ema::new(
        weights,
        EmaConfig {
            decay: 0.98,
            ..Default::default()
        },
    )?;
    let clipped = AccumulationConfig {
        gradient_accumulation_steps: MICRO_BATCHES,
        max_grad_norm: Some(1.0),
    };
    let mut accumulator = GradientAccumulator::with_sync(clipped, &ddp)?;

    let ranks = Box::new(group.clone());
    let mut snapshots = SnapshotManager::with_ranks(&flags.out, SnapshotOptions::default(), ranks)?;
    // Everything that must survive a restart is registered once, for saving and for restoring.
    // A macro and not a closure: saving and loading both borrow the components mutably.
    macro_rules! state {
        () => {
            RunState::new()
                .tensors("model", store.variables())
                .register("optimizer", &mut optimizer)
                .register_optional("scaler", scaler.as_mut())
                .register("ema", &mut ema)
                .with_load("loader", batches.state_dict(), |state| {
                    batches.load_state_dict(state)
                })
                .random_states()
        };
    }
    let found = match &flags.resume_from_checkpoint {
        Some(newest) if newest.as_os_str() == "true" => snapshots.latest()?,
        Some(folder) => Some(snapshots.open_snapshot(folder)?),
        None => None,
    };
    if let Some(snapshot) = &found {
        snapshots.load_state(snapshot, state!())?;
    }
    let done = found.map_or(0, |snapshot| snapshot.step());
    let mut metrics = Trackers::new();
    if group.is_main() {
        metrics = metrics.with(JsonLines::resume(flags.out.join("metrics.jsonl"), done)?);
    }
    let interrupt = Interrupt::install()?;
    let mut end = RunEnd::Finished;

    for step in done + 1..=flags.steps {
        accumulator.open(Window::of_means(MICRO_BATCHES))?;
        for batch in batches.by_ref().take(MICRO_BATCHES) {
            let PictureBatch { images, shapes } = batch?;
            let loss = precision.autocast(device, || {
                network
                    .forward(&images, true)
                    .map(|logits| logits.cross_entropy_for_logits(&shapes))
            })??;
            accumulator.backward_mean(&loss, scaler.as_mut())?;
        }
        let stepped = accumulator.step(&mut optimizer, scaler.as_mut())?;
        ema.update()?;

        // Means over all processes, so that every rank logs and decides the same.
        let (loss, stop) = (
            group.mean(stepped.loss()?)?,
            group.any(interrupt.requested())?,
        );
        // A full disk does not end the run.
        if let Some(line) = metrics.log_or_warn(&StepMetrics {
            step,
            loss,
            ..Default::default()
        }) {
            eprintln!("{line}");
        }
        if step % 50 == 0 && group.is_main() {
            print_line(format_args!("step {step}  loss {loss:.4}"));
        }
        if stop || step.is_multiple_of(flags.save_steps) || step == flags.steps {
            snapshots.save_state(step, None, state!())?;
        }
        if stop {
            // A snapshot that fails is an error below.
            end = RunEnd::Saved;
            break;
        }
    }
    for outcome in snapshots.wait()? {
        outcome.result?;
    }
    if let Err(error) = metrics.finish() {
        eprintln!("warning: the metrics are incomplete: {error}");
    }
    if group.is_main() && end == RunEnd::Finished {
        // The averaged weights are more accurate than those of the last step.
        let _averaged = ema.apply()?;
        let right = 100.0 * accuracy(&network, flags.seed + 1, device)?;
        print_line(format_args!(
            "{right:.1}% of new images are classified correctly"
        ));
    }
    // Rank 0 evaluates alone; a rank that exits earlier would count as lost.
    group.barrier()?;
    Ok(end)
}

/// Returns the accuracy on images drawn with another seed.
fn accuracy(network: &Network, seed: u64, device: Device) -> Result<f64> {
    let _no_grad = tch::no_grad_guard();
    let options = DataLoaderOptions {
        batch_size: 256,
        ..Default::default()
    };
    let (mut right, mut all) = (0.0, 0.0);
    for batch in DeviceLoader::new(load_pictures(seed, 1024, options)?, device) {
        let PictureBatch { images, shapes } = batch?;
        let named = network.forward(&images, false)?.argmax(-1, false);
        right += named.eq_tensor(&shapes).sum(Kind::Float).double_value(&[]);
        all += shapes.numel() as f64;
    }
    Ok(right / all)
}
