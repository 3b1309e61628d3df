use super::names::is_of_expert;
use crate::config::ModelConfig;
use crate::{CausalLm, ParameterSpec};

impl CausalLm {
    /// Returns the number of parameter elements that are active for a token, which determines its arithmetic: all
    /// parameters except those of the experts that are not chosen.
    pub fn num_active_parameters(&self) -> i64 {
        let specs = self.config().parameters();
        let of_experts = |spec: &&ParameterSpec| is_of_expert(&spec.name);
        let in_experts: i64 = specs
            .iter()
            .filter(of_experts)
            .map(ParameterSpec::numel)
            .sum();
        let (chosen, all) = self.experts();
        // All experts are of one size. In 128 bits, since the product may exceed 64.
        let active = i128::from(in_experts) * i128::from(chosen) / i128::from(all);
        self.num_parameters() - in_experts + i64::try_from(active).unwrap_or(in_experts)
    }

    /// Returns the share of tokens that the parameter or adapter `name` computes, if the load is balanced: the number
    /// of chosen experts over that of all for a weight of an expert, else 1.
    pub fn active_share(&self, name: &str) -> f64 {
        let (chosen, all) = self.experts();
        match is_of_expert(name) {
            true => chosen as f64 / all as f64,
            false => 1.0,
        }
    }

    /// Returns the number of experts of a token, and of a layer.
    fn experts(&self) -> (i64, i64) {
        let experts = match self.config() {
            ModelConfig::Llama(config) => config.experts.as_ref(),
            ModelConfig::Gpt2(_) => None,
        };
        experts.map_or((1, 1), |experts| {
            (experts.num_experts_per_tok, experts.num_experts)
        })
    }
}
