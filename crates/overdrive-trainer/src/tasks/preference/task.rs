use overdrive_datasets::DeviceLoader;
use overdrive_distributed::ProcessGroup;
use overdrive_lora::{BiasMode, disable_adapters, enable_adapters};
use overdrive_optim::Ema;
use overdrive_precision::Precision;
use overdrive_transformer::CausalLm;
use tch::{Kind, Tensor};

use super::{
    DpoOutput, PreferenceBatch, PreferenceData, PreferenceLogProbs, RewardTotals, dpo_loss,
    preference_log_probs,
};
use crate::arguments::{DpoArguments, DpoConfig, FinetuneArguments};
use crate::error::invalid;
use crate::run::{Evaluation, Fingerprints, Objective, RunFolder, RunSummary};
use crate::tasks::finetune::{FinetuneModel, FinetuneTask, Finetuned, LoadedModel, Measured};
use crate::{Interrupt, Result};

/// A loaded model, its reference and preference data, ready for Direct Preference Optimization.
#[derive(Debug)]
pub struct PreferenceTask {
    /// The model and its trainable parameters: the policy.
    pub model: FinetuneModel,
    /// The pairs.
    pub data: PreferenceData,
    /// The options of the loss.
    pub config: DpoConfig,
    /// The fingerprints of model and data, the same on all processes.
    pub fingerprints: Fingerprints,
    /// The precision of the training.
    pub precision: Precision,
    reference: Reference,
    measured: Measured,
}

/// The model with which the policy is compared.
#[derive(Debug)]
enum Reference {
    /// The policy without its adapter, which takes no memory.
    Base,
    /// A second copy of the model, because all weights of the first are trained.
    Copy(Box<CausalLm>),
}

impl PreferenceTask {
    /// Applies the arguments to this process, loads the model, its reference and the data, and passes `say` a line about each,
    /// as [`FinetuneTask::prepare`] does. The reference is the model without its adapter; if all weights are trained, it is
    /// a second copy of the model.
    ///
    /// # Errors
    /// As [`FinetuneTask::prepare`], [`DpoConfig::validate`] and [`PreferenceData::prepare`], and
    /// [`Error::Common`](crate::Error::Common) for a `bias` that is trained and for an
    /// `init_lora_weights` that changes the weights, because they would change the reference.
    pub fn prepare(
        arguments: &mut DpoArguments,
        base_model: Option<String>,
        group: &ProcessGroup,
        mut say: impl FnMut(&str),
    ) -> Result<Self> {
        let config = arguments.dpo.clone();
        config.validate()?;
        let arguments = &mut arguments.finetune;
        if arguments.use_peft && arguments.bias != BiasMode::None {
            let expected = "`none` for preferences, because the reference is the model without its adapter, and \
                            trained biases stay in it";
            let bias = format!("{:?}", arguments.bias).to_lowercase();
            return invalid("bias", bias, expected);
        }
        if arguments.use_peft && arguments.init_lora_weights.changes_base() {
            let expected = "an initialization that leaves the weights as they are (`true`, `gaussian`, `orthogonal`) for \
                            preferences, because the reference is the model without its adapter";
            return invalid("init_lora_weights", arguments.init_lora_weights, expected);
        }
        let loaded = LoadedModel::load(arguments, base_model, group, &mut say)?;
        let reference = match arguments.use_peft {
            true => Reference::Base,
            false => {
                let copy = FinetuneModel::load_base(arguments, arguments.training.device(group))?;
                copy.set_requires_grad(false)?;
                Reference::Copy(Box::new(copy))
            }
        };
        loaded.fit(arguments, Objective::Preferences, group, &mut say)?;
        let data = PreferenceData::prepare(arguments, loaded.eos_token_ids(), &mut say)?;
        let fingerprints = data.chosen.fingerprints(arguments, group)?;
        let measured = loaded.measured(Objective::Preferences, data.fill(arguments)?);
        let (mut model, precision, shard) = (loaded.model, loaded.precision, measured.shard);
        say(&format!(
            "batches     {} of {} pairs per epoch, {}",
            data.train_loader(arguments, shard)?.batches_per_epoch(),
            arguments.training.per_device_train_batch_size,
            measured.fill,
        ));
        model.describe(arguments, precision, &mut say);
        say(match reference {
            Reference::Base => "reference   the model without its adapter",
            Reference::Copy(_) => "reference   a second copy of the model",
        });
        model.model.set_training(!config.disable_dropout)?;
        Ok(Self {
            model,
            data,
            config,
            fingerprints,
            precision,
            reference,
            measured,
        })
    }

