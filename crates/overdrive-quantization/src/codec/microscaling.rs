//! Blocks of 4-bit floats (e2m1) with scales of 8 bits: MXFP4 of the Open Compute Project and NVFP4 of NVIDIA.

use tch::{Kind, Tensor};

use super::fp8;
use crate::composed::packed;
use crate::weight::{Magnitudes, Storage};
use crate::{Result, Scheme};

/// The largest number of e2m1.
const MAX: f32 = 6.0;
/// The exponent of the largest number of e2m1.
const MAX_EXPONENT: i64 = 2;
/// The bias of the exponents of MXFP4's scales (e8m0).
const BIAS: i64 = 127;
/// The code of NaN among e8m0's.
pub(crate) const E8M0_NAN: u8 = 0xFF;

/// The midpoints between neighbouring magnitudes of e2m1. At a midpoint, the number whose code is even is nearer:
/// where that is the larger one, the bound is the float before the midpoint, and only numbers above it are larger.
const BOUNDS: [f32; 7] = [
    0.25,
    0.75_f32.next_down(),
    1.25,
    1.75_f32.next_down(),
    2.5,
    3.5_f32.next_down(),
    5.0,
];

/// Returns the number of each code of MXFP4's scales, 2^(code - 127); that of NaN is 0, and constructors refuse it.
pub(crate) fn e8m0_numbers() -> [f32; 256] {
    let mut numbers = [0.0; 256];
    for (code, number) in (0..i32::from(E8M0_NAN)).zip(&mut numbers) {
        *number = 2.0_f32.powi(code - BIAS as i32);
    }
    numbers
}

/// Returns the number of each code of NVFP4's scales, an 8-bit float divided by the scale of the tensor; those of NaN are
/// 0, and constructors refuse them.
pub(crate) fn e4m3_numbers(global_scale: f32) -> [f32; 256] {
    let mut numbers = [0.0; 256];
    for (code, number) in (0..=u8::MAX).zip(&mut numbers) {
        let scale = fp8::decode(code);
        // Divided, as compressed-tensors does, and not multiplied by the reciprocal.
        *number = if scale.is_nan() {
            0.0
        } else {
            scale / global_scale
        };
    }
    numbers
}

/// Returns the scale of the tensor in the numbers of NVFP4's scales: the one that [`e4m3_numbers`] was given, or another with
/// the same numbers.
pub(crate) fn global_scale(numbers: &[f32]) -> Option<f32> {
    let one = numbers
        .iter()
        .zip(0..=u8::MAX)
        .find(|(_, code)| fp8::decode(*code) == 1.0);
    let near = 1.0 / one?.0;
    [near, near.next_up(), near.next_down()]
        .into_iter()
        .find(|&scale| e4m3_numbers(scale)[..] == *numbers)
}

/// Returns the scales of blocks in 8 bits, with the number of each code.
pub(crate) fn magnitudes(codes: Tensor, numbers: &[f32; 256]) -> Result<Magnitudes> {
    let device = codes.device();
    let blocks = codes.numel() as i64;
    let of = super::dynamic::BLOCK as i64;
    let groups = blocks / of + i64::from(blocks % of != 0);
    Ok(Magnitudes::Quantized {
        codes,
        code_book: Tensor::f_from_slice(numbers)?.f_to_device(device)?,
        // The numbers of the codes are the scales themselves.
        scales: Tensor::f_ones([groups], (Kind::Float, device))?,
        offset: 0.0,
    })
}

