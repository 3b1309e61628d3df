use overdrive_core::Error as Common;
use overdrive_kernels::e4m3;
use overdrive_kernels::tensors::Strided;
use overdrive_sys::raw;
use tch::{Kind, Tensor};

use crate::call::{check_kinds, shape_error};
use crate::error::other_device;
use crate::kernel::{Codes, Stored, View};
use crate::{Error, Result};

/// The keys or values of a pool, (blocks, H_kv, block_size, D): a tensor with the dtype of the query, or 8-bit codes with
/// a scale for each row, as [`paged_write_quantized`](crate::paged_write_quantized) writes them.
///
/// ```
/// use overdrive_attention::{AttentionOptions, PagedBlocks, PagedLayout, PagedSlots, attention_paged, paged_write_quantized};
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), overdrive_attention::Error> {
/// let cpu = |kind| (kind, Device::Cpu);
/// let mut codes = Tensor::zeros([4, 1, 2, 8], cpu(Kind::Int8)); // 4 blocks of 2 tokens
/// let mut scales = Tensor::zeros([4, 1, 2], cpu(Kind::Float));
/// let keys = Tensor::randn([3, 1, 8], cpu(Kind::Float)); // 3 tokens, written to blocks 2 and 0
/// let slots = PagedSlots::new(vec![4, 5, 0], 2, Device::Cpu)?;
/// paged_write_quantized(&keys, &mut codes, &mut scales, &slots)?;
///
/// let blocks = PagedBlocks { elements: &codes, scales: Some(&scales) };
/// let layout = PagedLayout::new(vec![vec![2, 0]], vec![3], vec![3], 2, Device::Cpu)?;
/// let (output, _) = attention_paged(&keys, blocks, blocks, &layout, &AttentionOptions::causal())?;
/// assert_eq!(output.size(), [3, 1, 8]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy)]
pub struct PagedBlocks<'a> {
    /// The elements, or codes: Int8, or Float8e4m3fn.
    pub elements: &'a Tensor,
    /// The scale of each row of codes, f32 (blocks, H_kv, block_size); `None` for elements.
    pub scales: Option<&'a Tensor>,
}

impl<'a> From<&'a Tensor> for PagedBlocks<'a> {
    fn from(elements: &'a Tensor) -> Self {
        PagedBlocks {
            elements,
            scales: None,
        }
    }
}

impl<'a> From<&'a mut Tensor> for PagedBlocks<'a> {
    fn from(elements: &'a mut Tensor) -> Self {
        PagedBlocks::from(&*elements)
    }
}

impl PagedBlocks<'_> {
    /// Returns a copy of the blocks `table`, i64 on their device: elements as they are, codes dequantized to `kind`.
    ///
    /// # Errors
    /// [`Error::Tch`] for a block outside the pool, or if memory runs out.
    pub fn dense(&self, table: &Tensor, kind: Kind) -> Result<Tensor> {
        let Some(scales) = self.scales else {
            return Ok(self.elements.f_index_select(0, table)?);
        };
        // Bytes, because not every device can index e4m3.
        let codes = self.elements.f_view_dtype(Kind::Uint8)?;
        let codes = codes.f_index_select(0, table)?;
        let codes = codes.f_view_dtype(self.elements.kind())?;
        let scales = scales.f_index_select(0, table)?.f_unsqueeze(-1)?;
        Ok(codes
            .f_to_kind(Kind::Float)?
            .f_multiply(&scales)?
            .f_to_kind(kind)?)
    }

    /// Returns the rows for the CPU kernel.
    pub(crate) fn strided(&self) -> Result<StridedBlocks> {
        let Some(scales) = self.scales else {
            return Ok(StridedBlocks {
                elements: Strided::rows(self.elements)?,
                scales: None,
                is_int8: false,
            });
        };
        let is_int8 = self.elements.kind() == Kind::Int8;
        let bytes;
        let codes = match is_int8 {
            true => self.elements,
            false => {
                bytes = self.elements.f_view_dtype(Kind::Uint8)?;
                &bytes
            }
        };
        Ok(StridedBlocks {
            elements: Strided::rows(codes)?,
            scales: Some(Strided::rows(&scales.f_unsqueeze(-1)?)?),
            is_int8,
        })
    }
}

/// The rows of a pool.
pub(crate) struct StridedBlocks {
    elements: Strided,
    scales: Option<Strided>,
    is_int8: bool,
}

impl StridedBlocks {
    pub(crate) fn stored<E: raw::Element>(&self) -> Result<Stored<'_, E>> {
        Ok(match &self.scales {
            None => Stored::Elements(View::of(&self.elements)?),
            Some(scales) => Stored::Quantized {
                codes: match self.is_int8 {
                    true => Codes::Int8(View::of(&self.elements)?),
                    false => Codes::Fp8(View::of(&self.elements)?),
                },
                scales: View::of(scales)?,
            },
        })
    }
}

/// Returns the largest code of a dtype of codes.
pub(crate) fn largest_code(codes: &Tensor) -> Result<f64> {
    match codes.kind() {
        Kind::Int8 => Ok(127.0),
        Kind::Float8e4m3fn => Ok(f64::from(e4m3::MAX)),
        kind => Err(Error::Common(Common::dtype(
            "codes",
            kind,
            "Int8 or Float8e4m3fn",
        ))),
    }
}

/// Checks the dtypes and devices of keys and values against the query; returns whether they are codes.
pub(crate) fn check_blocks(
    query: &Tensor,
    keys: PagedBlocks<'_>,
    values: PagedBlocks<'_>,
) -> Result<bool> {
    let blocks = [("key_blocks", keys), ("value_blocks", values)];
    if blocks.iter().all(|(_, blocks)| blocks.scales.is_none()) {
        check_kinds(query, keys.elements, values.elements)?;
        return Ok(false);
    }
    if !query.is_floating_point() || query.kind() == Kind::Double {
        let expected = "Float, Half or BFloat16 over quantized blocks";
        return Err(Error::Common(Common::dtype(
            "query",
            query.kind(),
            expected,
        )));
    }
    for (name, blocks) in blocks {
        let Some(scales) = blocks.scales else {
            return Err(Error::Common(Common::option(
                "scales",
                format!("None for {name}"),
                "set for both keys and values, or for neither",
            )));
        };
        largest_code(blocks.elements)?;
        let size = blocks.elements.size();
        let fits = size.len() == 4 && scales.size() == size[..3];
        if !fits || scales.kind() != Kind::Float || !scales.is_contiguous() {
            let expected =
                "contiguous Float (blocks, heads, block size), a scale for each row of codes";
            return Err(shape_error("scales", scales, expected.to_owned()));
        }
        if !blocks.elements.is_contiguous() {
            let expected = "contiguous codes (blocks, heads, block size, dim)".to_owned();
            return Err(shape_error(name, blocks.elements, expected));
        }
        for tensor in [blocks.elements, scales] {
            if tensor.device() != query.device() {
                return Err(other_device(name, tensor.device(), query.device()));
            }
        }
    }
    Ok(true)
}
