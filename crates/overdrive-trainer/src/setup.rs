//! From the arguments to the parts of a run: precision, accumulation, optimizer, schedule.

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

/// The group of the matrices that Muon trains.
const MUON: &str = "muon";

impl TrainingArguments {
    /// Returns the precision that `bf16`, `fp16` and `tf32` ask for.
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

    /// Sets the process's threads, TF32 and libtorch's seed; returns the precision to train in.
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

    /// Returns the `config.json` of a fresh model of the shape that `model` describes, for the tokenizer of
    /// `data`.
    pub fn model_config(&self, data: &TextData) -> Value {
        let mut json = self
            .model
            .to_hugging_face(data.vocab_size(), self.context_length);
        if let Some(end) = data.end_of_text() {
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
            max_grad_norm: (self.max_grad_norm > 0.0).then_some(self.max_grad_norm),
        }
    }

    /// Makes the optimizer that `optim` names, over these parameters, without decay for norms, biases and
    /// embeddings.
    ///
    /// # Errors
    /// When an option is out of its range, or a paged state finds no room.
    pub fn new_optimizer(
        &self,
        group: &ProcessGroup,
        parameters: Vec<(String, Tensor)>,
    ) -> Result<Box<dyn Optimizer>> {
        let mut groups = decay_groups(parameters, self.weight_decay);
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

    /// Returns whether each process keeps the optimizer states of its own parameters only (`zero_stage`).
    pub fn shards_optimizer(&self) -> bool {
        self.zero_stage > 0
    }

    /// Makes the moving average of the trainable parameters that `ema_decay` asks for.
    ///
    /// # Errors
    /// When the decay is out of its range.
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
                    // One learning rate serves both.
                    adjust_lr_fn: MuonRate::MatchRmsAdamw,
                    ..MuonConfig::default()
                };
                let mut parts: Vec<(String, Box<dyn Optimizer>)> = Vec::new();
                // A process that shards the states may have parameters of one kind only.
                if !matrices.is_empty() {
                    parts.push((MUON.to_owned(), Box::new(Muon::new(matrices, muon)?)));
                }
                if !others.is_empty() {
                    parts.push(("adamw".to_owned(), Box::new(AdamW::new(others, adamw)?)));
                }
                Box::new(CombinedOptimizer::new(parts)?)
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

    /// Makes the schedule that `lr_scheduler_type` names, over the steps of `plan`.
    ///
    /// # Errors
    /// When an option of the schedule is out of its range.
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

/// Puts the matrices of the blocks, which Muon is for, into a group of their own before the others: not
/// embeddings, which have no decay either, and not the head.
fn with_muon_group(groups: Vec<ParamGroup>) -> Vec<ParamGroup> {
    let mut all = Vec::new();
    for mut group in groups {
        let is_matrix =
            |name: &str, tensor: &Tensor| tensor.dim() == 2 && !name.contains("lm_head");
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
