//! Weights of 8-bit floats.

use tch::{Kind, Tensor};

use super::{check_row_scales, check_scales, matrix};
use crate::codec::fp8;
use crate::weight::Storage;
use crate::{Error, QuantizedWeight, Result, Scheme};

impl QuantizedWeight {
    /// Creates a weight of 8-bit floats (e4m3) with one scale for each row: `codes` u8 (or `Float8e4m3fn`)
    /// `(O, I)`, `scales` f32 `(O,)`.
    ///
    /// # Errors
    /// [`Error::Common`] if a tensor has the wrong shape, dtype or device, [`Error::Values`] for scales that
    /// are not finite and for codes that are NaN.
    pub fn from_fp8(codes: Tensor, scales: Tensor) -> Result<QuantizedWeight> {
        let [outputs, inputs] = matrix("codes", &codes, &[Kind::Uint8, Kind::Float8e4m3fn])?;
        check_row_scales(&scales, outputs, codes.device())?;
        let storage = Storage::Fp8 {
            codes: float8_bytes(&codes)?,
            scales: scales.f_contiguous()?,
        };
        Ok(QuantizedWeight::of(Scheme::Fp8, [outputs, inputs], storage))
    }

    /// Creates a weight of 8-bit floats (e4m3) with one scale for each block of 128 outputs and 128 inputs: `codes` u8
    /// (or `Float8e4m3fn`) `(O, I)`, `scales` f32 `(⌈O/128⌉, ⌈I/128⌉)`; the last blocks may be smaller.
    ///
    /// # Errors
    /// As [`from_fp8`](Self::from_fp8).
    pub fn from_fp8_blocks(codes: Tensor, scales: Tensor) -> Result<QuantizedWeight> {
        let [outputs, inputs] = matrix("codes", &codes, &[Kind::Uint8, Kind::Float8e4m3fn])?;
        let block = fp8::BLOCK as i64;
        let blocks = [outputs, inputs].map(|size| (size + block - 1) / block);
        check_scales(&scales, &blocks, codes.device())?;
        let by_row = scales.f_repeat_interleave_self_int(block, 0, None)?;
        let storage = Storage::Fp8 {
            codes: float8_bytes(&codes)?,
            scales: by_row.f_narrow(0, 0, outputs)?.f_contiguous()?,
        };
        let size = [outputs, inputs];
        Ok(QuantizedWeight::of(Scheme::Fp8Blocks, size, storage))
    }
}

/// Returns 8-bit floats as bytes, because libtorch has few operators for 8-bit floats.
fn float8_bytes(codes: &Tensor) -> Result<Tensor> {
    let codes = codes.f_contiguous()?.f_view_dtype(Kind::Uint8)?;
    // A NaN would affect the whole output; quantization never produces one.
    let nan = codes
        .f_bitwise_and(i64::from(fp8::NAN))?
        .f_eq(i64::from(fp8::NAN))?;
    match nan.f_any()?.f_int64_value(&[])? {
        0 => Ok(codes),
        _ => Err(Error::values(
            "codes",
            "a code that is NaN",
            "codes that are not NaN",
        )),
    }
}
