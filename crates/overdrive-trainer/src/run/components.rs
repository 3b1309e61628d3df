//! The components of a run from its arguments: accumulation, averages, schedule.

use overdrive_accumulation::AccumulationConfig;
use overdrive_optim::{Ema, EmaConfig, LrScheduler, Optimizer, Schedule, StateDict};
use overdrive_precision::Precision;
use overdrive_sys::denormals::set_flush_denormals;
use serde_json::Value;
use tch::Tensor;

use super::plan::TrainingPlan;
use crate::Result;
use crate::arguments::{FinetuneArguments, TrainingArguments};
use crate::data::TextData;

impl TrainingArguments {
    /// Sets the number of threads, the treatment of subnormal numbers, TF32 and the seed of libtorch, and returns the
    /// precision of the run, which its autocast, its loss scaler, its memory plan and its recorder get.
    ///
    /// Call it on the thread that trains, before it computes anything.
    ///
    /// # Errors
    /// An error of libtorch.
    pub fn apply(&self) -> Result<Precision> {
        self.set_threads()?;
        // Set after the number of threads, so that it applies to all of them.
        set_flush_denormals(self.flush_denormals);
        // If the key is not set, libtorch's setting stays, which the user may have changed.
        if let Some(allowed) = self.tf32 {
            overdrive_precision::tf32::allow(allowed)?;
        }
        // libtorch declares the seed signed and uses its 64 bits.
        tch::manual_seed(self.seed.cast_signed());
        Ok(self.precision())
    }

    /// Returns the `config.json` of a new model of the shape of `model`, for the tokenizer of `data`.
    pub(crate) fn model_config(&self, data: &TextData) -> Value {
        let mut json = self
            .model
            .to_hugging_face(data.vocab_size(), self.context_length);
        if let Some(end) = data.end_of_text() {
            // The token between documents both ends and starts one.
            json["eos_token_id"] = end.into();
            json["bos_token_id"] = end.into();
        }
        json
    }

    /// Returns the options of gradient accumulation and clipping.
    pub fn accumulation(&self) -> AccumulationConfig {
        AccumulationConfig {
            gradient_accumulation_steps: usize::try_from(self.gradient_accumulation_steps)
                .unwrap_or(usize::MAX),
            // Hugging Face writes 0 for no clipping, and logs the norm nevertheless.
            max_grad_norm: Some(match self.max_grad_norm > 0.0 {
                true => self.max_grad_norm,
                false => f64::INFINITY,
            }),
        }
    }

    /// Returns the moving average of the trainable parameters if `ema_decay` is set.
    ///
    /// # Errors
    /// An error if the decay is outside its range.
    pub fn new_ema(&self, parameters: Vec<(String, Tensor)>) -> Result<Option<Ema>> {
        let Some(decay) = self.ema_decay else {
            return Ok(None);
        };
        let config = EmaConfig {
            decay,
            ..EmaConfig::default()
        };
        Ok(Some(Ema::new(parameters, config)?))
    }

    /// Returns the schedule that `lr_scheduler_type` names, over the steps of `plan`.
    ///
    /// # Errors
    /// An error if an option of the schedule is outside its range.
    pub fn new_scheduler(
        &self,
        plan: &TrainingPlan,
        optimizer: &mut dyn Optimizer,
    ) -> Result<LrScheduler> {
        let schedule = Schedule::new(
            self.lr_scheduler_type,
            plan.schedule_length(),
            self.learning_rate,
            &self.lr_scheduler_kwargs,
        )?;
        Ok(LrScheduler::new(schedule, optimizer)?)
    }

    /// Gives an optimizer and a schedule that were loaded from a snapshot the options of these arguments: learning
    /// rate, schedule, weight decay, betas. A snapshot has those of the run that saved it. `options` is the state of the
    /// optimizer when it was new, before its schedule.
    ///
    /// The optimizer's state is in memory twice for a moment if an option differs.
    ///
    /// # Errors
    /// As [`new_scheduler`](Self::new_scheduler), and an error of the optimizer.
    pub(super) fn set_resumed_options(
        &self,
        plan: &TrainingPlan,
        options: &StateDict,
        optimizer: &mut dyn Optimizer,
        scheduler: &mut LrScheduler,
    ) -> Result<()> {
        let loaded = optimizer.state_dict()?;
        let before = loaded.metadata.clone();
        let loaded = loaded.with_options_of(options);
        if loaded.metadata != before {
            optimizer.load_state_dict(&loaded)?;
        }
        let steps = scheduler.last_step();
        optimizer.set_learning_rate(self.learning_rate)?;
        *scheduler = self.new_scheduler(plan, optimizer)?;
        Ok(scheduler.set_step(steps, optimizer)?)
    }
}

impl FinetuneArguments {
    /// Sets the number of threads, the treatment of subnormal numbers, TF32 and the seed of libtorch, and returns the
    /// precision of the run, which its autocast, its loss scaler, its memory plan and its recorder get.
    ///
    /// # Errors
    /// As [`TrainingArguments::apply`].
    pub fn apply(&self) -> Result<Precision> {
        self.training.apply()?;
        Ok(self.precision())
    }
}
