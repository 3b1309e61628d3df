//! 4-bit codes in the order that the tensor cores of a GPU take: that of `_weight_int4pack_mm`.
//!
//! A tile has 8 outputs and 16 inputs. The operator's codes are i32 `(O/8, I/(16·n), 32, n/2)`, where `n`, the number
//! of adjacent tiles along the inputs, is 2, 4 or 8. Entry `t` of the 32 has the codes of output `t / 4`, of the
//! inputs `2·(t % 4)` and the next one, and of the two that are 8 further on. Two adjacent tiles make one i32: of its
//! bytes, the first two have the even inputs of the first and of the second tile, the other two the odd ones, and the
//! low half of a byte is the first of the two inputs that are 8 apart.

use tch::{Kind, Tensor};

use crate::composed::{packed, unpacked};
use crate::weight::Storage;
use crate::{QuantizedWeight, Result, Scheme};

/// The outputs of a tile.
pub(crate) const OUTPUTS: i64 = 8;

/// The inputs of a tile.
const INPUTS: i64 = 16;

/// The inputs of two adjacent tiles, which share an i32. No group is smaller.
pub(crate) const UNIT: i64 = 2 * INPUTS;

/// The compute capability of a GPU: major and minor.
pub(crate) type Capability = Option<(u32, u32)>;

/// A weight of 4 bits in groups, with its codes in tiles.
#[derive(Debug)]
pub(crate) struct Tiled {
    /// The codes, see above.
    pub(crate) codes: Tensor,
    /// bf16 `(groups, O, 2)`: the scale, and the number of code 8.
    pub(crate) scales_and_zeros: Tensor,
    /// f32 or f16 `(O, groups)`: what the weight was quantized with, for the exact dense weight.
    pub(crate) scales: Tensor,
    pub(crate) offsets: Option<Tensor>,
    pub(crate) order: Option<Tensor>,
}

/// Returns `true` if a weight `(O, I)` is stored in tiles on a GPU of this capability: from Ampere on, where the
/// operator exists.
pub(crate) fn apply(capability: Capability, scheme: Scheme, size: [i64; 2]) -> bool {
    capability >= Some((8, 0)) && fit(scheme, size)
}

/// Returns `true` if the operator takes weights of this scheme and shape.
pub(crate) fn fit(scheme: Scheme, [outputs, inputs]: [i64; 2]) -> bool {
    let Scheme::Grouped(options) = scheme else {
        return false;
    };
    options.bits == 4
        && matches!(options.group_size, 32 | 64 | 128 | 256)
        && outputs % OUTPUTS == 0
        && adjacent(inputs).is_some()
}

/// Returns the number of adjacent tiles along the inputs: the largest that divides them.
fn adjacent(inputs: i64) -> Option<i64> {
    [8, 4, 2]
        .into_iter()
        .find(|tiles| inputs % (tiles * INPUTS) == 0)
}

impl Tiled {
    /// Returns the weight in tiles; `None` if the operator does not take it. `convert` is the operator that makes
    /// them of codes whose even inputs are in the high halves, `_convert_weight_to_int4pack`.
    pub(crate) fn new(
        weight: &QuantizedWeight,
        convert: impl Fn(&Tensor, i64) -> Result<Tensor>,
    ) -> Result<Option<Self>> {
        let Storage::Grouped {
            codes,
            scales,
            offsets,
            order,
        } = &weight.storage
        else {
            return Ok(None);
        };
        let Some(adjacent) = adjacent(weight.inputs) else {
            return Ok(None);
        };
        if !fit(weight.scheme, weight.size()) {
            return Ok(None);
        }
        Ok(Some(Self {
            codes: convert(&halves_swapped(codes)?, adjacent)?,
            scales_and_zeros: scales_and_zeros(scales, offsets.as_deref())?,
            scales: scales.shallow_clone(),
            offsets: offsets.as_deref().map(Tensor::shallow_clone),
            order: order.as_deref().map(Tensor::shallow_clone),
        }))
    }

    /// Returns the weight with its codes in rows.
    pub(crate) fn rows(&self, inputs: i64) -> Result<Storage> {
        // `(…, 2)`: of the inputs that are 8 apart.
        let halves = unpacked(&bytes(&self.codes)?.f_unsqueeze(-1)?, false)?;
        let codes = in_rows(&halves)?.f_reshape([-1, inputs])?;
        let shared = |tensor: &Option<Tensor>| tensor.as_ref().map(Tensor::shallow_clone);
        Ok(Storage::grouped(
            packed(&codes, false)?,
            self.scales.shallow_clone(),
            shared(&self.offsets),
            shared(&self.order),
        ))
    }
}

/// Returns the scales `(groups, O, 2)` of the operator in bf16: `w = (code − 8) · scale + zero`.
pub(crate) fn scales_and_zeros(scales: &Tensor, offsets: Option<&Tensor>) -> Result<Tensor> {
    let scales = scales.f_to_kind(Kind::Float)?;
    let zeros = match offsets {
        None => scales.f_zeros_like()?,
        Some(offsets) => scales
            .f_mul_scalar(8.0)?
            .f_add(&offsets.f_to_kind(Kind::Float)?)?,
    };
    let both = Tensor::f_stack(&[scales.f_tr()?, zeros.f_tr()?], -1)?;
    Ok(both.f_to_kind(Kind::BFloat16)?.f_contiguous()?)
}

