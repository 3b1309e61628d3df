use std::fmt;

use tch::Tensor;

/// The order of the dimensions of queries, keys, values and outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Layout {
    /// (batch, heads, length, dim): PyTorch's `scaled_dot_product_attention`.
    #[default]
    Bhtd,
    /// (batch, length, heads, dim): flash-attn.
    Bthd,
}

/// The alignment of queries with keys if their numbers differ.
///
/// Query `i` of `T` is at the position of key `i + offset` of `S`. Causality, window and ALiBi are relative to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Alignment {
    /// The last query at the last key, `offset = S - T`, as in flash-attn since 2.1 and in a decoder with a
    /// cache.
    #[default]
    BottomRight,
    /// The first query at the first key, `offset = 0`, as for PyTorch's `is_causal`.
    TopLeft,
}

/// The window of keys that a query sees around its own position (flash-attn's `window_size`, with `None` for -1).
///
/// Query at key `p` sees keys `p - left ..= p + right`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Window {
    /// The number of keys before its own; `None`: all.
    pub left: Option<usize>,
    /// The number of keys after its own; `None`: all.
    pub right: Option<usize>,
}

impl Window {
    /// Returns the window of Mistral and similar models: the query's own key and the `size - 1` keys before it.
    ///
    /// Hugging Face's `sliding_window` counts the query's own key; flash-attn's `window_size` does not.
    pub fn sliding(size: usize) -> Window {
        Window {
            left: Some(size.saturating_sub(1)),
            right: Some(0),
        }
    }
}

/// The implementations to choose from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Backend {
    /// The fastest back end that supports the options; [`explain`](crate::explain) returns which and why.
    #[default]
    Auto,
    /// libtorch's flash attention, on a CPU or CUDA.
    Flash,
    /// libtorch's memory-efficient attention, on CUDA.
    Efficient,
    /// cuDNN's attention, on CUDA.
    CuDnn,
    /// Elementary operators with the whole score matrix, T · S elements for each head: on any device, with
    /// every option, differentiable any number of times.
    Math,
    /// The kernel of this crate: on a CPU, with every option, in O(T) memory.
    Blockwise,
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Backend::Auto => "automatic",
            Backend::Flash => "flash",
            Backend::Efficient => "efficient",
            Backend::CuDnn => "cuDNN",
            Backend::Math => "math",
            Backend::Blockwise => "blockwise",
        })
    }
}

/// The options of `softmax(query · keyᵀ · scale) · value`.
///
/// B: batch, H: query heads, T: queries, S: keys. The score of query `i` (at position
/// `p = i + offset`, see [`Alignment`]) and key `j` is
///
/// ```text
/// s = softcap · tanh(scale · q·k / softcap)  (or scale · q·k)
///   - slope · |p - j| + bias               (as given)
/// ```
///
/// and the key may be hidden by the mask, causality or the window.
#[derive(Debug, Clone, Copy, Default)]
pub struct AttentionOptions<'a> {
    /// If `true`, keys after the query's own are hidden. Default: `false`.
    pub causal: bool,
    /// The positions of queries if their number differs from that of the keys. Default: bottom right.
    pub alignment: Alignment,
    /// The window of keys that a query sees. Default: all.
    pub window: Window,
    /// The number of keys at the beginning that stay visible under a window (the attention sinks of StreamingLLM,
    /// Xiao et al. 2023, <https://arxiv.org/abs/2309.17453>). Default: 0.
    pub sink_tokens: usize,
    /// A mask, Bool (true: seen) or floating-point (added to the score), of up to four dimensions that
    /// broadcast to (B, H, T, S) in either layout. A floating-point one may require a gradient; the CPU kernel takes
    /// `f32::MIN` as negative infinity.
    pub mask: Option<&'a Tensor>,
    /// The factor of the scores. Default: `1/sqrt(D)`.
    pub scale: Option<f64>,
    /// The probability that a weight is dropped, in `0..1`; the others are scaled by `1/(1 - p)`. Default: 0.
    pub dropout_p: f64,
    /// The seed of the CPU kernel's dropout; drawn from libtorch's generator if `None`. The same seed
    /// drops the same weights for any number of threads. Other back ends refuse a seed.
    pub dropout_seed: Option<u64>,
    /// The bound of the scores (Gemma 2: 50). Default: none.
    pub softcap: Option<f64>,
    /// The slopes of ALiBi, (H) or (B, H), without a gradient (Press et al. 2021,
    /// <https://arxiv.org/abs/2108.12409>).
    pub alibi_slopes: Option<&'a Tensor>,
    /// A logit (H) for each head that takes part in the softmax without a value, as in gpt-oss (0 gives Miller
    /// 2023's softmax-off-by-one). May require a gradient.
    pub sinks: Option<&'a Tensor>,
    /// The order of dimensions. Default: (B, H, T, D).
    pub layout: Layout,
    /// The implementation. Default: automatic.
    pub backend: Backend,
}

impl AttentionOptions<'_> {
    /// Returns the options of a decoder: causal, everything else default.
    pub fn causal() -> AttentionOptions<'static> {
        AttentionOptions {
            causal: true,
            ..AttentionOptions::default()
        }
    }
}
