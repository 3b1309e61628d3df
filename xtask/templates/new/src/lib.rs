//! A small network that learns which arm of a spiral a point lies on: a model in plain tch, with an optimizer,
//! mixed precision, gradient accumulation and checkpoints of Overdrive's crates.
//!
//! Replace [`network`] and [`spiral`] by your model and your data; [`train`] stays as it is.

use std::f64::consts::TAU;
use std::path::PathBuf;

use anyhow::Result;
use overdrive_accumulation::{AccumulationConfig, GradientAccumulator, Window};
use overdrive_optim::{AdamW, AdamWConfig, decay_groups};
use overdrive_precision::{GradScaler, Precision};
use overdrive_snapshot::{RunState, SnapshotManager, SnapshotOptions};
use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Tensor};

/// The number of arms, which are the classes.
pub const ARMS: i64 = 3;
const POINTS_PER_ARM: i64 = 200;

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
    pub seed: i64,
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

/// The results of a run.
#[derive(Debug)]
pub struct Summary {
    /// The loss of each step of this run, without those before the checkpoint that it resumed from.
    pub losses: Vec<f64>,
    /// The share of the points that are classified correctly at the end.
    pub accuracy: f64,
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

/// Returns points (600, 2) on the arms of a spiral in random order, and the arm of each.
pub fn spiral(device: Device) -> (Tensor, Tensor) {
    let radius = Tensor::arange(POINTS_PER_ARM, (Kind::Float, device)) / POINTS_PER_ARM as f64;
    let arms: Vec<Tensor> = (0..ARMS)
        .map(|arm| {
            let angle = &radius * 4.0 + TAU * arm as f64 / ARMS as f64;
            Tensor::stack(&[&radius * angle.cos(), &radius * angle.sin()], 1)
        })
        .collect();
    let points = Tensor::arange(ARMS * POINTS_PER_ARM, (Kind::Int64, device));
    let classes = points.floor_divide_scalar(POINTS_PER_ARM);
    let order = Tensor::randperm(ARMS * POINTS_PER_ARM, (Kind::Int64, device));
    (
        Tensor::cat(&arms, 0).index_select(0, &order),
        classes.index_select(0, &order),
    )
}

/// Trains the network, and resumes if the folder of the run holds a checkpoint.
pub fn train(settings: &Settings, device: Device) -> Result<Summary> {
    tch::manual_seed(settings.seed);
    let store = VarStore::new(device);
    let network = network(&store.root());
    let (points, classes) = spiral(device);

    let config = AdamWConfig {
        learning_rate: 1e-2,
        ..Default::default()
    };
    let mut optimizer = AdamW::new(decay_groups(store.variables(), 0.01), config)?;
    let config = AccumulationConfig {
        gradient_accumulation_steps: settings.micro_batches,
        max_grad_norm: Some(1.0),
    };
    let scaler = settings.precision.new_scaler()?; // `None` unless the precision is fp16
    let mut accumulator = GradientAccumulator::new(config)?.with_scaler(scaler);
    let mut snapshots = SnapshotManager::open(&settings.out, SnapshotOptions::default())?;
    let newest = snapshots.latest()?;
    if let Some(snapshot) = &newest {
        let state = state(&store, &mut optimizer, accumulator.scaler_mut());
        snapshots.load_state(snapshot, state)?;
    }

    let mut losses = Vec::new();
    for step in newest.map_or(0, |snapshot| snapshot.step()) + 1..=settings.steps {
        accumulator.open(Window::of_means(settings.micro_batches))?;
        let parts = settings.micro_batches as i64;
        for (points, classes) in points.chunk(parts, 0).iter().zip(classes.chunk(parts, 0)) {
            let loss = {
                let _autocast = settings.precision.autocast(device)?;
                network.forward(points).cross_entropy_for_logits(&classes)
            };
            accumulator.backward(&loss)?;
        }
        let loss = accumulator.step(&mut optimizer)?.loss()?;
        losses.push(loss);
        if step % 20 == 0 {
            println!("step {step:3}  loss {loss:.4}");
        }
        if step % settings.save_steps == 0 || step == settings.steps {
            let state = state(&store, &mut optimizer, accumulator.scaler_mut());
            snapshots.save_state(step, None, state)?;
        }
    }
    for outcome in snapshots.wait()? {
        outcome.result?; // for example a full disk
    }

    let _no_grad = tch::no_grad_guard();
    let correct = network
        .forward(&points)
        .argmax(-1, false)
        .eq_tensor(&classes);
    Ok(Summary {
        losses,
        accuracy: correct.mean(Kind::Float).double_value(&[]),
    })
}

/// Lists everything that must survive a restart, for saving and for loading.
fn state<'a>(
    store: &VarStore,
    optimizer: &'a mut AdamW,
    scaler: Option<&'a mut GradScaler>,
) -> RunState<'a> {
    RunState::new()
        .tensors("model", store.variables())
        .register("optimizer", optimizer)
        .register_optional("scaler", scaler)
        .random_states()
}
