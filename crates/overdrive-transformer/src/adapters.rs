use overdrive_lora::{AdaptedLinear, AdapterHost};

use crate::CausalLm;
use crate::causal_lm::Backbone;

/// Every linear map of the blocks, with the name of its module in transformers, and `lm_head` last.
impl AdapterHost for CausalLm {
    fn visit_linears(
        &mut self,
        visit: &mut dyn FnMut(&str, &mut AdaptedLinear) -> overdrive_lora::Result<()>,
    ) -> overdrive_lora::Result<()> {
        match &mut self.backbone {
            Backbone::Llama(model) => model.visit(visit)?,
            Backbone::Gpt2(model) => model.visit(visit)?,
        }
        self.head.visit(visit)
    }
}
