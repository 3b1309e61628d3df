use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::input::{ForwardInput, Shape};

/// Which keys each query may attend to.
#[derive(Debug)]
pub(crate) enum Mask {
    /// All of them: one new token, nothing masked.
    Everything,
    /// Those up to its own place, where queries and keys are the same tokens.
    Causal,
    /// The last `n` keys: one new token under a sliding window.
    LastKeys(i64),
    /// Those marked true: `(T, S)` or `(B, 1, T, S)`.
    Marked(Tensor),
}

impl Mask {
    /// The causal mask of a forward pass, banded where `window` is given: a token sees itself and
    /// the `window - 1` tokens before it.
    pub(crate) fn causal(
        input: &ForwardInput<'_>,
        shape: Shape,
        window: Option<i64>,
    ) -> Result<Mask> {
        let Shape { tokens, past, .. } = shape;
        let keys = past + tokens;
        let window = window.filter(|&window| window < keys);
        if input.attention_mask.is_none() {
            match window {
                None if tokens == 1 => return Ok(Mask::Everything),
                None if past == 0 => return Ok(Mask::Causal),
                Some(window) if tokens == 1 => return Ok(Mask::LastKeys(window)),
                _ => {}
            }
        }
        let device = input.input_ids.device();
        let mut allowed = band(tokens, past, window, device)?;
        if let Some(padding) = input.attention_mask {
            let real = padding.f_to_device(device)?.f_ne(0)?;
            allowed = allowed.f_logical_and(&real.f_unsqueeze(1)?.f_unsqueeze(1)?)?;
        }
        Ok(Mask::Marked(allowed))
    }
}

/// `(T, S)`: true where key `j` is at or before query `i`, and inside the window.
fn band(tokens: i64, past: i64, window: Option<i64>, device: Device) -> Result<Tensor> {
    let allowed = Tensor::f_ones([tokens, past + tokens], (Kind::Bool, device))?.f_tril(past)?;
    match window {
        None => Ok(allowed),
        Some(window) => Ok(allowed.f_triu(past - window + 1)?),
    }
}
