//! Encoder-decoder models: T5 and BART.
//!
//! The two differ in their names, their positions, and the kind and place of their norms; [`stack`], [`block`] and
//! [`attention`] have the shared code.

mod attention;
pub(crate) mod bart;
mod block;
mod cross_attention;
mod feed_forward;
mod input;
mod masks;
mod model;
mod norm;
mod relative_bias;
mod stack;
pub(crate) mod t5;

pub use cross_attention::CrossAttentionCache;
pub use input::{DecoderInput, Encoded, Source};
pub use model::Seq2SeqLm;
