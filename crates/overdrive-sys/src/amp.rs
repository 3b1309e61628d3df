//! The two kernels of dynamic loss scaling (Micikevicius et al. 2018, <https://arxiv.org/abs/1710.03740>).

use overdrive_core::check_at_least;
use tch::Tensor;

use crate::error::Result;
use crate::op::{Value, call};

/// Multiplies every gradient by `inv_scale` in place, and sets `found_inf` to 1 if any of them contains an
/// infinity or a NaN; otherwise `found_inf` keeps its value. Does not synchronize with the host.
///
/// The gradients must be dense and on one device; their dtypes may differ. `found_inf` and `inv_scale` are
/// float32 tensors of one element on that device.
///
/// # Errors
/// The errors of `aten::_amp_foreach_non_finite_check_and_unscale_`.
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

/// The factors and the interval of [`update_scale`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScaleUpdate {
    /// The factor applied after `growth_interval` consecutive steps with finite gradients.
    pub growth_factor: f64,
    /// The factor applied after a step with an infinite or NaN gradient.
    pub backoff_factor: f64,
    /// The number of consecutive finite steps until the scale grows; at least 1.
    pub growth_interval: i64,
}

/// Updates `scale` (float32) and `growth_tracker` (int32), tensors of one element, in place.
///
/// # Errors
/// [`crate::Error::Common`] for a growth interval below 1, and the errors of `aten::_amp_update_scale_`.
pub fn update_scale(
    scale: &Tensor,
    growth_tracker: &Tensor,
    found_inf: &Tensor,
    update: ScaleUpdate,
) -> Result<()> {
    // The kernel compares the tracker with the interval for equality: with 0 the scale would never grow.
    check_at_least("growth_interval", update.growth_interval, 1)?;
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
