//! Trains your own model with the loop of `train`: a small vision network in plain tch learns to
//! distinguish four shapes in images that this program draws (disc, square, triangle and cross at random
//! positions, sizes and contrasts, with noise). 300 steps take seconds and reach 90 % accuracy.
//!
//! ```text
//! cargo run --release -p overdrive-examples --example own_model -- --out runs/shapes
//! cargo run --release -p overdrive-examples --example own_model -- --out runs/shapes --resume-from-checkpoint true --steps 600
//! cargo run --release -p overdrive-examples --example launch -- --nproc 2 own_model --out runs/two
//! ```
//!
//! The run uses autocast, loss scaling, gradient accumulation, averaged weights, data parallel training, atomic
//! snapshots and metrics; the network recomputes its activations in the backward pass.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use overdrive::checkpointing::Shared;
use overdrive::optim::{Ema, LrSchedulerType};
use overdrive::precision::Precision;
use overdrive::trainer::{
    DataShard, ResumeFromCheckpoint, RunEnd, RunFolder, RunOptions, TrainingArguments, TrainingRun,
    print_line, run_main,
};
use overdrive_examples::pictures::{PictureBatch, SHAPES, load_pictures};
use tch::nn::{self, Module, ModuleT, VarStore};
use tch::{Device, Kind, Tensor};

/// Trains a small vision network in plain tch on images that it draws
#[derive(Parser)]
struct Flags {
    /// Folder of the run
    #[arg(long, default_value = "runs/own_model")]
    out: PathBuf,
    /// Number of optimizer steps
    #[arg(long, default_value_t = 300)]
    steps: u64,
    /// Number of steps between snapshots; 0 saves only at the end
    #[arg(long, default_value_t = 50)]
    save_steps: u64,
    /// Resume from the newest snapshot in `--out` (true), or from the one in this folder
    #[arg(long, value_name = "true|DIR")]
    resume_from_checkpoint: Option<ResumeFromCheckpoint>,
}

/// Three convolutions and a linear layer, in plain tch.
struct Network {
    convolutions: Shared<nn::SequentialT>,
    head: nn::Linear,
}

impl Network {
    fn new(path: &nn::Path) -> Self {
        let config = nn::ConvConfig {
            stride: 2,
            padding: 1,
            ..Default::default()
        };
        let mut convolutions = nn::seq_t();
        for (block, (from, to)) in [(1, 16), (16, 32), (32, 64)].into_iter().enumerate() {
            convolutions = convolutions
                .add(nn::conv2d(path / "blocks" / block, from, to, 3, config))
                .add_fn_t(|hidden, train| hidden.gelu("none").dropout(0.1, train));
        }
        let head = nn::linear(path / "head", 64 * 4 * 4, SHAPES, Default::default());
        Self {
            convolutions: Shared::new(convolutions),
            head,
        }
    }

    /// Returns the logits (B, 4). Backward recomputes the activations of the convolutions.
    fn forward(&self, images: &Tensor, train: bool) -> Result<Tensor> {
        let layers = &self.convolutions;
        let hidden = layers.checkpoint(images, move |layers, x| layers.forward_t(x, train))?;
        Ok(self.head.forward(&hidden.f_flatten(1, -1)?))
    }
}

fn main() -> ExitCode {
    run_main(|| run(&Flags::parse()))
}

fn run(flags: &Flags) -> Result<RunEnd> {
    let arguments = TrainingArguments {
        output_dir: Some(flags.out.clone()),
        resume_from_checkpoint: flags.resume_from_checkpoint.clone(),
        max_steps: flags.steps.cast_signed(),
        save_steps: match flags.save_steps {
            0 => flags.steps as f64,
            every => every as f64,
        },
        logging_steps: 50.0,
        per_device_train_batch_size: 32,
        gradient_accumulation_steps: 2,
        learning_rate: 2e-3,
        weight_decay: 0.01,
        lr_scheduler_type: LrSchedulerType::Constant,
        ema_decay: Some(0.98),
        ..TrainingArguments::default()
    };
    arguments.apply()?; // the seed, the threads, the treatment of subnormal numbers
    let group = arguments.init_process_group()?;
    let device = arguments.device(&group);

    let mut loader = load_pictures(arguments.seed, 8192, 32, DataShard::of(&group, device))?;
    let store = VarStore::new(device);
    let network = Network::new(&store.root());
    // Each part of a run can be replaced: `.optimizer(…)` takes another one than AdamW.
    let options = RunOptions {
        // bf16 where the device computes it fast, else fp16 or fp32.
        precision: Some(Precision::recommend(device).precision),
        folder: Some(RunFolder::open_or_create(&group, &arguments)?),
        ..RunOptions::default()
    };
    let parameters = store.variables().into_iter().collect();
    let mut run = TrainingRun::start(&arguments, &group, parameters, &mut loader, options)?;

    while let Some(batches) = run.next_batches(&mut loader)? {
        for batch in batches {
            run.forward_backward(batch, |PictureBatch { images, shapes }| {
                let logits = network.forward(images, true)?;
                Ok::<_, anyhow::Error>(logits.cross_entropy_for_logits(shapes))
            })?;
        }
        run.step()?;
        run.save_if_due()?;
    }

    let (summary, mut averages) = run.finish()?;
    if group.is_main() && summary.end() == RunEnd::Finished {
        // The averaged weights are more accurate than those of the last step.
        let _averaged = averages.as_mut().map(Ema::apply).transpose()?;
        let right = 100.0 * accuracy(&network, arguments.seed + 1, device)?;
        print_line(format_args!("{right:.1}% of new images are right"));
    }
    // Rank 0 evaluates alone; a rank that exits earlier would count as lost.
    group.barrier()?;
    Ok(summary.end())
}

/// Returns the accuracy on images drawn with another seed.
fn accuracy(network: &Network, seed: u64, device: Device) -> Result<f64> {
    let _no_grad = tch::no_grad_guard();
    let mut images = load_pictures(seed, 1024, 1024, device.into())?;
    let PictureBatch { images, shapes } = images.next().context("no images")??;
    let named = network.forward(&images, false)?.argmax(-1, false);
    Ok(named.eq_tensor(&shapes).mean(Kind::Float).double_value(&[]))
}
