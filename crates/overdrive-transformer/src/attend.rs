//! Softmax attention with each of the implementations.

use overdrive_attention::{
    AttentionOptions, Backend, PackedLengths, Window, attention, attention_varlen,
};
use overdrive_kv_cache::{KvCache, attend_to_view};
use tch::Tensor;

use crate::mask::{Mask, band};
use crate::{AttentionImplementation, Result};

/// The options of a layer's attention.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttendOptions<'a> {
    pub(crate) implementation: AttentionImplementation,
    pub(crate) dropout: f64,
    /// The factor of the scores; `None` is 1/sqrt(D).
    pub(crate) scale: Option<f64>,
    /// The bound of the scores.
    pub(crate) softcap: Option<f64>,
    /// A logit (H) for each head that takes part in the softmax without a value (gpt-oss).
    pub(crate) sinks: Option<&'a Tensor>,
}

impl AttendOptions<'_> {
    /// Returns the options of attention without a bound and sinks.
    pub(crate) fn plain(implementation: AttentionImplementation, dropout: f64) -> Self {
        AttendOptions {
            implementation,
            dropout,
            scale: None,
            softcap: None,
            sinks: None,
        }
    }
}

/// The cache of a forward pass and the layer that uses it.
pub(crate) type CachedLayer<'a, 'c> = (usize, &'a mut (dyn KvCache + 'c));

/// Computes attention of new tokens over themselves and over the tokens of the cache, if there is one. Queries, keys
/// and values are `(B, H, T, D)`; the result is `(B, T, H·D)`.
pub(crate) fn attend_with_cache(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    mask: &Mask,
    options: &AttendOptions<'_>,
    cache: Option<CachedLayer<'_, '_>>,
) -> Result<Tensor> {
    let Some((layer, cache)) = cache else {
        return attend(query, key, value, mask, options);
    };
    let backend = match options.implementation {
        AttentionImplementation::Flash if options.dropout == 0.0 => Backend::Auto,
        AttentionImplementation::Eager if options.dropout == 0.0 => Backend::Math,
        // A cache's own attention supports neither dropout nor libtorch's kernel selection.
        _ => {
            let held = cache.append(layer, key, value)?;
            if held.window.is_some() {
                // The cache has dropped tokens, so positions differ from indices: only the view knows them.
                let mixed =
                    attend_to_view(query, &held, &cached_options(mask, options, Backend::Auto))?;
                return Ok(mixed.f_transpose(1, 2)?.f_flatten(2, 3)?);
            }
            return attend(query, &held.keys, &held.values, mask, options);
        }
    };
    let options = cached_options(mask, options, backend);
    let mixed = cache.attend(layer, query, key, value, &options)?;
    Ok(mixed.f_transpose(1, 2)?.f_flatten(2, 3)?)
}

/// Returns the options of a cache's attention on rows; `None` if attention needs tensors.
pub(crate) fn rows_options<'m>(
    mask: &'m Mask,
    options: &AttendOptions<'m>,
) -> Option<overdrive_kv_cache::AttendOptions<'m>> {
    let flash = options.implementation == AttentionImplementation::Flash && options.dropout == 0.0;
    let causal = matches!(mask, Mask::Causal { .. });
    (flash && causal).then(|| cached_options(mask, options, Backend::Auto))
}

/// Returns the options of attention over what a cache holds, with libtorch's operators or the kernels as chosen.
pub(crate) fn view_options<'m>(
    mask: &'m Mask,
    options: &AttendOptions<'m>,
) -> overdrive_kv_cache::AttendOptions<'m> {
    let backend = match options.implementation {
        AttentionImplementation::Eager => Backend::Math,
        _ => Backend::Auto,
    };
    cached_options(mask, options, backend)
}

/// Computes attention of `query (B, H, T, D)` over keys and values `(B, H_kv, S, D)`, as `(B, T, H·D)`.
///
/// Kernels write their output as `(B, T, H, D)`, so joining the heads copies nothing.
pub(crate) fn attend(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    mask: &Mask,
    options: &AttendOptions<'_>,
) -> Result<Tensor> {
    let mixed = match options.implementation {
        // libtorch's operator has neither a softcap nor sinks.
        AttentionImplementation::Sdpa if options.softcap.is_none() && options.sinks.is_none() => {
            sdpa(query, key, value, mask, options)?
        }
        AttentionImplementation::Eager => {
            with_backend(Backend::Math, query, key, value, mask, options)?
        }
        AttentionImplementation::Flash | AttentionImplementation::Sdpa => {
            with_backend(Backend::Auto, query, key, value, mask, options)?
        }
    };
    Ok(mixed.f_transpose(1, 2)?.f_flatten(2, 3)?)
}

