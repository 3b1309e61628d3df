use overdrive_attention::{AttentionOptions, Backend, Window, attention};
use tch::Tensor;

use crate::{KvView, Result};

/// How new queries attend to what a cache holds. Every query sees the tokens up to its own.
#[derive(Debug, Clone, Copy, Default)]
pub struct AttendOptions<'a> {
    /// Tokens that a query sees, its own included; default `None`: all.
    pub window: Option<i64>,
    /// What each query sees, bool, broadcastable to `(B, 1, T, S)` over *all* `S` tokens that the cache
    /// has been given, where padding makes it more than causal; it takes the place of causality and of
    /// `window`. Default: none.
    pub mask: Option<&'a Tensor>,
    /// Factor on the products of queries and keys; default `1/sqrt(D)`.
    pub scale: Option<f64>,
    /// Bound of the scores (Gemma 2); default none.
    pub softcap: Option<f64>,
    /// Which kernel; default automatic.
    pub backend: Backend,
}

/// Attention of `query (B, H, T, D)`, the last `T` tokens of `view`, over `view`: `(B, H, T, D_v)`.
///
/// What [`KvCache::attend`](crate::KvCache::attend) does by default after appending; for caches whose
/// view is all that a layer needs.
///
/// # Errors
/// As [`overdrive_attention::attention`].
pub fn attend_to_view(
    query: &Tensor,
    view: &KvView,
    options: &AttendOptions<'_>,
) -> Result<Tensor> {
    let mask = options.mask.map(|mask| view.columns_of(mask)).transpose()?;
    let window = match (options.window, view.window) {
        (Some(model), Some(cache)) => Some(model.min(cache)),
        (one, other) => one.or(other),
    };
    let (causal, window, sink_tokens) = match (&mask, window) {
        (Some(_), _) => (false, Window::default(), 0),
        (None, None) => (true, Window::default(), 0),
        (None, Some(window)) => {
            let window = Window::sliding(usize::try_from(window).unwrap_or(0));
            (true, window, usize::try_from(view.sinks).unwrap_or(0))
        }
    };
    let options = AttentionOptions {
        causal,
        window,
        sink_tokens,
        mask: mask.as_ref(),
        scale: options.scale,
        softcap: options.softcap,
        backend: options.backend,
        ..AttentionOptions::default()
    };
    Ok(attention(query, &view.keys, &view.values, &options)?)
}
