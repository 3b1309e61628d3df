use overdrive_core::Error;
use overdrive_kv_cache::KvCache;
use tch::{Kind, Tensor};

use super::cross_attention::CrossAttentionCache;
use crate::{Logits, Result};

/// The output of an encoder.
#[derive(Debug)]
pub struct Encoded {
    /// The normalised hidden states `(B, S, C)` (transformers' `encoder_last_hidden_state`).
    pub states: Tensor,
    /// The marks `(B, S)` of any dtype, 1 for a token and 0 for padding; `None` if there is no padding.
    pub attention_mask: Option<Tensor>,
}

/// The encoder's side of a decoder's attention.
#[derive(Debug, Clone, Copy)]
pub enum Source<'a> {
    /// The states, of which each layer computes its keys and values: for training.
    Encoded(&'a Encoded),
    /// The keys and values: for generation.
    Cache(&'a CrossAttentionCache),
}

impl<'a> From<&'a Encoded> for Source<'a> {
    fn from(encoded: &'a Encoded) -> Self {
        Source::Encoded(encoded)
    }
}

impl<'a> From<&'a CrossAttentionCache> for Source<'a> {
    fn from(cache: &'a CrossAttentionCache) -> Self {
        Source::Cache(cache)
    }
}

impl Source<'_> {
    pub(super) fn batch(self) -> i64 {
        match self {
            Source::Encoded(encoded) => encoded.states.size().first().copied().unwrap_or(0),
            Source::Cache(cache) => cache.batch(),
        }
    }

    pub(super) fn attention_mask(&self) -> Option<&Tensor> {
        match self {
            Source::Encoded(encoded) => encoded.attention_mask.as_ref(),
            Source::Cache(cache) => cache.attention_mask.as_ref(),
        }
    }
}

/// The input of a decoder's forward pass. `B` rows, `T` new tokens.
#[derive(Debug)]
#[non_exhaustive]
pub struct DecoderInput<'a> {
    /// Token ids `(B, T)`, i64; the first one of a row is `decoder_start_token_id`.
    pub input_ids: &'a Tensor,
    /// The mask `(B, past + T)` of any dtype, 1 for a token and 0 for padding; default: no padding. Padding on the
    /// right whose labels do not count needs none.
    pub attention_mask: Option<&'a Tensor>,
    /// The encoder's side.
    pub source: Source<'a>,
    /// The keys and values of past tokens; those of the new tokens are appended. Default: none.
    pub cache: Option<&'a mut dyn KvCache>,
    /// The positions whose logits are computed; default: all.
    pub logits: Logits<'a>,
}

impl<'a> DecoderInput<'a> {
    /// Makes an input without padding and cache, and with the logits of all positions.
    pub fn new(input_ids: &'a Tensor, source: impl Into<Source<'a>>) -> Self {
        DecoderInput {
            input_ids,
            attention_mask: None,
            source: source.into(),
            cache: None,
            logits: Logits::All,
        }
    }

    /// Sets the mask; see [`DecoderInput::attention_mask`].
    pub fn with_attention_mask(mut self, mask: &'a Tensor) -> Self {
        self.attention_mask = Some(mask);
        self
    }

    /// Sets the cache of the decoder's own tokens; see [`DecoderInput::cache`].
    pub fn with_cache(mut self, cache: &'a mut dyn KvCache) -> Self {
        self.cache = Some(cache);
        self
    }

    /// Sets the positions whose logits are computed.
    pub fn with_logits(mut self, logits: Logits<'a>) -> Self {
        self.logits = logits;
        self
    }
}

/// Checks that `ids` are `(B, T)` i64 with at least one token, and that the mask is `(B, past + T)`; returns `[B,
/// T]`.
pub(super) fn check_ids(
    name: &'static str,
    ids: &Tensor,
    mask: Option<&Tensor>,
    past: i64,
) -> Result<[i64; 2]> {
    let &[batch, tokens] = ids.size().as_slice() else {
        return Err(Error::shape(name, ids.size(), "(B, T)").into());
    };
    if ids.kind() != Kind::Int64 {
        return Err(Error::dtype(name, ids.kind(), "Int64").into());
    }
    if batch == 0 || tokens == 0 {
        let expected = "(B, T) with at least one row and one token";
        return Err(Error::shape(name, [batch, tokens], expected).into());
    }
    if let Some(mask) = mask
        && mask.size() != [batch, past + tokens]
    {
        let expected = format!(
            "({batch}, {}), the shape of `{name}` with past tokens",
            past + tokens
        );
        return Err(Error::shape("attention_mask", mask.size(), expected).into());
    }
    Ok([batch, tokens])
}
