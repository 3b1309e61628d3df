//! The masks of the three attentions.

use tch::{Kind, Tensor};

use crate::Result;
use crate::mask::{Mask, band};

/// Returns the mask of an encoder's attention, or of a decoder's over the encoder's states, from the marks
/// `padding (B, S)`, 1 for a token, and T5's numbers `bias (1, H, T, S)`.
pub(super) fn bidirectional(bias: Option<Tensor>, padding: Option<&Tensor>) -> Result<Mask> {
    let Some(padding) = padding else {
        return Ok(bias.map_or(Mask::ALL, Mask::Marked));
    };
    let real = padding.f_ne(0)?.f_unsqueeze(1)?.f_unsqueeze(1)?;
    with_bias(bias, real)
}

/// Returns the mask of a decoder's attention over its own tokens, of which the last `tokens` are new; `padding (B,
/// past + T)` marks them all.
pub(super) fn causal(
    bias: Option<Tensor>,
    padding: Option<&Tensor>,
    tokens: i64,
    past: i64,
) -> Result<Mask> {
    if padding.is_none() {
        match bias {
            None => return Ok(Mask::Causal { window: None }),
            // One query sees all keys.
            Some(bias) if tokens == 1 => return Ok(Mask::Marked(bias)),
            Some(_) => {}
        }
    }
    let device = match (&bias, padding) {
        (Some(tensor), _) | (None, Some(tensor)) => tensor.device(),
        (None, None) => tch::Device::Cpu,
    };
    let allowed = band(tokens, past + tokens, None, device)?;
    let allowed = match padding {
        None => allowed,
        Some(padding) => {
            let real = padding.f_ne(0)?.f_unsqueeze(1)?.f_unsqueeze(1)?;
            allowed.f_logical_and(&real)?
        }
    };
    with_bias(bias, allowed)
}

fn with_bias(bias: Option<Tensor>, allowed: Tensor) -> Result<Mask> {
    let Some(bias) = bias else {
        return Ok(Mask::Marked(allowed));
    };
    // The lowest number and not -∞, as in transformers, so that the softmax of a row of only padding is defined.
    let lowest = match bias.kind() {
        Kind::Half => -65504.0,
        Kind::BFloat16 => -3.3895313892515355e38,
        _ => f64::from(f32::MIN),
    };
    let hidden = allowed.f_logical_not()?;
    Ok(Mask::Marked(bias.f_masked_fill(&hidden, lowest)?))
}
