//! Visitors of a model with this crate's errors.

use overdrive_nn::{AdapterHost, Linear};
use tch::Tensor;

use crate::Result;
use crate::copies::ModuleCopies;

/// Calls `visit` with each linear layer and its name. Errors of `visit` are returned unchanged.
pub(crate) fn visit_linears<H: AdapterHost + ?Sized>(
    host: &mut H,
    mut visit: impl FnMut(&str, &mut Linear) -> Result<()>,
) -> Result<()> {
    Ok(host.visit_linears(&mut |name, linear| Ok(visit(name, linear)?))?)
}

/// Calls `visit` with each parameter outside the linear layers.
pub(crate) fn visit_parameters<H: AdapterHost + ?Sized>(
    host: &mut H,
    mut visit: impl FnMut(&str, &mut Tensor) -> Result<()>,
) -> Result<()> {
    Ok(host.visit_parameters(&mut |name, tensor| Ok(visit(name, tensor)?))?)
}

/// Returns `true` if `bias: "all"` trains the parameter `name` of no linear layer. As in PEFT, the word can be anywhere
/// in the name: T5 has `relative_attention_bias.weight`.
pub(crate) fn is_bias(name: &str) -> bool {
    name.contains("bias")
}

/// Returns the full copies of the model's parameters, or `None` if it keeps no state for adapters.
pub(crate) fn module_copies<H: AdapterHost + ?Sized>(host: &mut H) -> Option<&mut ModuleCopies> {
    Some(host.adapter_state()?.get_or_default())
}
