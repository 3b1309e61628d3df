//! The optimizers that `optim` names. One more is a variant of [`OptimizerName`] and its arms here.

use overdrive_distributed::{ProcessGroup, ZeroRedundancyOptimizer};
use overdrive_optim::{
    Adafactor, AdafactorConfig, AdamW, AdamW8bit, AdamW8bitConfig, AdamWConfig, CombinedOptimizer,
    DecayRule, EMBEDDING_NAMES, Lion, LionConfig, Muon, MuonConfig, MuonRate, Optimizer,
    PagedAdamW, PagedAdamWConfig, ParamGroup, Sgd, SgdConfig, StateBits,
};
use tch::Tensor;

use crate::Result;
use crate::arguments::{OptimizerName, TrainingArguments};
use crate::memory_estimate::OptimizerMemory;

/// The name of the parameter group that Muon trains, of [`DecayRule::groups_with_muon`].
const MUON: &str = "muon";

impl OptimizerName {
    /// Returns the states in a snapshot.
    pub(crate) fn stored(self) -> OptimizerMemory {
        match self {
            Self::AdamwTorchFused | Self::PagedAdamw32bit => OptimizerMemory::AdamW,
            Self::Adamw8bit | Self::PagedAdamw8bit => OptimizerMemory::AdamW8bit,
            Self::Lion32bit => OptimizerMemory::Lion,
            Self::Adafactor => OptimizerMemory::Adafactor,
            Self::Sgd => OptimizerMemory::Sgd,
            Self::Muon => OptimizerMemory::Muon,
        }
    }

    /// Returns the states in the memory of the device.
    pub(crate) fn memory(self) -> OptimizerMemory {
        match self {
            Self::PagedAdamw32bit | Self::PagedAdamw8bit => OptimizerMemory::PagedAdamW,
            other => other.stored(),
        }
    }
}

impl TrainingArguments {
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
        // Before sharding, so that all processes form the same groups.
        let groups = match self.optim {
            OptimizerName::Muon => rule.groups_with_muon(parameters, self.weight_decay),
            _ => rule.groups(parameters, self.weight_decay),
        };
        let build = |own| self.optimizer_of(own);
        if self.shards_optimizer() {
            return Ok(Box::new(ZeroRedundancyOptimizer::new(
                group, groups, build,
            )?));
        }
        Ok(build(groups)?)
    }

    /// Returns `true` if each process keeps the optimizer states of its own parameters only (`zero_stage`).
    pub(super) fn shards_optimizer(&self) -> bool {
        self.zero_stage > 0
    }

    /// Returns the optimizer that `optim` names, over these groups.
    fn optimizer_of(&self, groups: Vec<ParamGroup>) -> overdrive_optim::Result<Box<dyn Optimizer>> {
        let (learning_rate, weight_decay) = (self.learning_rate, self.weight_decay);
        let (betas, eps) = ((self.adam_beta1, self.adam_beta2), self.adam_epsilon);
        // Their states stay in 32 bits, as transformers does through bitsandbytes' `GlobalOptimManager`.
        let embeddings = || EMBEDDING_NAMES.map(String::from).to_vec();
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
            OptimizerName::Sgd => {
                let config = SgdConfig {
                    learning_rate,
                    weight_decay,
                    ..SgdConfig::default()
                };
                Box::new(Sgd::new(groups, config)?)
            }
            OptimizerName::Muon => Box::new(self.muon(groups, adamw)?),
        })
    }

    /// Returns Muon over its own group, and AdamW over the others.
    fn muon(
        &self,
        groups: Vec<ParamGroup>,
        adamw: AdamWConfig,
    ) -> overdrive_optim::Result<CombinedOptimizer> {
        let (matrices, others): (Vec<_>, Vec<_>) =
            groups.into_iter().partition(|group| group.name == MUON);
        let muon = MuonConfig {
            learning_rate: self.learning_rate,
            weight_decay: self.weight_decay,
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
            let adamw = AdamW::new(others, adamw)?;
            optimizers.push(("adamw".to_owned(), Box::new(adamw)));
        }
        CombinedOptimizer::new(optimizers)
    }
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
        let groups = DecayRule::default().groups_with_muon(parameters(), 0.1);
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