/// Quantizes a contiguous f32 weight `(O, I)` of finite numbers, whose inputs are a multiple of the block, on any device.
pub(crate) fn quantize(weight: &Tensor, scheme: Scheme) -> Result<Storage> {
    let (_, options) = scheme.blocks()?;
    let blocks = weight.f_view([-1, options.block_size as i64])?;
    let most = blocks.f_abs()?.f_amax([1], false)?;
    let (codes, numbers) = match scheme {
        Scheme::Mxfp4 => (exponents(&most)?, e8m0_numbers()),
        _ => {
            // The largest block has the largest scale that 8-bit floats have.
            let largest = most.f_max()?.f_double_value(&[])? as f32;
            let global_scale = match largest > 0.0 {
                true => fp8::MAX * MAX / largest,
                false => 1.0,
            };
            // That of a weight of tiny numbers is beyond f32.
            let global_scale = if global_scale.is_finite() {
                global_scale
            } else {
                1.0
            };
            // Tensors and not scalars, by whose reciprocal libtorch multiplies.
            let scales = most.f_div(&Tensor::from(MAX))?;
            let scales = scales.f_mul(&Tensor::from(global_scale))?;
            let scales = scales.f_clamp(0.0, f64::from(fp8::MAX))?;
            let codes = scales
                .f_to_kind(Kind::Float8e4m3fn)?
                .f_view_dtype(Kind::Uint8)?;
            // A block of zeros, or of numbers too small for a scale, which become zeros, has this one, as
            // compressed-tensors has it.
            let codes = codes.f_masked_fill(&codes.f_eq(0)?, i64::from(fp8::encode(0.125)))?;
            (codes, e4m3_numbers(global_scale))
        }
    };
    let magnitudes = magnitudes(codes.f_contiguous()?, &numbers)?;
    let steps = magnitudes.tensor()?.f_unsqueeze(1)?;
    // The least exponents of MXFP4 may be flushed to 0: 0 / 0 is no number.
    let empty = steps.f_eq(0.0)?;
    let scaled = blocks.f_div(&steps)?.f_masked_fill(&empty, 0.0)?;
    let bounds = Tensor::f_from_slice(&BOUNDS)?.f_to_device(weight.device())?;
    let ranks = scaled.f_abs()?.f_bucketize(&bounds, true, false)?;
    // Also of numbers that become zero, as compressed-tensors has them.
    let signs = blocks
        .f_signbit()?
        .f_to_kind(Kind::Uint8)?
        .f_mul_scalar(8)?;
    let codes = ranks.f_to_kind(Kind::Uint8)?.f_bitwise_or_tensor(&signs)?;
    Ok(Storage::Blocks {
        codes: packed(&codes.f_flatten(0, -1)?, true)?,
        magnitudes,
    })
}

/// Returns the codes of the shared exponents of blocks with these largest magnitudes: that of the largest number, rounded
/// to a mantissa of one bit, less the exponent of the largest number of e2m1.
fn exponents(most: &Tensor) -> Result<Tensor> {
    let bits = most.f_contiguous()?.f_view_dtype(Kind::Int)?;
    // A magnitude that rounds up to the next power of two takes that one's exponent, so that it is not clamped.
    let half = 1_i64 << 21;
    let exponent = bits
        .f_add_scalar(half)?
        .f_bitwise_right_shift_tensor_scalar(23)?;
    let exponent = exponent.f_sub_scalar(MAX_EXPONENT)?.f_clamp(0.0, 254.0)?;
    Ok(exponent.f_to_kind(Kind::Uint8)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::code_book::Book;

    #[test]
    fn a_code_is_the_nearest_number_and_ties_go_to_the_even_code() {
        let numbers = Book::E2m1.numbers();
        let mut x = -7.0_f32;
        while x <= 7.0 {
            let rank = BOUNDS.iter().filter(|&&bound| x.abs() > bound).count();
            let distance = |code: usize| (numbers[code] - x.abs()).abs();
            let nearest = (0..8).min_by(|&a, &b| {
                distance(a)
                    .total_cmp(&distance(b))
                    .then((a % 2).cmp(&(b % 2)))
            });
            assert_eq!(Some(rank), nearest, "{x}");
            x += 0.03125;
        }
    }

    #[test]
    fn the_scale_of_a_tensor_is_found_in_the_numbers_of_its_codes() {
        let mut scale = 1e-6_f32;
        while scale < 1e12 {
            let numbers = e4m3_numbers(scale);
            let found = global_scale(&numbers).expect("there is one");
            assert_eq!(e4m3_numbers(found), numbers);
            scale *= 3.7;
        }
        assert_eq!(global_scale(&e8m0_numbers()), None);
    }
}
