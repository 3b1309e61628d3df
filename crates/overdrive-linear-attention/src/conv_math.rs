//! The short causal convolution in libtorch's operators.

use tch::{Kind, Tensor};

use crate::{ConvActivation, Result};

/// Returns the output (B, T, C) in the dtype of `x`, and the last K - 1 inputs (B, C, K - 1).
pub(crate) fn convolve(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    state: &Tensor,
    activation: ConvActivation,
) -> Result<(Tensor, Tensor)> {
    let (channels, width) = weight.size2()?;
    let kind = match (x.kind(), weight.kind()) {
        (Kind::Double, _) | (_, Kind::Double) => Kind::Double,
        // One rounding at the end, as in the kernel.
        _ => Kind::Float,
    };
    let inputs = Tensor::f_cat(&[state, &x.f_transpose(1, 2)?], -1)?;
    let new_state = inputs.f_narrow(-1, inputs.size()[2] - (width - 1), width - 1)?;
    let bias = bias.map(|bias| bias.f_to_kind(kind)).transpose()?;
    let y = inputs.f_to_kind(kind)?.f_conv1d(
        &weight.f_to_kind(kind)?.f_unsqueeze(1)?,
        bias.as_ref(),
        [1],
        [0],
        [1],
        channels,
    )?;
    let y = match activation {
        ConvActivation::Identity => y,
        ConvActivation::Silu => y.f_silu()?,
    };
    // A copy, so that a state of K - 1 numbers a channel does not keep all inputs alive.
    let new_state = new_state.f_contiguous()?;
    Ok((y.f_transpose(1, 2)?.f_to_kind(x.kind())?, new_state))
}
