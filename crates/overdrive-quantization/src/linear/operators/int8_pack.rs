//! `_weight_int8pack_mm`: a few rows of floats times codes of 8 bits, which are read packed.

use tch::{Device, Kind, Tensor};

use super::Capability;
use crate::Result;

/// The largest number of rows: each row reads the whole weight, and a dense matmul of the dequantized weight
/// has tensor cores.
const MOST_ROWS: i64 = 8;

/// Returns `true` if the operator takes these on a GPU: in libtorch 2.11 its CUDA kernel takes activations and
/// scales in f32 only and fails for bf16 and f16, whose weights are dequantized instead.
pub(super) fn applies(x: &Tensor, capability: Capability) -> bool {
    capability.is_some() && fits(x) && x.kind() == Kind::Float
}

/// Returns `true` if shape and dtype suit the operator, for `x (rows, I)`.
pub(super) fn fits(x: &Tensor) -> bool {
    (1..=MOST_ROWS).contains(&x.size()[0]) && x.numel() > 0 && x.kind() != Kind::Double
}

/// Returns `x (rows, I)` times the codes and scales, `(rows, O)`, summed in f32.
pub(super) fn product(x: &Tensor, codes: &Tensor, scales: &Tensor) -> Result<Tensor> {
    let scales = match x.device() {
        // The CPU operator takes scales in the dtype of the activations.
        Device::Cpu => scales.f_to_kind(x.kind())?,
        _ => scales.shallow_clone(),
    };
    Ok(x.f_contiguous()?
        .f_internal_weight_int8pack_mm(codes, &scales)?)
}
