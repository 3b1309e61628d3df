//! The two kernels of dynamic loss scaling (Micikevicius et al. 2018, <https://arxiv.org/abs/1710.03740>).

use tch::Tensor;

use crate::error::{Error, Result};
use crate::op::{Value, call};

/// Multiplies every gradient by `inv_scale` in place, and sets `found_inf` to 1 if any of them holds
/// an infinity or a NaN (else it is left as it is). No host synchronisation.
///
/// The gradients must be on one device, dense, and may differ in dtype; `found_inf` and `inv_scale`
/// are float32 tensors of one element there.
///
/// # Errors
/// What `aten::_amp_foreach_non_finite_check_and_unscale_` refuses.
pub fn non_finite_check_and_unscale(
    grads: &[Tensor],
    found_inf: &Tensor,
    inv_scale: &Tensor,
) -> Result<()> {
    if grads.is_empty() {
        return Ok(());
    }
    let args = [
        Value::Tensors(grads),
        Value::Tensor(found_inf),
        Value::Tensor(inv_scale),
    ];
    call(
        "aten::_amp_foreach_non_finite_check_and_unscale_",
        "",
        &args,
    )?;
    Ok(())
}

/// How [`update_scale`] moves the scale.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScaleUpdate {
    /// Factor after `growth_interval` steps without an infinity.
    pub growth_factor: f64,
    /// Factor after a step with one.
    pub backoff_factor: f64,
    /// Steps without an infinity until the scale grows.
    pub growth_interval: i64,
}

/// Updates `scale` (float32) and `growth_tracker` (int32), tensors of one element, in place.
///
/// # Errors
/// What `aten::_amp_update_scale_` refuses.
pub fn update_scale(
    scale: &Tensor,
    growth_tracker: &Tensor,
    found_inf: &Tensor,
    update: ScaleUpdate,
) -> Result<()> {
    if update.growth_interval < 1 {
        return Err(Error::BadArgument {
            operation: "updating the loss scale".to_owned(),
            message: format!(
                "a growth interval of {}; it must be at least 1",
                update.growth_interval
            ),
        });
    }
    let args = [
        Value::Tensor(scale),
        Value::Tensor(growth_tracker),
        Value::Tensor(found_inf),
        Value::Float(update.growth_factor),
        Value::Float(update.backoff_factor),
        Value::Int(update.growth_interval),
    ];
    call("aten::_amp_update_scale_", "", &args)?;
    Ok(())
}
