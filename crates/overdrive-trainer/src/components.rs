//! The components of a run from its arguments: accumulation, optimizer, schedule.

use overdrive_accumulation::AccumulationConfig;
use overdrive_distributed::{ProcessGroup, ZeroRedundancyOptimizer};
use overdrive_optim::{
    Adafactor, AdafactorConfig, AdamW, AdamW8bit, AdamW8bitConfig, AdamWConfig, CombinedOptimizer,
    Ema, EmaConfig, Lion, LionConfig, LrScheduler, Muon, MuonConfig, MuonRate, Optimizer,
    PagedAdamW, PagedAdamWConfig, ParamGroup, Schedule, Sgd, SgdConfig, StateBits, decay_groups,
};
use overdrive_precision::Precision;
use serde_json::Value;
use tch::Tensor;

use crate::{OptimizerName, Result, TextData, TrainingArguments, TrainingPlan};

/// The name of the parameter group that Muon trains.
const MUON: &str = "muon";

impl TrainingArguments {
    /// Sets the number of threads, TF32 and the seed of libtorch, and returns the precision of the run, which its
    /// autocast, its loss scaler, its memory plan and its recorder get.
    ///
    /// # Errors
    /// An error of libtorch.
    pub fn apply(&self) -> Result<Precision> {
        self.set_threads()?;
        // Unset keeps libtorch's setting, which the user may have changed.
        if let Some(allowed) = self.tf32 {
            overdrive_precision::tf32::allow(allowed)?;
        }
        // libtorch declares the seed signed and uses its 64 bits.
        tch::manual_seed(self.seed.cast_signed());
        Ok(self.precision())
    }

    /// Returns the `config.json` of a new model of the shape of `model`, for the tokenizer of `data`.
    pub fn model_config(&self, data: &TextData) -> Value {
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
            // Hugging Face writes 0 for no clipping.
            max_grad_norm: (self.max_grad_norm > 0.0).then_some(self.max_grad_norm),
        }
    }

    /// Returns the optimizer that `optim` names, over these parameters. Norms, biases and embeddings have no
    /// weight decay.
    ///
    /// # Errors
    /// An error if an option is outside its range, or paged states do not fit into the memory.
    pub fn new_optimizer(
        &self,
        group: &ProcessGroup,
        parameters: Vec<(String, Tensor)>,
    ) -> Result<Box<dyn Optimizer>> {
        let mut groups = decay_groups(parameters, self.weight_decay);
        // Before sharding, so that all processes form the same groups.
        if self.optim == OptimizerName::Muon {
            groups = with_muon_group(groups);
        }
        if self.shards_optimizer() {
            let build = |own| self.optimizer_of(own);
            return Ok(Box::new(ZeroRedundancyOptimizer::new(
                group, groups, build,
            )?));
        }
        Ok(self.optimizer_of(groups)?)
    }

    /// Returns `true` if each process keeps the optimizer states of its own parameters only (`zero_stage`).
    pub fn shards_optimizer(&self) -> bool {
        self.zero_stage > 0
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

    fn optimizer_of(&self, groups: Vec<ParamGroup>) -> overdrive_optim::Result<Box<dyn Optimizer>> {
        let learning_rate = self.learning_rate;
        let weight_decay = self.weight_decay;
        let betas = (self.adam_beta1, self.adam_beta2);
        let eps = self.adam_epsilon;
        let adamw = AdamWConfig {
            learning_rate,
            betas,
            eps,
            weight_decay,
            ..AdamWConfig::default()
        };
        let paged = |state_bits| PagedAdamWConfig {
            learning_rate,
            betas,
            eps,
            weight_decay,
            state_bits,
            ..PagedAdamWConfig::default()
        };
        Ok(match self.optim {
            OptimizerName::AdamwTorchFused => Box::new(AdamW::new(groups, adamw)?),
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
                let (matrices, others): (Vec<_>, Vec<_>) =
                    groups.into_iter().partition(|group| group.name == MUON);
                let muon = MuonConfig {
                    learning_rate,
                    weight_decay,
                    // Scales Muon's updates like AdamW's, so that one learning rate suits both.
                    adjust_lr_fn: MuonRate::MatchRmsAdamw,
                    ..MuonConfig::default()
                };
                let mut optimizers: Vec<(String, Box<dyn Optimizer>)> = Vec::new();
                // With sharded states a process may have parameters of one kind only.
                if !matrices.is_empty() {
                    optimizers.push((MUON.to_owned(), Box::new(Muon::new(matrices, muon)?)));
                }
                if !others.is_empty() {
                    optimizers.push(("adamw".to_owned(), Box::new(AdamW::new(others, adamw)?)));
                }
                Box::new(CombinedOptimizer::new(optimizers)?)
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
}

/// Moves the matrices of the blocks, which Muon trains, into a group of their own before the others.
/// Embeddings, which have no weight decay, and the head stay in their groups.
fn with_muon_group(groups: Vec<ParamGroup>) -> Vec<ParamGroup> {
    let mut all = Vec::new();
    for mut group in groups {
        let is_matrix =
            |name: &str, tensor: &Tensor| tensor.dim() == 2 && !name.contains("lm_head");
        // Norms, biases and embeddings are in the group without decay, so this one has all matrices for Muon.
        if group.name == "decay" {
            let (matrices, others): (Vec<_>, Vec<_>) = std::mem::take(&mut group.parameters)
                .into_iter()
                .partition(|(name, tensor)| is_matrix(name, tensor));
            group.parameters = others;
            let mut muon = ParamGroup::new(MUON, matrices);
            muon.weight_decay = group.weight_decay;
            all.insert(0, muon);
        }
        all.push(group);
    }
    all.retain(|group| !group.parameters.is_empty());
    all
}