/// Returns a view of the codes as u8 `(O/8, I/(16·n), 8, 4, n/2, 2, 2)`: by tiles of outputs and of inputs, output,
/// pair of inputs, pair of tiles, even and odd input, tile.
pub(crate) fn bytes(codes: &Tensor) -> Result<Tensor> {
    let size = codes.size();
    let shape = [size[0], size[1], OUTPUTS, 4, size[3], 2, 2];
    Ok(codes.f_view_dtype(Kind::Uint8)?.f_view(shape.as_slice())?)
}

/// Returns a view of what the [`bytes`] have, with the two halves in a last dimension, in the order of the rows:
/// `(O/8, 8, I/(16·n), n/2, 2, 2, 4, 2)`.
pub(crate) fn in_rows(halves: &Tensor) -> Result<Tensor> {
    Ok(halves.f_permute([0, 2, 1, 4, 6, 7, 3, 5])?)
}

/// Swaps the halves of each byte.
fn halves_swapped(codes: &Tensor) -> Result<Tensor> {
    let low = codes.f_bitwise_and(15)?.f_mul_scalar(16)?;
    let high = codes.f_bitwise_right_shift_tensor_scalar(4)?;
    Ok(low.f_bitwise_or_tensor(&high)?)
}

#[cfg(test)]
pub(crate) mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;
    use crate::GroupOptions;

    /// Returns what `_convert_weight_to_int4pack` makes on a GPU, element by element as its kernel does: `codes` are
    /// u8 `(O, I/2)` with the even inputs in the high halves.
    pub(crate) fn as_on_a_gpu(codes: &Tensor, adjacent: i64) -> Result<Tensor> {
        let [outputs, width] = [codes.size()[0], codes.size()[1]];
        let bytes: Vec<u8> = Vec::try_from(codes.reshape([-1])).unwrap();
        let long = width * 2 / (adjacent * INPUTS);
        let mut packed = Vec::new();
        for tile in 0..outputs / OUTPUTS {
            for outer in 0..long {
                for lane in 0..32 {
                    for inner in (0..adjacent).step_by(2) {
                        let base = (outer * adjacent + inner) * INPUTS / 2 + lane % 4;
                        let row = (tile * OUTPUTS + lane / 4) * width;
                        let at = |byte: i64| bytes[(row + byte).unsigned_abs() as usize];
                        let v = [base, base + 4, base + 8, base + 12].map(at).map(u32::from);
                        let even = v.iter().rev().fold(0, |all, v| (all << 4) | (v >> 4));
                        let odd = v.iter().rev().fold(0, |all, v| (all << 4) | (v & 15));
                        packed.push(((odd << 16) | even).cast_signed());
                    }
                }
            }
        }
        Ok(Tensor::from_slice(&packed).view([outputs / OUTPUTS, long, 32, adjacent / 2]))
    }

    #[test]
    fn the_first_code_goes_to_the_high_half() {
        let codes = Tensor::from_slice(&[0x21u8, 0xF0, 0x0F]).view([1, 3]);
        let swapped = halves_swapped(&codes).unwrap();
        assert_eq!(
            swapped,
            Tensor::from_slice(&[0x12u8, 0x0F, 0xF0]).view([1, 3])
        );
    }

    #[test]
    fn tiles_are_as_long_as_the_inputs_let_them_be() {
        assert_eq!(adjacent(4096), Some(8));
        assert_eq!(adjacent(192), Some(4));
        assert_eq!(adjacent(96), Some(2));
        assert_eq!(adjacent(48), None);
    }

    #[test]
    fn weights_lie_in_tiles_where_the_operator_is() {
        let scheme = |bits, group_size| {
            Scheme::Grouped(GroupOptions {
                bits,
                group_size,
                symmetric: true,
            })
        };
        for (capability, scheme, size, expected) in [
            (None, scheme(4, 128), [4096, 4096], false),
            (Some((7, 5)), scheme(4, 128), [4096, 4096], false),
            (Some((8, 0)), scheme(4, 128), [4096, 4096], true),
            (Some((12, 0)), scheme(4, 32), [8, 96], true),
            (Some((9, 0)), scheme(4, 16), [8, 96], false),
            (Some((9, 0)), scheme(8, 128), [4096, 4096], false),
            (Some((9, 0)), scheme(4, 32), [12, 96], false),
            (Some((9, 0)), "nf4".parse().unwrap(), [4096, 4096], false),
        ] {
            assert_eq!(
                apply(capability, scheme, size),
                expected,
                "{capability:?} {scheme}"
            );
        }
    }

    #[test]
    fn rows_come_out_of_tiles_as_they_went_in() {
        for [outputs, inputs] in [[8, 32], [16, 96], [24, 192], [8, 128], [16, 384]] {
            let codes = Tensor::arange(outputs * inputs / 2, (Kind::Int64, tch::Device::Cpu));
            let codes = (codes * 167 + 31).remainder(251).to_kind(Kind::Uint8);
            let weight = QuantizedWeight::from_grouped(crate::GroupedParts {
                bits: 4,
                codes: codes.view([outputs, inputs / 2]),
                scales: Tensor::ones([outputs, inputs / 32], (Kind::Half, tch::Device::Cpu)),
                offsets: None,
                order: None,
            });
            let weight = weight.unwrap();
            let tiled = Tiled::new(&weight, as_on_a_gpu).unwrap().unwrap();
            assert_eq!(tiled.codes.numel() as i64, outputs * inputs / 8);
            let rows = tiled.rows(inputs).unwrap();
            assert_eq!(rows.tensors()[0], weight.storage.codes());
        }
    }
}
