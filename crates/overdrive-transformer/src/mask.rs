use overdrive_attention::PackedLengths;
use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::input::{ForwardInput, Shape};

/// The keys that each query may attend to.
#[derive(Debug)]
pub(crate) enum Mask {
    /// The keys up to the query's own position, the last query being the last key's; with a window the query's
    /// own key and the `window - 1` before it.
    Causal { window: Option<i64> },
    /// The keys of the query's own sequence, those after the query too; with a window the query's own key and `window`
    /// keys on each side.
    BothWays {
        sequences: Option<PackedLengths>,
        window: Option<i64>,
    },
    /// The keys marked true, `(T, S)` or `(B, 1, T, S)`; or a number that is added to each score, `(B, H, T, S)`.
    Marked(Tensor),
    /// The keys of the query's own sequence up to its own position; the window as in `Causal`.
    Packed {
        sequences: PackedLengths,
        window: Option<i64>,
    },
}

impl Mask {
    /// Makes the causal mask of a forward pass, banded if `window` is given.
    pub(crate) fn causal(
        input: &ForwardInput<'_>,
        shape: Shape,
        window: Option<i64>,
    ) -> Result<Mask> {
        if let Some(sequences) = input.sequences {
            return Ok(Mask::Packed {
                sequences: sequences.clone(),
                // A window as long as the longest sequence changes nothing, and causal kernels are faster.
                window: window.filter(|&window| window < sequences.longest_queries()),
            });
        }
        let Shape { tokens, past, end } = shape;
        let keys = past + tokens;
        // A cache of several sequences does not report the length of the longest one as past tokens.
        let longest = if input.cache.is_some() {
            keys.max(end)
        } else {
            keys
        };
        // A window that reaches back to the first key changes nothing either.
        let window = window.filter(|&window| window < longest);
        let Some(padding) = input.attention_mask else {
            return Ok(Mask::Causal { window });
        };
        let device = input.input_ids.device();
        // Of any dtype: booleans, integers and floats all mark padding by 0.
        let real = padding.f_ne(0)?;
        let allowed = band(tokens, keys, window, device)?;
        let padded = real.f_unsqueeze(1)?.f_unsqueeze(1)?;
        Ok(Mask::Marked(allowed.f_logical_and(&padded)?))
    }

    /// The mask that allows every key: an encoder's attention without padding, and a decoder's attention over the
    /// encoder's states.
    pub(crate) const ALL: Mask = Mask::BothWays {
        sequences: None,
        window: None,
    };

    /// Makes the mask of rows of `tokens` without padding in which tokens attend to those after them, too: to all of their
    /// sequence, or to `window` tokens on each side.
    pub(crate) fn bidirectional(
        sequences: Option<&PackedLengths>,
        tokens: i64,
        window: Option<i64>,
    ) -> Mask {
        let longest = sequences.map_or(tokens, PackedLengths::longest_queries);
        // A window that reaches the farthest token changes nothing, and kernels without one are faster.
        let window = window.filter(|&window| window < longest - 1);
        Mask::BothWays {
            sequences: sequences.cloned(),
            window,
        }
    }
}

/// Makes a mask `(T, S)` that is true where key `j` is at or before query `i` and inside the window.
pub(crate) fn band(tokens: i64, keys: i64, window: Option<i64>, device: Device) -> Result<Tensor> {
    let past = keys - tokens;
    let allowed = Tensor::f_ones([tokens, keys], (Kind::Bool, device))?.f_tril(past)?;
    match window {
        None => Ok(allowed),
        Some(window) => Ok(allowed.f_triu(past - window + 1)?),
    }
}
