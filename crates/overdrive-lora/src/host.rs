use tch::Tensor;

use crate::{AdaptedLinear, ModuleCopies, Result};

/// A model whose linear maps can take adapters.
///
/// Names are those of the checkpoint, as `model.layers.0.self_attn.q_proj`: patterns are matched against
/// them, and files are written with them. Only [`visit_linears`](AdapterHost::visit_linears) must be
/// given; the other methods open more of the model.
pub trait AdapterHost {
    /// Calls `visit` with each linear map and its full name (as in the checkpoint, without `.weight`),
    /// in the order of the model, until it fails.
    ///
    /// # Errors
    /// The first error of `visit`, or why the maps cannot be changed now.
    fn visit_linears(
        &mut self,
        visit: &mut dyn FnMut(&str, &mut AdaptedLinear) -> Result<()>,
    ) -> Result<()>;

    /// Calls `visit` with each parameter that is not of a linear map (embeddings, norms) and its full
    /// name, `model.embed_tokens.weight`. `visit` may put another tensor of the same shape in its place,
    /// which the model computes with from then on: `modules_to_save` does.
    ///
    /// The default visits none: `modules_to_save` is then for linear maps only, and counts are of them.
    ///
    /// # Errors
    /// As [`visit_linears`](AdapterHost::visit_linears).
    fn visit_parameters(
        &mut self,
        visit: &mut dyn FnMut(&str, &mut Tensor) -> Result<()>,
    ) -> Result<()> {
        let _ = visit;
        Ok(())
    }

    /// Where full copies of those parameters are kept. The default has no place for them.
    fn module_copies(&mut self) -> Option<&mut ModuleCopies> {
        None
    }

    /// The name of the map that makes the outputs, which `all-linear` leaves out. The default is
    /// `lm_head`.
    fn head(&self) -> Option<&str> {
        Some("lm_head")
    }
}
