use overdrive_datasets::{Batch, DeviceLoader};
use overdrive_distributed::ProcessGroup;
use overdrive_optim::Ema;
use overdrive_precision::Precision;
use overdrive_profiling::MemoryUsage;
use overdrive_sys::memory;
use tch::{Device, Kind};

use super::data::InstructionData;
use super::{FinetuneModel, Finetuned, TrainingMemory};
use crate::Result;
use crate::arguments::FinetuneArguments;
use crate::data::{BatchFill, DataShard};
use crate::memory_estimate::MemoryPlan;
use crate::run::{
    Evaluation, FinetuneStep, Fingerprints, Objective, RunFolder, RunSummary, gpu_memory,
};
use crate::tasks::language_model::{decoder_shape, evaluate};

/// A loaded model and its data, ready to be fine-tuned.
#[derive(Debug)]
pub struct FinetuneTask {
    /// The model and its trainable parameters.
    pub model: FinetuneModel,
    /// The prompts and responses.
    pub data: InstructionData,
    /// The fingerprints of both, the same on all processes.
    pub fingerprints: Fingerprints,
    /// The precision of the training.
    pub precision: Precision,
    pub(crate) measured: Measured,
}

/// The results of the preparation that a task keeps for its loaders and its results.
#[derive(Debug)]
pub(crate) struct Measured {
    pub(crate) shard: DataShard,
    pub(crate) fill: BatchFill,
    pub(crate) objective: Objective,
    /// The tokens of the widest row.
    pub(crate) width: u64,
    /// The bytes that were allocated before the model was loaded.
    pub(crate) allocated_before: u64,
}

impl FinetuneTask {
    /// Applies the arguments to this process, loads the model and the data, and passes `say` a line about each. The context
    /// is shortened to that of the model, and with `auto_find_batch_size` the micro-batches to what fits by the estimate.
    /// Each process of `group` calls it. `base_model` is that of [`FinetuneModel::load`].
    ///
    /// # Errors
    /// An error of the arguments, or if the model or the data cannot be loaded, or the inputs of the processes differ.
    pub fn prepare(
        arguments: &mut FinetuneArguments,
        base_model: Option<String>,
        group: &ProcessGroup,
        mut say: impl FnMut(&str),
    ) -> Result<Self> {
        let loaded = LoadedModel::load(arguments, base_model, group, &mut say)?;
        loaded.fit(arguments, Objective::Tokens, group, &mut say)?;
        let data = InstructionData::prepare(arguments, loaded.eos_token_ids(), &mut say)?;
        let fingerprints = data.fingerprints(arguments, group)?;
        let measured = loaded.measured(Objective::Tokens, data.fill(arguments)?);
        say(&format!(
            "batches     {} of {} rows per epoch, {}",
            data.train_loader(arguments, measured.shard)?
                .batches_per_epoch(),
            arguments.training.per_device_train_batch_size,
            measured.fill,
        ));
        loaded.model.describe(arguments, loaded.precision, &mut say);
        Ok(Self {
            model: loaded.model,
            data,
            fingerprints,
            precision: loaded.precision,
            measured,
        })
    }

    /// Returns the loader of this process.
    ///
    /// # Errors
    /// As [`InstructionData::train_loader`].
    pub fn train_loader(&self, arguments: &FinetuneArguments) -> Result<DeviceLoader<Batch>> {
        self.data.train_loader(arguments, self.measured.shard)
    }

    /// Evaluates the model on the held-out records, without dropout; the loss is NaN if none are held out.
    ///
    /// # Errors
    /// As [`evaluate`].
    pub fn evaluate(
        &mut self,
        arguments: &FinetuneArguments,
        group: &ProcessGroup,
    ) -> Result<Evaluation> {
        let loss = match self
            .data
            .validation_loader(arguments, self.measured.shard)?
        {
            Some(batches) => {
                self.model.model.set_training(false)?;
                let loss = evaluate(&self.model.model, batches, self.precision, group)?;
                self.model.model.set_training(true)?;
                loss
            }
            None => f64::NAN,
        };
        Ok(Evaluation::new(loss))
    }

