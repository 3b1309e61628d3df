//! `_weight_int4pack_mm`: a few rows of bf16 times codes of 4 bits in groups, in the order in which a
//! GPU's tensor cores take them.

use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::tiles::Tiled;

/// The largest number of rows; beyond it a dense matmul of the dequantized weight uses more of a GPU.
const MOST_ROWS: i64 = 64;

/// Returns `true` if the operator takes activations `x (rows, I)`: bf16, or f16 rounded to it. That costs 3 of the 11
/// digits of f16, and its results are in bf16 anyway; bf16 has the larger range, so nothing overflows.
pub(super) fn fits(x: &Tensor) -> bool {
    (1..=MOST_ROWS).contains(&x.size()[0])
        && x.numel() > 0
        && matches!(x.kind(), Kind::BFloat16 | Kind::Half)
}

/// Returns `x (rows, I)`, which [`fits`], times a weight in tiles, in bf16 `(rows, O)`.
pub(super) fn product(x: &Tensor, weight: &Tiled) -> Result<Tensor> {
    let x = x.f_to_kind(Kind::BFloat16)?;
    let x = match &weight.order {
        Some(order) => x.f_index_select(1, order)?,
        None => x.f_contiguous()?,
    };
    let (codes, scales) = (&weight.codes, &weight.scales_and_zeros);
    let group = x.size()[1] / scales.size()[0].max(1);
    Ok(match x.device() {
        Device::Cpu => x.f_internal_weight_int4pack_mm_for_cpu(codes, group, scales)?,
        _ => x.f_internal_weight_int4pack_mm(codes, group, scales)?,
    })
}
