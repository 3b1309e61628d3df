use overdrive_core::{check_at_least, check_option};

use crate::Result;

/// The key/value heads of one layer, for a model whose layers differ (Gemma 4).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerHeads {
    /// The number of key/value heads.
    pub kv_heads: i64,
    /// The channels of a head.
    pub head_dim: i64,
}

impl LayerHeads {
    /// Returns the heads of layer `layer`: those in `each`, if there are any, else `all`.
    pub(crate) fn of(each: &[LayerHeads], all: LayerHeads, layer: usize) -> LayerHeads {
        each.get(layer).copied().unwrap_or(all)
    }

    /// Checks the option `layer_heads` of a cache of `layers` layers.
    pub(crate) fn check(each: &[LayerHeads], layers: usize) -> Result<()> {
        let expected = format!("empty, or one entry for each of {layers} layers");
        let fits = each.is_empty() || each.len() == layers;
        let found = format!("{} entries", each.len());
        check_option(fits, "layer_heads", found, expected)?;
        for heads in each {
            check_at_least("layer_heads.kv_heads", heads.kv_heads, 1)?;
            check_at_least("layer_heads.head_dim", heads.head_dim, 1)?;
        }
        Ok(())
    }
}
