use overdrive_nn::{AdapterHost, AdapterState, Linear, Result, multimodal};
use tch::Tensor;

use crate::causal_lm::Backbone;
use crate::moe::is_unknown_to_peft;
use crate::projections::visit_linear;
use crate::{CausalLm, ModelConfig};

/// Visits every linear layer of the blocks under its transformers module name, and `lm_head` last.
impl AdapterHost for CausalLm {
    fn visit_linears(
        &mut self,
        visit: &mut dyn FnMut(&str, &mut Linear) -> Result<()>,
    ) -> Result<()> {
        match &mut self.backbone {
            Backbone::Llama(model) => model.visit(visit)?,
            Backbone::Gpt2(model) => model.visit(visit)?,
        }
        // Last, as in transformers' `named_modules`.
        visit_linear(&mut self.head, visit)
    }

    fn visit_parameters(
        &mut self,
        visit: &mut dyn FnMut(&str, &mut Tensor) -> Result<()>,
    ) -> Result<()> {
        match &mut self.backbone {
            Backbone::Llama(model) => model.visit_parameters(visit),
            Backbone::Gpt2(model) => model.visit_parameters(visit),
        }
    }

    fn adapter_state(&mut self) -> Option<&mut AdapterState> {
        Some(&mut self.adapter_state)
    }

    fn name_in_original(&self, name: &str) -> String {
        match self.is_text_of_multimodal {
            true => multimodal::original_name(name),
            false => name.to_owned(),
        }
    }

    fn is_unknown_to_peft(&self, name: &str) -> bool {
        match self.config() {
            ModelConfig::Llama(config) => is_unknown_to_peft(config.family, name),
            ModelConfig::Gpt2(_) => false,
        }
    }
}
