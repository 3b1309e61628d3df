use tch::Tensor;

use crate::Result;

/// The keys and values of an encoder's states in each layer of a decoder, computed once so that later steps do not need
/// the states.
///
/// [`Seq2SeqLm::cross_attention_cache`](crate::Seq2SeqLm::cross_attention_cache) makes it. It does not grow.
#[derive(Debug)]
pub struct CrossAttentionCache {
    /// The keys and values of each layer, `(B, H, S, D)`.
    pub(super) layers: Vec<(Tensor, Tensor)>,
    /// The marks `(B, S)` of the encoder's tokens, 1 for a token; `None` if there is no padding.
    pub(super) attention_mask: Option<Tensor>,
}

impl CrossAttentionCache {
    /// Returns the number of layers.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Returns the keys and values `(B, H, S, D)` of `layer`, or `None` if there is no such layer.
    pub fn layer(&self, layer: usize) -> Option<(&Tensor, &Tensor)> {
        self.layers.get(layer).map(|(keys, values)| (keys, values))
    }

    /// Returns the number of rows of the batch.
    pub fn batch(&self) -> i64 {
        self.layers.first().map_or(0, |(keys, _)| keys.size()[0])
    }

    /// Returns the bytes of keys and values.
    pub fn bytes(&self) -> u64 {
        let bytes = |tensor: &Tensor| (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64;
        let layers = self.layers.iter();
        layers
            .map(|(keys, values)| bytes(keys) + bytes(values))
            .sum()
    }

    /// Reorders the rows of the batch: row `i` becomes the old row `rows[i]` (i64, `(B_new,)`), as beam search and
    /// parallel samples need. A row may appear several times or not at all.
    ///
    /// # Errors
    /// An error of libtorch when an index is out of range or memory runs out; the cache is then unchanged.
    pub fn reorder(&mut self, rows: &Tensor) -> Result<()> {
        let select = |tensor: &Tensor| tensor.f_index_select(0, rows);
        // Everything is computed before anything is replaced.
        let layers = self.layers.iter();
        let layers = layers
            .map(|(keys, values)| Ok((select(keys)?, select(values)?)))
            .collect::<Result<_>>()?;
        let mask = self.attention_mask.as_ref().map(select).transpose()?;
        (self.layers, self.attention_mask) = (layers, mask);
        Ok(())
    }
}

/// The source of a decoder block's keys and values.
#[derive(Debug)]
pub(super) enum CrossLayer {
    /// The encoder's states `(B, S, C)`.
    States(Tensor),
    /// Precomputed keys and values.
    KeysValues(Tensor, Tensor),
}
