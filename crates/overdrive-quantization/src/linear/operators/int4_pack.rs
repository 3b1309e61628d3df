//! `_weight_int4pack_mm`: a few rows of bf16 times codes of 4 bits in groups, in the order in which a
//! GPU's tensor cores take them.

use std::sync::{Arc, Mutex, PoisonError};

use tch::{Device, Kind, Tensor};

use super::Capability;
use crate::composed::unpacked;
use crate::weight::Storage;
use crate::{Error, QuantizedWeight, Result, Scheme};

/// The largest number of rows; beyond it a dense matmul of the dequantized weight uses more of a GPU.
const MOST_ROWS: i64 = 64;

/// The outputs of a tile.
const TILE_OUTPUTS: i64 = 8;

/// The inputs of a tile.
const TILE_INPUTS: i64 = 16;

/// A second copy of the codes of a weight, in tiles: made at its first use and shared by all handles to the
/// weight.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tiles(Arc<Mutex<Option<Tiled>>>);

/// Codes and scales as the operator takes them.
#[derive(Debug)]
struct Tiled {
    /// The codes, in an order that only the operator knows.
    codes: Tensor,
    /// `(groups, O, 2)` in the dtype of the activations: the scale, and the value of code 8.
    scales_and_zeros: Tensor,
    group: i64,
}

impl Tiles {
    /// Returns the bytes of the tiles; 0 before their first use.
    pub(crate) fn bytes(&self) -> usize {
        let made = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        made.as_ref().map_or(0, |tiled| {
            [&tiled.codes, &tiled.scales_and_zeros]
                .iter()
                .map(|tensor| tensor.numel() * tensor.kind().elt_size_in_bytes())
                .sum()
        })
    }
}

/// Returns `true` if the operator takes these: GPUs have it from Ampere on.
pub(super) fn applies(x: &Tensor, weight: &QuantizedWeight, capability: Capability) -> bool {
    capability >= Some((8, 0)) && fits(x, weight)
}

/// Returns `true` if shapes, dtype and scheme suit the operator, for `x (rows, I)`.
pub(super) fn fits(x: &Tensor, weight: &QuantizedWeight) -> bool {
    let Scheme::Grouped(options) = weight.scheme else {
        return false;
    };
    (1..=MOST_ROWS).contains(&x.size()[0])
        && x.numel() > 0
        && x.kind() == Kind::BFloat16
        && options.bits == 4
        && matches!(options.group_size, 32 | 64 | 128 | 256)
        && weight.outputs % TILE_OUTPUTS == 0
        && inner_tiles(weight.inputs).is_some()
}

/// Returns the number of adjacent tiles along the inputs: the largest that divides them.
fn inner_tiles(inputs: i64) -> Option<i64> {
    [8, 4, 2]
        .into_iter()
        .find(|tiles| inputs % (tiles * TILE_INPUTS) == 0)
}

/// Returns `x (rows, I)` in bf16 times a weight that [`fits`], `(rows, O)`.
pub(super) fn product(x: &Tensor, weight: &QuantizedWeight) -> Result<Tensor> {
    let x = match &weight.storage {
        Storage::Grouped {
            order: Some(order), ..
        } => x.f_index_select(1, order)?,
        _ => x.f_contiguous()?,
    };
    let mut made = weight
        .tiles
        .0
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    let tiled = match &mut *made {
        Some(tiled) => tiled,
        none => none.insert(tiled(weight)?),
    };
    let (codes, scales) = (&tiled.codes, &tiled.scales_and_zeros);
    Ok(match x.device() {
        Device::Cpu => x.f_internal_weight_int4pack_mm_for_cpu(codes, tiled.group, scales)?,
        _ => x.f_internal_weight_int4pack_mm(codes, tiled.group, scales)?,
    })
}

fn tiled(weight: &QuantizedWeight) -> Result<Tiled> {
    let (
        Storage::Grouped {
            codes,
            scales,
            offsets,
            ..
        },
        Some(inner),
    ) = (&weight.storage, inner_tiles(weight.inputs))
    else {
        return Err(Error::option("weight", weight.scheme, "4 bits in groups"));
    };
    let group = weight.inputs / scales.size()[1].max(1);
    let codes = match codes.device() {
        Device::Cpu => unpacked(codes, false)?
            .f_to_kind(Kind::Int)?
            .f_internal_convert_weight_to_int4pack_for_cpu(inner)?,
        _ => halves_swapped(codes)?.f_internal_convert_weight_to_int4pack(inner)?,
    };
    let scales = scales.f_to_kind(Kind::Float)?;
    // `w = (code − 8) · scale + zero`.
    let zeros = match offsets {
        None => scales.f_zeros_like()?,
        Some(offsets) => scales
            .f_mul_scalar(8.0)?
            .f_add(&offsets.f_to_kind(Kind::Float)?)?,
    };
    let scales_and_zeros = Tensor::f_stack(&[scales.f_tr()?, zeros.f_tr()?], -1)?;
    Ok(Tiled {
        codes,
        scales_and_zeros: scales_and_zeros.f_to_kind(Kind::BFloat16)?.f_contiguous()?,
        group,
    })
}

/// Swaps the halves of each byte: the operator takes the first of two codes in the high half.
fn halves_swapped(codes: &Tensor) -> Result<Tensor> {
    let low = codes.f_bitwise_and(15)?.f_mul_scalar(16)?;
    let high = codes.f_bitwise_right_shift_tensor_scalar(4)?;
    Ok(low.f_bitwise_or_tensor(&high)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_code_goes_to_the_high_half() {
        let codes = Tensor::from_slice(&[0x21u8, 0xF0, 0x0F]).view([1, 3]);
        let swapped = halves_swapped(&codes).expect("memory");
        assert_eq!(
            swapped,
            Tensor::from_slice(&[0x12u8, 0x0F, 0xF0]).view([1, 3])
        );
    }

    #[test]
    fn tiles_are_as_long_as_the_inputs_let_them_be() {
        assert_eq!(inner_tiles(4096), Some(8));
        assert_eq!(inner_tiles(192), Some(4));
        assert_eq!(inner_tiles(96), Some(2));
        assert_eq!(inner_tiles(48), None);
    }
}
