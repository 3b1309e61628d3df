//! From the arguments to the parts of a run: device, precision, model, optimizer, schedule.

use overdrive_optim::{
    Adafactor, AdafactorConfig, AdamW, AdamW8bit, AdamW8bitConfig, AdamWConfig, Lion, LionConfig,
    LrScheduler, Optimizer, PagedAdamW, PagedAdamWConfig, Schedule, Sgd, SgdConfig, StateBits,
    decay_groups,
};
use overdrive_precision::{GradScaler, GradScalerConfig, Precision};
use overdrive_transformer::{CausalLm, InitOptions, ModelConfig};
use tch::{Device, Kind, Tensor};

use crate::{OptimizerName, Result, TextData, TrainingArguments, TrainingPlan};

impl TrainingArguments {
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
        let mut model = CausalLm::new(&config, &init)?;
        model.set_requires_grad(true)?;
        model.set_execution(self.execution());
        Ok(model)
    }

    /// The optimizer that `optim` names, over the model's parameters, without decay for norms, biases
    /// and embeddings.
    ///
    /// # Errors
    /// When an option is out of its range, or a paged state finds no room.
    pub fn new_optimizer(&self, model: &CausalLm) -> Result<Box<dyn Optimizer>> {
        self.optimizer_over(model.named_parameters())
    }

    /// The optimizer that `optim` names, over these parameters.
    ///
    /// # Errors
    /// As [`new_optimizer`](Self::new_optimizer).
    pub fn optimizer_over(&self, parameters: Vec<(String, Tensor)>) -> Result<Box<dyn Optimizer>> {
        let groups = decay_groups(parameters, self.weight_decay);
        let learning_rate = self.learning_rate;
        let weight_decay = self.weight_decay;
        let betas = (self.adam_beta1, self.adam_beta2);
        let eps = self.adam_epsilon;
        let paged = |state_bits| PagedAdamWConfig {
            learning_rate,
            betas,
            eps,
            weight_decay,
            state_bits,
            ..PagedAdamWConfig::default()
        };
        Ok(match self.optim {
            OptimizerName::AdamwTorchFused => {
                let config = AdamWConfig {
                    learning_rate,
                    betas,
                    eps,
                    weight_decay,
                    ..AdamWConfig::default()
                };
                Box::new(AdamW::new(groups, config)?)
            }
            OptimizerName::Adamw8bit => {
                let config = AdamW8bitConfig {
                    learning_rate,
                    betas,
                    eps,
                    weight_decay,
                    ..AdamW8bitConfig::default()
                };
                Box::new(AdamW8bit::new(groups, config)?)
            }
            OptimizerName::PagedAdamw32bit => {
                Box::new(PagedAdamW::new(groups, paged(StateBits::ThirtyTwo))?)
            }
            OptimizerName::PagedAdamw8bit => {
                Box::new(PagedAdamW::new(groups, paged(StateBits::Eight))?)
            }
            OptimizerName::Lion32bit => {
                let config = LionConfig {
                    learning_rate,
                    betas,
                    weight_decay,
                };
                Box::new(Lion::new(groups, config)?)
            }
            OptimizerName::Adafactor => {
                let config = AdafactorConfig {
                    weight_decay,
                    ..AdafactorConfig::with_learning_rate(learning_rate)
                };
                Box::new(Adafactor::new(groups, config)?)
            }
            OptimizerName::Muon => {
                return crate::validate::invalid(
                    "optim",
                    "`muon`",
                    "this loop cannot train by it yet",
                    "choose another optimizer",
                );
            }
            OptimizerName::Sgd => {
                let config = SgdConfig {
                    learning_rate,
                    weight_decay,
                    ..SgdConfig::default()
                };
                Box::new(Sgd::new(groups, config)?)
            }
        })
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
