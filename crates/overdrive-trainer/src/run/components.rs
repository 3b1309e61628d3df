//! The components of a run from its arguments: accumulation, optimizer, schedule.

use overdrive_accumulation::AccumulationConfig;
use overdrive_distributed::{ProcessGroup, ZeroRedundancyOptimizer};
use overdrive_optim::{
    Adafactor, AdafactorConfig, AdamW, AdamW8bit, AdamW8bitConfig, AdamWConfig, CombinedOptimizer,
    DecayRule, EMBEDDING_NAMES, Ema, EmaConfig, Lion, LionConfig, LrScheduler, Muon, MuonConfig,
    MuonRate, Optimizer, PagedAdamW, PagedAdamWConfig, ParamGroup, Schedule, Sgd, SgdConfig,
    StateBits, StateDict,
};
use overdrive_precision::Precision;
use overdrive_sys::denormals::set_flush_denormals;
use serde_json::Value;
use tch::Tensor;

use crate::{OptimizerName, Result, TextData, TrainingArguments, TrainingPlan};

/// The name of the parameter group that Muon trains.
const MUON: &str = "muon";

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
        // After the number of threads, so that it reaches all of them.
        set_flush_denormals(self.flush_denormals);
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

    /// Returns the optimizer that `optim` names, over these parameters. Norms and biases have no weight decay,
    /// and without `decay_embeddings` embeddings have none either.
    ///
    /// # Errors
    /// An error if an option is outside its range, or paged states do not fit into the memory.
    pub fn new_optimizer(
        &self,
        group: &ProcessGroup,
        parameters: Vec<(String, Tensor)>,
    ) -> Result<Box<dyn Optimizer>> {
        let rule = match self.decay_embeddings {
            true => DecayRule::default(),
            false => DecayRule::without_embeddings(),
        };
        let mut groups = rule.groups(parameters, self.weight_decay);
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
        // As transformers does through bitsandbytes' `GlobalOptimManager`.
        let embeddings = || EMBEDDING_NAMES.map(String::from).to_vec();
        let paged = |state_bits| PagedAdamWConfig {
            learning_rate,
            betas,
            eps,
            weight_decay,
            state_bits,
            full_precision_names: embeddings(),
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
                    full_precision_names: embeddings(),
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

    /// Gives an optimizer and a schedule that were loaded from a snapshot the options of these arguments: learning
    /// rate, schedule, weight decay, betas. A snapshot has those of the run that saved it. `options` is the state of the
    /// optimizer when it was new, before its schedule.
    ///
    /// The optimizer's state is in memory twice for a moment if an option differs.
    ///
    /// # Errors
    /// As [`new_scheduler`](Self::new_scheduler), and an error of the optimizer.
    pub fn set_resumed_options(
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

/// Moves the matrices of the blocks, which Muon trains, into a group of their own before the others.
/// Embeddings and the head stay in their groups.
fn with_muon_group(groups: Vec<ParamGroup>) -> Vec<ParamGroup> {
    let mut all = Vec::new();
    for mut group in groups {
        let of_adamw = |name: &str| {
            let mut tables = EMBEDDING_NAMES.into_iter();
            name.contains("lm_head") || tables.any(|table| name.contains(table))
        };
        let is_matrix = |name: &str, tensor: &Tensor| tensor.dim() == 2 && !of_adamw(name);
        // Norms and biases are in the group without decay, so this one has all matrices for Muon.
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

#[cfg(test)]
mod tests {
    use overdrive_optim::StateDict;
    use tch::{Device, Kind};

    use super::*;

    const NAMES: [&str; 4] = [
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.norm.weight",
    ];

    fn parameters() -> Vec<(String, Tensor)> {
        let named = NAMES.into_iter().map(|name| {
            let size: &[i64] = match name {
                "model.norm.weight" => &[64],
                _ => &[128, 64],
            };
            let weight = Tensor::ones(size, (Kind::Float, Device::Cpu)).set_requires_grad(true);
            (name.to_owned(), weight)
        });
        named.collect()
    }

    fn names(group: &ParamGroup) -> (&str, Option<f64>, Vec<&str>) {
        let names = group.parameters.iter().map(|(name, _)| name.as_str());
        (group.name.as_str(), group.weight_decay, names.collect())
    }

    /// Returns the state after one step.
    fn state(arguments: &TrainingArguments) -> StateDict {
        let parameters = parameters();
        let group = ProcessGroup::single();
        let shared = parameters
            .iter()
            .map(|(n, t)| (n.clone(), t.shallow_clone()));
        let mut optimizer = arguments.new_optimizer(&group, shared.collect()).unwrap();
        for (_, weight) in &parameters {
            weight.sum(Kind::Float).backward();
        }
        optimizer.step().unwrap();
        optimizer.state_dict().unwrap()
    }

    #[test]
    fn embeddings_decay_unless_the_key_exempts_them() {
        for (decay_embeddings, expected) in [(true, [3, 1]), (false, [2, 2])] {
            let arguments = TrainingArguments {
                weight_decay: 0.1,
                decay_embeddings,
                ..TrainingArguments::default()
            };
            let groups = state(&arguments).metadata["groups"].clone();
            let sizes = [0, 1].map(|i| groups[i]["parameters"].as_array().unwrap().len());
            assert_eq!(sizes, expected, "{groups}");
            let decays = [0, 1].map(|i| groups[i]["weight_decay"].as_f64().unwrap());
            assert_eq!(decays, [0.1, 0.0]);
        }
    }

    #[test]
    fn muon_trains_neither_embeddings_nor_the_head() {
        let groups = with_muon_group(DecayRule::default().groups(parameters(), 0.1));
        assert_eq!(
            groups.iter().map(names).collect::<Vec<_>>(),
            [
                (MUON, Some(0.1), vec![NAMES[2]]),
                ("decay", Some(0.1), vec![NAMES[0], NAMES[1]]),
                ("no_decay", Some(0.0), vec![NAMES[3]]),
            ]
        );
    }

    #[test]
    fn optimizers_of_8_bits_keep_the_states_of_embeddings_in_32() {
        for optim in [OptimizerName::Adamw8bit, OptimizerName::PagedAdamw8bit] {
            let arguments = TrainingArguments {
                optim,
                ..TrainingArguments::default()
            };
            let state = state(&arguments);
            let kinds = NAMES.map(|name| state.tensors[&format!("{name}.exp_avg")].kind());
            let expected = [Kind::Uint8, Kind::Float, Kind::Uint8, Kind::Float];
            assert_eq!(kinds, expected, "{optim:?}");
        }
    }
}
