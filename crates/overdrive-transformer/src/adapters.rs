use overdrive_lora::{AdaptedLinear, AdapterHost, ModuleCopies, Result};
use tch::Tensor;

use crate::CausalLm;
use crate::causal_lm::Backbone;

/// Every linear map of the blocks, with the name of its module in transformers, and `lm_head` last.
impl AdapterHost for CausalLm {
    fn visit_linears(
        &mut self,
        visit: &mut dyn FnMut(&str, &mut AdaptedLinear) -> Result<()>,
    ) -> Result<()> {
        match &mut self.backbone {
            Backbone::Llama(model) => model.visit(visit)?,
            Backbone::Gpt2(model) => model.visit(visit)?,
        }
        self.head.visit(visit)
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

    fn module_copies(&mut self) -> Option<&mut ModuleCopies> {
        Some(&mut self.copies)
    }
}
