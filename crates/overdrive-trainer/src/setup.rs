//! From the arguments to the parts of a run: device, precision, model, optimizer, schedule.

use overdrive_optim::{AdamW, AdamWConfig, LrScheduler, Optimizer, Schedule, decay_groups};
use overdrive_precision::{GradScaler, GradScalerConfig, Precision};
use overdrive_transformer::{CausalLm, InitOptions, ModelConfig};
use tch::{Device, Kind};

use crate::{Result, TextData, TrainingArguments, TrainingPlan};

impl TrainingArguments {
    /// The first GPU, or the CPU where there is none or `use_cpu` says so.
    pub fn device(&self) -> Device {
        if self.use_cpu {
            Device::Cpu
        } else {
            Device::cuda_if_available()
        }
    }

    /// What `bf16`, `fp16` and `tf32` come to.
    pub fn precision(&self) -> Precision {
        if self.bf16 {
            Precision::Bf16
        } else if self.fp16 {
            Precision::Fp16
        } else if self.tf32 == Some(true) {
            Precision::Tf32
        } else {
            Precision::Fp32
        }
    }

    /// Sets the process's threads, TF32 and libtorch's seed; the precision to train in.
    ///
    /// # Errors
    /// When libtorch refuses.
    pub fn apply(&self) -> Result<Precision> {
        if let Some(threads) = self.threads {
            overdrive_sys::threads::set_intra_op(threads)?;
        }
        if let Some(allowed) = self.tf32 {
            overdrive_precision::tf32::allow(allowed)?;
        }
        tch::manual_seed(self.seed.cast_signed());
        Ok(self.precision())
    }

    /// A fresh model of the shape that `model` describes, for the tokenizer of `data`, its weights
    /// drawn from `seed`.
    ///
    /// # Errors
    /// When the shape is none that can be built.
    pub fn new_model(&self, data: &TextData, device: Device) -> Result<CausalLm> {
        let mut json = self
            .model
            .to_hugging_face(data.vocab_size(), self.context_length);
        if let Some(end) = data.end_of_text() {
            json["eos_token_id"] = end.into();
            json["bos_token_id"] = end.into();
        }
        let config = ModelConfig::try_from(json)?;
        let init = InitOptions {
            device,
            kind: Kind::Float,
            seed: self.seed,
        };
        let model = CausalLm::new(&config, &init)?;
        model.set_requires_grad(true)?;
        Ok(model)
    }

    /// AdamW over the model's parameters, without decay for norms, biases and embeddings.
    ///
    /// # Errors
    /// When an option is out of its range.
    pub fn new_optimizer(&self, model: &CausalLm) -> Result<AdamW> {
        let config = AdamWConfig {
            learning_rate: self.learning_rate,
            betas: (self.adam_beta1, self.adam_beta2),
            eps: self.adam_epsilon,
            weight_decay: self.weight_decay,
            ..AdamWConfig::default()
        };
        Ok(AdamW::new(
            decay_groups(model.named_parameters(), self.weight_decay),
            config,
        )?)
    }

    /// The schedule that `lr_scheduler_type` names, over the steps of `plan`.
    ///
    /// # Errors
    /// When an option of the schedule is out of its range.
    pub fn new_scheduler(
        &self,
        plan: &TrainingPlan,
        optimizer: &mut impl Optimizer,
    ) -> Result<LrScheduler> {
        let schedule = Schedule::new(
            self.lr_scheduler_type,
            plan.schedule_length(),
            self.learning_rate,
            &self.lr_scheduler_kwargs,
        )?;
        Ok(LrScheduler::new(schedule, optimizer)?)
    }

    /// The gradient scaler, where the precision needs one.
    ///
    /// # Errors
    /// Never with these defaults.
    pub fn new_scaler(&self) -> Result<Option<GradScaler>> {
        if !self.precision().needs_grad_scaler() {
            return Ok(None);
        }
        Ok(Some(GradScaler::new(GradScalerConfig::default())?))
    }
}