/// Converts the options to those of a cache.
fn cached_options<'m>(
    mask: &'m Mask,
    options: &AttendOptions<'m>,
    backend: Backend,
) -> overdrive_kv_cache::AttendOptions<'m> {
    let (window, mask) = match mask {
        Mask::Causal { window } => (*window, None),
        // An encoder has no cache, and a decoder's cache is of its own tokens.
        Mask::BothWays { .. } => (None, None),
        // The marks include the window.
        Mask::Marked(marked) => (None, Some(marked)),
        // `ForwardInput::shape` refuses sequences together with a cache.
        Mask::Packed { window, .. } => (*window, None),
    };
    overdrive_kv_cache::AttendOptions {
        window,
        mask,
        scale: options.scale,
        softcap: options.softcap,
        sinks: options.sinks,
        keep: false,
        backend,
    }
}

fn with_backend(
    backend: Backend,
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    mask: &Mask,
    options: &AttendOptions<'_>,
) -> Result<Tensor> {
    let options = AttentionOptions {
        scale: options.scale,
        softcap: options.softcap,
        sinks: options.sinks,
        dropout_p: options.dropout,
        backend,
        ..AttentionOptions::default()
    };
    let options = match mask {
        Mask::Causal { window } => AttentionOptions {
            causal: true,
            window: sliding(*window),
            ..options
        },
        Mask::Packed { sequences, window } => {
            let options = AttentionOptions {
                causal: true,
                window: sliding(*window),
                ..options
            };
            return packed(query, key, value, sequences, &options);
        }
        Mask::BothWays { sequences, window } => {
            let window = window.and_then(|window| usize::try_from(window).ok());
            let options = AttentionOptions {
                window: Window {
                    left: window,
                    right: window,
                },
                ..options
            };
            match sequences {
                Some(sequences) => return packed(query, key, value, sequences, &options),
                None => options,
            }
        }
        Mask::Marked(marked) => AttentionOptions {
            mask: Some(marked),
            ..options
        },
    };
    Ok(attention(query, key, value, &options)?)
}

fn sliding(window: Option<i64>) -> Window {
    window.map_or_else(Window::default, |size| {
        // The configuration allows only positive windows, so the conversion does not fail.
        Window::sliding(usize::try_from(size).unwrap_or(0))
    })
}

/// Computes attention inside each sequence of a packed row.
fn packed(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    sequences: &PackedLengths,
    options: &AttentionOptions<'_>,
) -> Result<Tensor> {
    // The kernel for packed sequences takes (T, H, D); these are views.
    let rows = |heads: &Tensor| heads.f_squeeze_dim(0)?.f_transpose(0, 1);
    let mixed = attention_varlen(
        &rows(query)?,
        &rows(key)?,
        &rows(value)?,
        sequences,
        options,
    )?;
    Ok(mixed.f_transpose(0, 1)?.f_unsqueeze(0)?)
}

/// Calls libtorch's `scaled_dot_product_attention`, which picks the flash kernel if the mask is none or causal.
fn sdpa(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    mask: &Mask,
    options: &AttendOptions<'_>,
) -> Result<Tensor> {
    let (tokens, keys) = (query.size()[2], key.size()[2]);
    // Only with `enable_gqa` does libtorch take fewer key heads than query heads.
    let grouped = query.size()[1] != key.size()[1];
    let run = |key: &Tensor, value: &Tensor, marked: Option<&Tensor>, causal| {
        let (dropout, scale) = (options.dropout, options.scale);
        Tensor::f_scaled_dot_product_attention(
            query, key, value, marked, dropout, causal, scale, grouped,
        )
    };
    // A window of one query is a slice of the keys, which needs no mask.
    let last = |tensor: &Tensor, n: i64| tensor.f_narrow(2, keys - n, n);
    Ok(match mask {
        Mask::Marked(marked) => run(key, value, Some(marked), false)?,
        Mask::BothWays {
            sequences: None,
            window: None,
        } => run(key, value, None, false)?,
        // libtorch's operator has neither packed sequences nor windows.
        Mask::Packed { .. } | Mask::BothWays { .. } => {
            with_backend(Backend::Auto, query, key, value, mask, options)?
        }
        // One query sees all keys, or the last ones.
        Mask::Causal { window: None } if tokens == 1 => run(key, value, None, false)?,
        Mask::Causal { window: Some(n) } if tokens == 1 => {
            run(&last(key, *n)?, &last(value, *n)?, None, false)?
        }
        // `is_causal` aligns the first query with the first key, which is right only for square scores.
        Mask::Causal { window: None } if tokens == keys => run(key, value, None, true)?,
        Mask::Causal { window } => {
            let marked = band(tokens, keys, *window, query.device())?;
            run(key, value, Some(&marked), false)?
        }
    })
}
