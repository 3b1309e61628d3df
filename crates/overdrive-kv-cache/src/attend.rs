use overdrive_attention::{AttentionOptions, Backend, Window, attention};
use tch::Tensor;

use crate::{KvView, Result};

/// Options for attention over the tokens of a cache. Every query sees the tokens up to its own.
#[derive(Debug, Clone, Copy, Default)]
pub struct AttendOptions<'a> {
    /// The number of tokens that a query sees, its own included. Default `None`: all.
    pub window: Option<i64>,
    /// A bool mask, broadcastable to `(B, 1, T, S)`, over *all* `S` tokens that were appended to the
    /// cache; `true` lets the query see the token. It replaces causality and `window`. Default `None`.
    pub mask: Option<&'a Tensor>,
    /// The factor on the scores `q·k`. Default `None`: `1/sqrt(D)`.
    pub scale: Option<f64>,
    /// The bound of the scores, `softcap · tanh(score / softcap)` (Gemma 2). Default `None`.
    pub softcap: Option<f64>,
    /// A logit (H) for each query head that takes part in the softmax without a value (gpt-oss); not to be confused with
    /// the first tokens that a sliding cache keeps. Default `None`.
    pub sinks: Option<&'a Tensor>,
    /// If `true`, other layers attend to the same tokens later in the step
    /// ([`KvCache::attend_shared`](crate::KvCache::attend_shared)). A cache that drops or quantizes the tokens of a
    /// step keeps them until the next step of this layer. Default `false`.
    pub keep: bool,
    /// The kernel. Default [`Backend::Auto`].
    pub backend: Backend,
}

impl<'a> AttendOptions<'a> {
    /// Returns the options of a causal kernel over all tokens, without the mask.
    pub(crate) fn causal(&self) -> AttentionOptions<'a> {
        let window = self.window.map_or_else(Window::default, |window| {
            Window::sliding(usize::try_from(window).unwrap_or(0))
        });
        AttentionOptions {
            window,
            scale: self.scale,
            softcap: self.softcap,
            sinks: self.sinks,
            backend: self.backend,
            ..AttentionOptions::causal()
        }
    }
}

/// Returns the attention `(B, H, T, D_v)` of `query (B, H, T, D)`, the last `T` tokens of `view`, over
/// `view`.
///
/// [`KvCache::attend`](crate::KvCache::attend) calls it after appending, unless the cache implements its
/// own attention.
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
    // The kernel does not combine a mask with causality or a window; `columns_of` has put the view's
    // window into the mask.
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
        sinks: options.sinks,
        backend: options.backend,
        ..AttentionOptions::default()
    };
    Ok(attention(query, &view.keys, &view.values, &options)?)
}
