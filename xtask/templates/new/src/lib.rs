//! A small network that learns which arm of a spiral a point lies on: a model in plain tch, trained by the run that the
//! programs of Overdrive use, with mixed precision, gradient accumulation and checkpoints.
//!
//! Replace [`network`] and [`spiral`] by your model and your data; the loop in [`train`] stays as it is.

use std::f32::consts::TAU;
use std::path::PathBuf;

use anyhow::Result;
use overdrive_datasets::{DataLoader, DataLoaderOptions, DeviceLoader, InMemory};
use overdrive_distributed::ProcessGroup;
use overdrive_optim::LrSchedulerType;
use overdrive_precision::Precision;
use overdrive_trainer::{
    ResumeFromCheckpoint, RunEnd, RunFolder, RunOptions, TrainingArguments, TrainingRun,
};
use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Tensor};

/// The number of arms, which are the classes.
pub const ARMS: i64 = 3;
const POINTS_PER_ARM: usize = 200;

/// The settings of a run.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Folder of the run; checkpoints are written into it, and a run resumes from the newest one.
    pub out: PathBuf,
    /// Number of optimizer steps.
    pub steps: u64,
    /// Number of micro-batches whose gradients are added up for a step.
    pub micro_batches: usize,
    /// Number of steps between checkpoints.
    pub save_steps: u64,
    /// Precision of the forward pass. `Precision::recommend(device)` chooses it for a device.
    pub precision: Precision,
    /// Seed of the initial weights and of the order of the points.
    pub seed: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            out: "runs/spiral".into(),
            steps: 200,
            micro_batches: 4,
            save_steps: 50,
            precision: Precision::Fp32,
            seed: 7,
        }
    }
}

impl Settings {
    /// Returns the settings under Hugging Face's names; `TrainingArguments` has many more.
    fn arguments(&self) -> Result<TrainingArguments> {
        Ok(TrainingArguments {
            output_dir: Some(self.out.clone()),
            resume_from_checkpoint: Some(ResumeFromCheckpoint::Latest(true)),
            max_steps: i64::try_from(self.steps)?,
            save_steps: self.save_steps as f64,
            logging_steps: 20.0,
            gradient_accumulation_steps: self.micro_batches as u64,
            learning_rate: 1e-2,
            lr_scheduler_type: LrSchedulerType::Constant,
            weight_decay: 0.01,
            seed: self.seed,
            ..TrainingArguments::default()
        })
    }
}

/// The results of a run.
#[derive(Debug)]
pub struct Summary {
    /// The loss of each step of this run, without those before the checkpoint that it resumed from.
    pub losses: Vec<f64>,
    /// The share of the points that are classified correctly at the end.
    pub accuracy: f64,
    /// The end of the run: a signal, such as Ctrl-C, saves a checkpoint and ends it early.
    pub end: RunEnd,
}

/// Returns the network: points (N, 2) to logits (N, 3).
pub fn network(path: &nn::Path) -> nn::Sequential {
    nn::seq()
        .add(nn::linear(path / "input", 2, 64, Default::default()))
        .add_fn(|x| x.gelu("none"))
        .add(nn::linear(path / "hidden", 64, 64, Default::default()))
        .add_fn(|x| x.gelu("none"))
        .add(nn::linear(path / "head", 64, ARMS, Default::default()))
}

/// Returns points on the arms of a spiral: x, y, and the number of the arm.
pub fn spiral() -> Vec<[f32; 3]> {
    let point = |index: usize| {
        let (arm, at) = (index / POINTS_PER_ARM, index % POINTS_PER_ARM);
        let radius = at as f32 / POINTS_PER_ARM as f32;
        let angle = 4.0 * radius + TAU * arm as f32 / ARMS as f32;
        [radius * angle.cos(), radius * angle.sin(), arm as f32]
    };
    (0..ARMS as usize * POINTS_PER_ARM).map(point).collect()
}

/// Returns a loader of `points` in batches of `size`, in a new order in each epoch.
fn load(
    points: &[[f32; 3]],
    size: usize,
    seed: u64,
    device: Device,
) -> Result<DeviceLoader<Tensor>> {
    let options = DataLoaderOptions {
        batch_size: size,
        shuffle: true,
        seed,
        ..Default::default()
    };
    let collate = |points: Vec<[f32; 3]>| Ok(Tensor::from_slice2(&points));
    let loader = DataLoader::with_collate(InMemory(points.to_vec()), collate, options)?;
    Ok(DeviceLoader::new(loader, device))
}

/// Splits a batch (N, 3) into points (N, 2) and the arm of each (N).
fn split(batch: &Tensor) -> (Tensor, Tensor) {
    let arms = batch.select(1, 2).to_kind(Kind::Int64);
    (batch.narrow(1, 0, 2), arms)
}

/// Trains the network, and resumes if the folder of the run holds a checkpoint.
pub fn train(settings: &Settings, device: Device) -> Result<Summary> {
    let arguments = settings.arguments()?;
    arguments.apply()?; // the seed, the threads
    let group = ProcessGroup::single();
    let store = VarStore::new(device);
    let network = network(&store.root());
    let points = spiral();
    let size = points.len() / settings.micro_batches; // a step takes all points
    let mut loader = load(&points, size, settings.seed, device)?;
    let options = RunOptions {
        precision: Some(settings.precision),
        folder: Some(RunFolder::open_or_create(&group, &arguments)?),
        ..RunOptions::default()
    };
    let parameters = store.variables().into_iter().collect();
    let mut run = TrainingRun::start(&arguments, &group, parameters, &mut loader, options)?;

    while let Some(batches) = run.next_batches(&mut loader)? {
        for batch in batches {
            run.forward_backward(batch, |batch| {
                let (points, arms) = split(batch);
                anyhow::Ok(network.forward(&points).cross_entropy_for_logits(&arms))
            })?;
        }
        run.step()?;
        run.save_if_due()?;
    }
    let (summary, _) = run.finish()?;

    let _no_grad = tch::no_grad_guard();
    let (points, arms) = split(&Tensor::from_slice2(&points).to_device(device));
    let correct = network.forward(&points).argmax(-1, false).eq_tensor(&arms);
    Ok(Summary {
        end: summary.end(),
        losses: summary.losses,
        accuracy: correct.mean(Kind::Float).double_value(&[]),
    })
}
