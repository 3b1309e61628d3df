//! Attention of every token to every other one of its sequence.

use overdrive_attention::{
    AttentionOptions, Backend, PackedLengths, Window, attention, attention_varlen,
};
use tch::Tensor;

use crate::{AttentionImplementation, Result};

/// Computes attention of `query (B, H, T, D)` over keys and values of the same shape, as `(B, T, H·D)`; inside each
/// of `sequences` if there are, in one row. A token sees `window` others on each side, or all.
pub(crate) fn attend(
    [query, key, value]: [&Tensor; 3],
    sequences: Option<&PackedLengths>,
    window: Option<usize>,
    implementation: AttentionImplementation,
    dropout_p: f64,
) -> Result<Tensor> {
    let longest = sequences.map_or(query.size()[2], PackedLengths::longest_queries);
    // A window that reaches the farthest token changes nothing, and kernels without one are faster.
    let window = window.filter(|&window| (window as i64) < longest - 1);
    let options = AttentionOptions {
        window: Window {
            left: window,
            right: window,
        },
        dropout_p,
        backend: match implementation {
            AttentionImplementation::Eager => Backend::Math,
            AttentionImplementation::Flash | AttentionImplementation::Sdpa => Backend::Auto,
        },
        ..AttentionOptions::default()
    };
    let mixed = match sequences {
        Some(sequences) => {
            // The kernel for packed sequences takes (T, H, D); these are views.
            let rows = |heads: &Tensor| heads.f_squeeze_dim(0)?.f_transpose(0, 1);
            let [query, key, value] = [rows(query)?, rows(key)?, rows(value)?];
            attention_varlen(&query, &key, &value, sequences, &options)?.f_unsqueeze(0)?
        }
        None if implementation == AttentionImplementation::Sdpa && window.is_none() => {
            let none = None::<&Tensor>;
            Tensor::f_scaled_dot_product_attention(
                query, key, value, none, dropout_p, false, None, false,
            )?
            .f_transpose(1, 2)?
        }
        None => attention(query, key, value, &options)?.f_transpose(1, 2)?,
    };
    Ok(mixed.f_flatten(2, 3)?)
}
