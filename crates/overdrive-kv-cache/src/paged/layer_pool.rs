//! The keys and values of a layer in blocks.

use overdrive_attention::{PagedBlocks, PagedSlots, paged_write_pair, paged_write_quantized};
use overdrive_sys::cuda::on_device;
use tch::{Kind, Tensor};

use super::block_pool::BlockId;
use super::config::PagedCacheConfig;
use crate::{Error, Result};

/// The keys and values of a layer.
#[derive(Debug)]
pub(super) struct LayerPool {
    pub(super) keys: Blocks,
    pub(super) values: Blocks,
}

/// The keys or values of a layer, `(num_blocks, H_kv, block_size, D)`: within a block, the tokens of a head are adjacent.
#[derive(Debug)]
pub(super) struct Blocks {
    /// Elements or codes.
    elements: Tensor,
    /// The scale of each row of codes, f32 `(num_blocks, H_kv, block_size)`.
    scales: Option<Tensor>,
}

impl LayerPool {
    /// Allocates `blocks` blocks of the layer `layer`.
    pub(super) fn empty(config: &PagedCacheConfig, layer: usize, blocks: i64) -> Result<LayerPool> {
        let heads = config.heads(layer);
        let values = config.value_dim(layer);
        Ok(LayerPool {
            keys: Blocks::empty(config, [blocks, heads.kv_heads], heads.head_dim)?,
            values: Blocks::empty(config, [blocks, heads.kv_heads], values)?,
        })
    }

    /// Writes the keys and values `(N, H_kv, D)` of new tokens.
    pub(super) fn write(
        &mut self,
        keys: &Tensor,
        values: &Tensor,
        slots: &PagedSlots,
    ) -> Result<()> {
        let LayerPool { keys: k, values: v } = self;
        match (&mut k.scales, &mut v.scales) {
            (Some(key_scales), Some(value_scales)) => {
                paged_write_quantized(keys, &mut k.elements, key_scales, slots)?;
                paged_write_quantized(values, &mut v.elements, value_scales, slots)?;
            }
            _ => {
                let pools = [&mut k.elements, &mut v.elements];
                paged_write_pair([keys, values], pools, slots)?;
            }
        }
        Ok(())
    }

    pub(super) fn copy_block(&self, from: BlockId, to: BlockId) -> Result<()> {
        let tensors = [&self.keys, &self.values];
        let tensors = tensors.map(|blocks| [Some(&blocks.elements), blocks.scales.as_ref()]);
        for tensor in tensors.into_iter().flatten().flatten() {
            // Bytes of codes, because not every device can copy e4m3.
            let bytes;
            let tensor = match tensor.kind() {
                Kind::Float8e4m3fn => {
                    bytes = tensor.f_view_dtype(Kind::Uint8)?;
                    &bytes
                }
                _ => tensor,
            };
            let from = tensor.f_select(0, from.into())?;
            tensor.f_select(0, to.into())?.f_copy_(&from)?;
        }
        Ok(())
    }
}

impl Blocks {
    fn empty(config: &PagedCacheConfig, [blocks, heads]: [i64; 2], dim: i64) -> Result<Blocks> {
        let rows = [blocks, heads, config.block_size];
        let shape = [rows[0], rows[1], rows[2], dim];
        // Not initialized: a block is read only up to the tokens that were written to it.
        let empty = |shape: &[i64], kind| {
            let empty = Tensor::f_empty(shape, (kind, config.device));
            on_device(config.device, empty.map_err(Error::from))
        };
        Ok(match config.kv_cache_dtype.codes() {
            None => Blocks {
                elements: empty(&shape, config.kind)?,
                scales: None,
            },
            Some(codes) => Blocks {
                elements: empty(&shape, codes)?,
                scales: Some(empty(&rows, Kind::Float)?),
            },
        })
    }

    /// Returns the blocks for attention.
    pub(super) fn view(&self) -> PagedBlocks<'_> {
        PagedBlocks {
            elements: &self.elements,
            scales: self.scales.as_ref(),
        }
    }

    /// Returns a dense copy of the first `len` tokens of the blocks in `table`, `(1, H_kv, len, D)` in the dtype `kind`.
    pub(super) fn gather(&self, table: &Tensor, len: i64, kind: Kind) -> Result<Tensor> {
        let rows = self.view().dense(table, kind)?;
        let rows = rows.f_transpose(0, 1)?.f_flatten(1, 2)?;
        Ok(rows.f_narrow(1, 0, len)?.f_unsqueeze(0)?)
    }
}