    /// Ends the task with the results of its run.
    ///
    /// # Errors
    /// An error if the memory cannot be estimated.
    pub fn finish(
        mut self,
        arguments: &FinetuneArguments,
        folder: Option<RunFolder>,
        summary: RunSummary,
        ema: Option<Ema>,
    ) -> Result<Finetuned> {
        self.model.model.set_training(false)?;
        let peak = MemoryUsage::of(self.measured.shard.device()).peak_allocated_bytes;
        let peak = peak.map(|peak| peak.saturating_sub(self.measured.allocated_before));
        let (model, training) = (self.model, &arguments.training);
        let step = step_of(&model, self.precision, self.measured.objective);
        let plan = MemoryPlan {
            // The longest row bounds the activations, which dominate the estimate.
            length: self.measured.width.min(training.context_length),
            gpu_memory: gpu_memory(model.model.device()),
            ..arguments.step_plan(&step, training.per_device_train_batch_size)
        };
        let memory = TrainingMemory::of(&plan, &model, &summary, peak)?;
        Ok(Finetuned {
            arguments: arguments.clone(),
            folder,
            model,
            data: self.data,
            summary,
            memory,
            fill: self.measured.fill,
            ema,
        })
    }
}

/// A loaded model, before its data is read.
pub(crate) struct LoadedModel {
    pub(crate) model: FinetuneModel,
    pub(crate) precision: Precision,
    shard: DataShard,
    /// The bytes that were allocated before it was loaded.
    allocated_before: u64,
}

impl LoadedModel {
    /// Applies the arguments to this process and loads the model, as [`FinetuneTask::prepare`] does.
    pub(crate) fn load(
        arguments: &mut FinetuneArguments,
        base_model: Option<String>,
        group: &ProcessGroup,
        say: &mut dyn FnMut(&str),
    ) -> Result<Self> {
        arguments.validate()?;
        let (device, precision) = (arguments.training.device(group), arguments.apply()?);
        // The peak is measured from here. A GPU without allocations has no statistics yet.
        memory::reset_peak(device).or_else(|error| match device {
            Device::Cuda(_) => Ok(()),
            _ => Err(error),
        })?;
        // A process may train several times: earlier allocations do not count.
        let allocated_before = MemoryUsage::of(device).allocated_bytes.unwrap_or(0);
        let model = FinetuneModel::load(arguments, base_model, device)?;
        let config = model.model.config();
        let context = u64::try_from(config.max_position_embeddings()).unwrap_or(0);
        if arguments.training.context_length > context {
            let asked = arguments.training.context_length;
            say(&format!(
                "max_seq_length is {context}, the model's context (asked for: {asked})"
            ));
            arguments.training.context_length = context;
        }
        Ok(Self {
            model,
            precision,
            shard: DataShard::of(group, device),
            allocated_before,
        })
    }

    /// Makes the micro-batches as small as the free memory demands, with `auto_find_batch_size`: call it when all models are
    /// loaded.
    pub(crate) fn fit(
        &self,
        arguments: &mut FinetuneArguments,
        objective: Objective,
        group: &ProcessGroup,
        say: &mut dyn FnMut(&str),
    ) -> Result<()> {
        let step = step_of(&self.model, self.precision, objective);
        if let Some(line) = arguments.fit_batch(&step, self.shard.device(), group)? {
            say(&line);
        }
        Ok(())
    }

    /// Returns the measurements that a task keeps, with the fill and the widest row of its batches.
    pub(crate) fn measured(
        &self,
        objective: Objective,
        (fill, width): (BatchFill, u64),
    ) -> Measured {
        Measured {
            shard: self.shard,
            fill,
            objective,
            width,
            allocated_before: self.allocated_before,
        }
    }

    /// Returns the end-of-sequence tokens of the model's configuration.
    pub(crate) fn eos_token_ids(&self) -> &[i64] {
        self.model.model.config().eos_token_ids()
    }
}

fn step_of(model: &FinetuneModel, precision: Precision, objective: Objective) -> FinetuneStep {
    let all = model.model.named_parameters();
    let frozen_in_fp32 = all
        .iter()
        .filter(|(_, tensor)| tensor.kind() == Kind::Float && !tensor.requires_grad())
        .map(|(_, tensor)| tensor.numel() as u64);
    FinetuneStep {
        shape: decoder_shape(&model.model),
        precision,
        trainable: model.trainable_parameters(),
        frozen_in_fp32: frozen_in_fp32.sum(),
        objective,
    }
}