    /// Returns the loader of this process.
    ///
    /// # Errors
    /// As [`PreferenceData::train_loader`].
    pub fn train_loader(
        &self,
        arguments: &FinetuneArguments,
    ) -> Result<DeviceLoader<PreferenceBatch>> {
        self.data.train_loader(arguments, self.measured.shard)
    }

    /// Computes the log-probabilities of the answers of `batch` under the reference model, without gradients.
    ///
    /// # Errors
    /// As [`preference_log_probs`], and while a graph of the policy with activation checkpoints is alive.
    pub fn reference_log_probs(&mut self, batch: &PreferenceBatch) -> Result<PreferenceLogProbs> {
        let _no_grad = tch::no_grad_guard();
        let model = match &self.reference {
            Reference::Copy(copy) => return preference_log_probs(copy, batch),
            Reference::Base => &mut self.model.model,
        };
        disable_adapters(model)?;
        let log_probs = preference_log_probs(model, batch);
        // Enabled also after an error, so that the policy is not left without its adapter.
        enable_adapters(model)?;
        log_probs
    }

    /// Computes the loss of `batch` from the log-probabilities of the reference model.
    ///
    /// # Errors
    /// As [`preference_log_probs`] and [`dpo_loss`].
    pub fn loss(
        &self,
        batch: &PreferenceBatch,
        reference: &PreferenceLogProbs,
    ) -> Result<DpoOutput> {
        let policy = preference_log_probs(&self.model.model, batch)?;
        dpo_loss(&policy, reference, &self.config)
    }

    /// Evaluates the mean loss and the rewards of the held-out pairs, without dropout; the loss is NaN if none are held out. A
    /// signal that stops the run ends it early; the result is then one to discard.
    ///
    /// # Errors
    /// An error if a batch cannot be read, or a process is lost.
    pub fn evaluate(
        &mut self,
        arguments: &FinetuneArguments,
        group: &ProcessGroup,
    ) -> Result<Evaluation> {
        let Some(batches) = self
            .data
            .validation_loader(arguments, self.measured.shard)?
        else {
            return Ok(Evaluation::new(f64::NAN));
        };
        let _no_grad = tch::no_grad_guard();
        let (device, precision) = (self.measured.shard.device(), self.precision);
        self.model.model.set_training(false)?;
        // Summed on the device, so that the host does not wait for it after each batch.
        let mut sum = Tensor::f_zeros([0i64; 0], (Kind::Double, device))?;
        let (mut pairs, mut rewards) = (0, RewardTotals::default());
        for batch in batches {
            if Interrupt::signal_received() {
                break;
            }
            let batch = batch?;
            let _autocast = precision.autocast(device)?;
            let reference = self.reference_log_probs(&batch)?;
            let output = self.loss(&batch, &reference)?;
            sum = sum.f_add(&output.loss.f_mul_scalar(batch.pairs as f64)?)?;
            rewards.add(&output.rewards)?;
            pairs += batch.pairs;
        }
        self.model
            .model
            .set_training(!self.config.disable_dropout)?;
        let loss = group.weighted_mean(f64::try_from(sum)?, pairs as f64)?;
        let mut evaluation = Evaluation::new(loss);
        evaluation.metrics.extend(rewards.take_mean(group)?.named());
        Ok(evaluation)
    }

    /// Ends the task with the results of its run. Their data are the prompts and the chosen answers.
    ///
    /// # Errors
    /// An error if the memory cannot be estimated.
    pub fn finish(
        self,
        arguments: &FinetuneArguments,
        folder: Option<RunFolder>,
        summary: RunSummary,
        ema: Option<Ema>,
    ) -> Result<Finetuned> {
        let task = FinetuneTask {
            model: self.model,
            data: self.data.chosen,
            fingerprints: self.fingerprints,
            precision: self.precision,
            measured: self.measured,
        };
        task.finish(arguments, folder, summary, ema)
    }
}
