//! Training of the small model.

use anyhow::{Result, anyhow};
use overdrive::attention::PackedLengths;
use overdrive::datasets::{DataLoader, DataLoaderOptions, DeviceLoader, InMemory};
use overdrive::distributed::ProcessGroup;
use overdrive::optim::{AdamW, AdamWConfig, LrSchedulerType, ParamGroup};
use overdrive::precision::{GradScaler, Precision};
use overdrive::trainer::{RunFolder, RunOptions, SaveStrategy, TrainingArguments, TrainingRun};
use overdrive::transformer::{CausalLm, ForwardInput, LabelShift, LlamaConfig};
use overdrive_benches::step_from;
use tch::{Device, Kind, Tensor};

use crate::models::{self, tokens};

/// Returns the error of a benchmark's function as one of this program.
pub(crate) fn of_step<T>(result: overdrive_benches::StepResult<T>) -> Result<T> {
    result.map_err(|error| anyhow!("{error}"))
}

/// Returns the mean loss of a batch in a precision.
pub(crate) fn loss(model: &CausalLm, ids: &Tensor, precision: Precision) -> Result<Tensor> {
    let _autocast = precision.autocast(ids.device())?;
    mean_loss(model, ForwardInput::new(ids), ids)
}

/// Returns the mean loss of sequences of these lengths in the one row of `ids`. Their bounds are made here, as in a loop
/// of training.
pub(crate) fn packed_loss(
    model: &CausalLm,
    ids: &Tensor,
    lengths: &[i64],
    precision: Precision,
) -> Result<Tensor> {
    let sequences = PackedLengths::from_lengths(lengths, ids.device())?;
    let _autocast = precision.autocast(ids.device())?;
    mean_loss(
        model,
        ForwardInput::new(ids).with_sequences(&sequences),
        ids,
    )
}

fn mean_loss(model: &CausalLm, input: ForwardInput<'_>, ids: &Tensor) -> Result<Tensor> {
    let size = ids.size();
    // Each row has one label less than tokens.
    let count = usize::try_from(size[0] * (size[1] - 1))?;
    let input = input.with_label_count(count);
    Ok(model.loss_of(input, ids, LabelShift::HuggingFace)?.mean()?)
}

/// Returns the arguments of a training of `steps` steps.
pub(crate) fn arguments(steps: usize) -> TrainingArguments {
    TrainingArguments {
        max_steps: steps as i64,
        learning_rate: 3e-3,
        lr_scheduler_type: LrSchedulerType::Constant,
        save_strategy: SaveStrategy::No,
        ..TrainingArguments::default()
    }
}

/// The result of a training.
#[derive(Debug)]
pub(crate) struct Trained {
    /// The loss of each step.
    pub(crate) losses: Vec<f64>,
    /// The number of micro-batches whose operators were launched, and not replayed as a captured pass.
    pub(crate) launched: usize,
}

/// Trains on one batch with the run of the programs, and returns the loss of each step. With a folder the run is saved
/// there.
pub(crate) fn train_on_a_batch(
    model: &CausalLm,
    parameters: Vec<(String, Tensor)>,
    precision: Precision,
    arguments: &TrainingArguments,
) -> Result<Vec<f64>> {
    Ok(train(model, parameters, precision, arguments, 1)?.losses)
}

/// As [`train_on_a_batch`], with `batches` different batches.
pub(crate) fn train(
    model: &CausalLm,
    parameters: Vec<(String, Tensor)>,
    precision: Precision,
    arguments: &TrainingArguments,
    batches: usize,
) -> Result<Trained> {
    let device = model.device();
    let options = DataLoaderOptions {
        batch_size: 4,
        ..DataLoaderOptions::default()
    };
    let size = options.batch_size;
    let collate = move |rows: Vec<usize>| {
        let ids = tokens(rows.len() as i64, 64, Device::Cpu)?;
        let shift: Vec<i64> = rows.iter().map(|row| 7 * (row / size) as i64).collect();
        let shift = Tensor::f_from_slice(&shift)?.f_unsqueeze(1)?;
        Ok(ids.f_add(&shift)?.f_remainder(512)?)
    };
    let rows = InMemory((0..size * batches).collect());
    let loader = DataLoader::with_collate(rows, collate, options)?;
    let mut loader = DeviceLoader::new(loader, device);
    let group = ProcessGroup::single();
    let folder = arguments.output_dir.as_ref();
    let folder = folder.map(|_| RunFolder::open_or_create(&group, arguments));
    let options = RunOptions {
        precision: Some(precision),
        folder: folder.transpose()?,
        silent: true,
        ..RunOptions::default()
    };
    let mut run = TrainingRun::start(arguments, &group, parameters, &mut loader, options)?;
    let mut launched = 0;
    while let Some(batches) = run.next_batches(&mut loader)? {
        for ids in batches {
            run.forward_backward(ids, |ids| {
                launched += 1;
                mean_loss(model, ForwardInput::new(ids), ids)
            })?;
        }
        run.step()?;
        run.save_if_due()?;
    }
    let losses = run.finish()?.0.losses;
    Ok(Trained { losses, launched })
}

/// A model's parameters in training, for single steps on a batch that is there.
pub(crate) struct Trainer {
    optimizer: AdamW,
    scaler: Option<GradScaler>,
    precision: Precision,
}

impl Trainer {
    /// Returns a new model in f32 whose parameters are trained.
    pub(crate) fn of_model(
        config: &LlamaConfig,
        device: Device,
        precision: Precision,
    ) -> Result<(CausalLm, Self)> {
        let model = models::model(config, device, Kind::Float)?;
        model.set_requires_grad(true)?;
        let trainer = Self::new(model.named_parameters(), precision)?;
        Ok((model, trainer))
    }

    pub(crate) fn new(parameters: Vec<(String, Tensor)>, precision: Precision) -> Result<Self> {
        let config = AdamWConfig {
            learning_rate: 3e-3,
            ..AdamWConfig::default()
        };
        Ok(Self {
            optimizer: AdamW::new(vec![ParamGroup::new("all", parameters)], config)?,
            scaler: precision.new_scaler()?,
            precision,
        })
    }

    /// Runs a step and returns its loss, which is still on the device.
    pub(crate) fn step(&mut self, model: &CausalLm, ids: &Tensor) -> Result<Tensor> {
        self.step_with(loss(model, ids, self.precision)?)
    }

    /// Runs a step with this loss and returns it, still on the device.
    pub(crate) fn step_with(&mut self, loss: Tensor) -> Result<Tensor> {
        of_step(step_from(loss, &mut self.optimizer, self.scaler.as_mut()))
    }

    /// Runs `count` steps on one batch. The first step creates the states of the optimizer.
    pub(crate) fn steps(&mut self, model: &CausalLm, ids: &Tensor, count: usize) -> Result<()> {
        (0..count).try_for_each(|_| self.step(model, ids).map(drop))
    }
}
