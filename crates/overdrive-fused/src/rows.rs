//! The operators of a decoder on f32 slices.
//!
//! A decoding step of a small model spends most of its time on overhead: checks, dispatch, and a new tensor for each
//! result. A model that reuses its buffers calls these functions instead. They run the same kernels as the functions on
//! tensors, and record nothing for autograd.

use overdrive_core::Error as Common;
use overdrive_kernels::tensors::{self, has_kernel};
use tch::Tensor;

use crate::kernel::activation::{Gated, gated};
use crate::kernel::few_rows::{Layer, few_rows};
use crate::kernel::rms_norm::forward;
use crate::{Activation, Result};

pub use crate::rotary::RowAngles;

/// Borrows the elements of a contiguous f32 tensor on the CPU.
///
/// # Errors
/// [`Error::Sys`](crate::Error::Sys) for any other tensor.
pub fn elements(tensor: &Tensor) -> Result<&[f32]> {
    Ok(tensors::elements(tensor)?)
}

/// Normalizes rows as wide as `weight`, as [`rms_norm`](crate::rms_norm) does.
///
/// # Errors
/// [`Error::Common`](crate::Error::Common) for slices of the wrong length, [`Error::Sys`](crate::Error::Sys) for a
/// weight that is not a contiguous f32 tensor on the CPU.
pub fn rms_norm(x: &[f32], weight: &Tensor, eps: f64, y: &mut [f32]) -> Result<()> {
    let weight = elements(weight)?;
    check_len("y", y, x.len() as i64)?;
    with_inverse(x, weight, |inverse| {
        forward(x, None, weight, eps as f32, y, inverse);
    })
}

/// Normalizes rows of `x + residual`, which is written to `sum`, as [`add_rms_norm`](crate::add_rms_norm) does.
///
/// # Errors
/// As [`rms_norm`].
pub fn add_rms_norm(
    x: &[f32],
    residual: &[f32],
    weight: &Tensor,
    eps: f64,
    sum: &mut [f32],
    y: &mut [f32],
) -> Result<()> {
    let weight = elements(weight)?;
    check_len("residual", residual, x.len() as i64)?;
    check_len("sum", sum, x.len() as i64)?;
    check_len("y", y, x.len() as i64)?;
    with_inverse(x, weight, |inverse| {
        forward(x, Some((residual, sum)), weight, eps as f32, y, inverse);
    })
}

/// Computes `activation(gate) · up` for rows of `width` gates and `width` gated values, as [`glu`](crate::glu) does.
///
/// # Errors
/// [`Error::Common`](crate::Error::Common) for slices that do not fit.
pub fn glu(gate_up: &[f32], width: usize, activation: Activation, y: &mut [f32]) -> Result<()> {
    if width == 0 || !y.len().is_multiple_of(width) {
        return Err(Common::shape("y", [y.len() as i64], format!("rows of {width}")).into());
    }
    check_len("gate_up", gate_up, 2 * y.len() as i64)?;
    gated(activation, Gated::Joint(gate_up, width), y);
    Ok(())
}

/// Computes linear layers of the same rows side by side, as [`joint_linear`](crate::joint_linear) does; a layer is its
/// weight and bias. Returns `false` and leaves `y` unchanged unless all are contiguous f32 tensors on the CPU.
///
/// # Errors
/// [`Error::Common`](crate::Error::Common) for slices that do not fit.
pub fn joint_linear(
    x: &[f32],
    layers: &[(&Tensor, Option<&Tensor>)],
    y: &mut [f32],
) -> Result<bool> {
    let plain = |tensor: &Tensor| {
        has_kernel(tensor) && tensor.kind() == tch::Kind::Float && tensor.is_contiguous()
    };
    if !layers
        .iter()
        .all(|(weight, bias)| plain(weight) && bias.is_none_or(plain))
    {
        return Ok(false);
    }
    let Some(&[_, width]) = layers.first().map(|(weight, _)| weight.size()).as_deref() else {
        return Ok(false);
    };
    let width = usize::try_from(width).unwrap_or(0);
    if width == 0 {
        let expected = "(O, I) with at least one input".to_owned();
        return Err(Common::shape("weight", layers[0].0.size(), expected).into());
    }
    let mut outputs = 0;
    let mut each = Vec::with_capacity(layers.len());
    for (weight, bias) in layers {
        let layer = Layer {
            weight: elements(weight)?,
            bias: bias.map(elements).transpose()?,
        };
        let count = layer.weight.len().checked_div(width).unwrap_or(0);
        if count * width != layer.weight.len() || layer.bias.is_some_and(|bias| bias.len() != count)
        {
            let expected = format!("(O, {width}), with a bias of O elements");
            return Err(Common::shape("weight", weight.size(), expected).into());
        }
        outputs += count;
        each.push(layer);
    }
    let rows = x.len().checked_div(width).unwrap_or(0);
    check_len("x", x, (rows * width) as i64)?;
    check_len("y", y, (rows * outputs) as i64)?;
    few_rows(x, width, &each, y);
    Ok(true)
}

/// Calls `run` with memory for one value for each row.
fn with_inverse(x: &[f32], weight: &[f32], run: impl FnOnce(&mut [f32])) -> Result<()> {
    let rows = x.len().checked_div(weight.len()).unwrap_or(0);
    check_len("x", x, (rows * weight.len()) as i64)?;
    let mut few = [0.0; 64];
    match few.get_mut(..rows) {
        Some(inverse) => run(inverse),
        None => run(&mut vec![0.0; rows]),
    }
    Ok(())
}

/// Checks the length of a slice.
pub(crate) fn check_len(name: &'static str, slice: &[f32], expected: i64) -> Result<()> {
    if slice.len() as i64 == expected {
        return Ok(());
    }
    Err(Common::shape(name, [slice.len() as i64], format!("({expected},)")).into())
}
