//! Quantization with libtorch's operators, for devices that the codecs do not support. The tests check that on the CPU
//! they give the same codes as the codecs.

use tch::{Kind, Tensor};

use crate::codec::code_book::Book;
use crate::codec::grouped::{HALF_DIGITS, HALF_STEP, LEAST_DIGITS};
use crate::codec::{LEAST_SCALE, fp8, microscaling};
use crate::quantize::{double_quantized, in_half, not_finite};
use crate::weight::{Magnitudes, Storage};
use crate::{BlockOptions, GroupOptions, GroupScales, Result, Scheme};

/// Quantizes a contiguous weight `(O, I)`.
pub(crate) fn quantize(weight: &Tensor, scheme: Scheme, scales: GroupScales) -> Result<Storage> {
    let weight = weight.f_to_kind(Kind::Float)?;
    // One reduction and one wait for the device; the index is searched only after a failure.
    let finite = weight.f_isfinite()?;
    if finite.f_all()?.f_int64_value(&[])? == 0 {
        let first = finite.f_logical_not()?.f_nonzero()?.f_get(0)?;
        let [row, column] = [first.f_int64_value(&[0])?, first.f_int64_value(&[1])?];
        let number = weight.f_double_value(&[row, column])? as f32;
        let [row, column] = [row, column].map(|index| index.unsigned_abs() as usize);
        return Err(not_finite(number, row, column));
    }
    match scheme {
        Scheme::Int8Dynamic | Scheme::Int8WeightOnly | Scheme::LlmInt8 { .. } => int8(&weight),
        Scheme::Grouped(options) => {
            in_half(options, scales, |half| grouped(&weight, options, half))
        }
        Scheme::Nf4(options) => blocks(&weight, Book::Nf4, options),
        Scheme::Fp4(options) => blocks(&weight, Book::Fp4, options),
        Scheme::Fp8 => float8(&weight),
        Scheme::Fp8Blocks => Err(scheme.is_only_read()),
        Scheme::Mxfp4 | Scheme::Nvfp4 => microscaling::quantize(&weight, scheme),
    }
}

/// Returns the weight, the largest magnitude of each row, and the scale at which that magnitude has the code
/// `most`. Rows whose elements are too small for a scale become 0.
fn row_scales(weight: &Tensor, most: f32) -> Result<(Tensor, Tensor, Tensor)> {
    let magnitude = weight.f_abs()?.f_amax([1], true)?;
    // A tensor and not a scalar: libtorch multiplies with the reciprocal of a scalar.
    let scale = magnitude.f_div(&Tensor::from(most))?;
    let tiny = scale.f_lt(f64::from(LEAST_SCALE))?;
    let weight = weight.f_masked_fill(&tiny, 0.0)?;
    let magnitude = magnitude.f_masked_fill(&tiny, 1.0)?;
    let scale = scale.f_masked_fill(&tiny, f64::from(LEAST_SCALE))?;
    Ok((weight, magnitude, scale))
}

fn int8(weight: &Tensor) -> Result<Storage> {
    let (weight, magnitude, scale) = row_scales(weight, 127.0)?;
    // The reciprocal first, as the codec and bitsandbytes do: a quotient would round otherwise.
    let inverse = magnitude.f_reciprocal()?.f_mul_scalar(127.0)?;
    let codes = weight.f_mul(&inverse)?.f_round()?.f_clamp(-127.0, 127.0)?;
    Ok(Storage::Int8 {
        codes: codes.f_to_kind(Kind::Int8)?,
        scales: scale.f_flatten(0, 1)?,
    })
}

fn float8(weight: &Tensor) -> Result<Storage> {
    let (weight, _, scale) = row_scales(weight, fp8::MAX)?;
    let most = f64::from(fp8::MAX);
    let codes = weight.f_div(&scale)?.f_clamp(-most, most)?;
    Ok(Storage::Fp8 {
        codes: codes
            .f_to_kind(Kind::Float8e4m3fn)?
            .f_view_dtype(Kind::Uint8)?,
        scales: scale.f_flatten(0, 1)?,
    })
}

fn grouped(weight: &Tensor, options: GroupOptions, in_half: bool) -> Result<Storage> {
    let [outputs, inputs] = [weight.size()[0], weight.size()[1]];
    let group = options.group_size as i64;
    let groups = inputs / group;
    let half = if options.bits == 4 { 8.0 } else { 128.0 };
    let span = 2.0 * half - 1.0;
    let numbers = weight.f_view([outputs, groups, group])?;
    let low = numbers.f_amin([-1], true)?.f_clamp_max(0.0)?;
    let high = numbers.f_amax([-1], true)?.f_clamp_min(0.0)?;
    let scale = match options.symmetric {
        true => low
            .f_neg()?
            .f_maximum(&high)?
            .f_div(&Tensor::from(span as f32 / 2.0))?,
        false => high.f_sub(&low)?.f_div(&Tensor::from(span as f32))?,
    };
    // Counted from the middle of the range, as the original does, for the same rounding.
    let zero_of = |scale: &Tensor| -> Result<Tensor> {
        if options.symmetric {
            return Ok(scale.f_zeros_like()?);
        }
        let zero = low.f_div(scale)?.f_neg()?.f_add_scalar(-half)?;
        Ok(zero.f_clamp(-half, half - 1.0)?.f_round()?)
    };
    let (scale, zero) = if in_half {
        let digits = match (options.bits, options.symmetric) {
            (4, false) => LEAST_DIGITS,
            _ => HALF_DIGITS,
        };
        half_fit(&scale, digits, half, &zero_of)?
    } else {
        let tiny = scale.f_lt(f64::from(LEAST_SCALE))?;
        let scale = scale.f_masked_fill(&tiny, f64::from(LEAST_SCALE))?;
        let zero = zero_of(&scale)?.f_masked_fill(&tiny, 0.0)?;
        (scale, zero)
    };
    let levels = numbers.f_div(&scale)?.f_add(&zero)?;
    let levels = levels.f_clamp(-half, half - 1.0)?.f_round()?;
    let offsets = zero.f_add_scalar(half)?.f_mul(&scale)?.f_neg()?;
    let levels = levels.f_view([outputs, inputs])?;
    let codes = match (options.bits, options.symmetric) {
        (8, true) => levels.f_to_kind(Kind::Int8)?,
        (8, false) => levels.f_add_scalar(half)?.f_to_kind(Kind::Uint8)?,
        _ => packed(&levels.f_add_scalar(half)?.f_to_kind(Kind::Uint8)?, false)?,
    };
    let scales = scale.f_view([outputs, groups])?;
    let offsets = match options.symmetric {
        true => None,
        false => Some(offsets.f_view([outputs, groups])?),
    };
    Ok(Storage::grouped(codes, scales, offsets, None))
}

/// Returns the scales and zero points of `Levels::half_fit`, from `least` digits on; zero points are stored
/// with `shift` added.
fn half_fit(
    scale: &Tensor,
    least: u32,
    shift: f64,
    zero_of: &dyn Fn(&Tensor) -> Result<Tensor>,
) -> Result<(Tensor, Tensor)> {
    let rounded = |digits: u32| -> Result<Tensor> {
        let unit = 1i64 << (24 - digits);
        let bits = scale.f_contiguous()?.f_view_dtype(Kind::Int)?;
        let bits = bits.f_add_scalar(unit - 1)?.f_bitwise_and(-unit)?;
        let rounded = bits.f_view_dtype(Kind::Float)?;
        let steps = rounded.f_mul_scalar(1.0 / f64::from(HALF_STEP))?.f_ceil()?;
        Ok(steps.f_clamp_min(1.0)?.f_mul_scalar(f64::from(HALF_STEP))?)
    };
    let mut chosen = rounded(least)?;
    let mut zero = zero_of(&chosen)?;
    // The last scale that has room for the zero point stays: it has the most digits.
    for digits in least + 1..=HALF_DIGITS {
        let scale = rounded(digits)?;
        let its_zero = zero_of(&scale)?;
        let product = its_zero.f_add_scalar(shift)?.f_mul(&scale)?;
        let bits = product.f_contiguous()?.f_view_dtype(Kind::Int)?;
        let exact = bits
            .f_bitwise_and((1i64 << (24 - HALF_DIGITS)) - 1)?
            .f_eq(0)?;
        chosen = scale.f_where_self(&exact, &chosen)?;
        zero = its_zero.f_where_self(&exact, &zero)?;
    }
    Ok((chosen, zero))
}

fn blocks(weight: &Tensor, book: Book, options: BlockOptions) -> Result<Storage> {
    let flat = weight.f_flatten(0, -1)?;
    let (len, block) = (flat.numel() as i64, options.block_size as i64);
    let whole = len / block * block;
    let blocks = flat.f_narrow(0, 0, whole)?.f_view([-1, block])?;
    let mut magnitudes = blocks.f_abs()?.f_amax([1], true)?;
    let inverse = magnitudes.f_clamp_min(1e-38)?.f_reciprocal()?;
    let mut scaled = blocks.f_mul(&inverse)?.f_flatten(0, -1)?;
    magnitudes = magnitudes.f_flatten(0, -1)?;
    // As bitsandbytes does, a last block that is shorter is divided, where others are multiplied by the
    // inverse.
    if whole < len {
        let rest = flat.f_narrow(0, whole, len - whole)?;
        let magnitude = rest.f_abs()?.f_max()?.f_clamp_min(1e-38)?;
        scaled = Tensor::f_cat(&[scaled, rest.f_div(&magnitude)?], 0)?;
        magnitudes = Tensor::f_cat(&[magnitudes, magnitude.f_view([1])?], 0)?;
    }
    // Two codes share a byte.
    if len % 2 == 1 {
        scaled = scaled.f_constant_pad_nd([0, 1])?;
    }
    let bounds = Tensor::f_from_slice(&book.bounds())?.f_to_device(weight.device())?;
    let ranks = scaled.f_bucketize(&bounds, true, false)?;
    let codes: Vec<u8> = (0..16).map(|rank| book.code_at(rank)).collect();
    let codes = Tensor::f_from_slice(&codes)?.f_to_device(weight.device())?;
    let codes = codes.f_index_select(0, &ranks)?;
    Ok(Storage::Blocks {
        codes: packed(&codes, true)?,
        magnitudes: match options.double_quant {
            false => Magnitudes::Full(magnitudes),
            true => double_quantized(&magnitudes)?,
        },
    })
}

/// Packs codes of 4 bits `(…, n)` into bytes `(…, n/2)`.
pub(crate) fn packed(codes: &Tensor, first_high: bool) -> Result<Tensor> {
    let pairs = codes.f_unflatten(-1, [-1, 2])?;
    let (first, second) = (pairs.f_select(-1, 0)?, pairs.f_select(-1, 1)?);
    let (high, low) = if first_high {
        (first, second)
    } else {
        (second, first)
    };
    Ok(high.f_mul_scalar(16)?.f_bitwise_or_tensor(&low)?)
}

/// Unpacks bytes `(…, n/2)` to codes of 4 bits `(…, n)`.
pub(crate) fn unpacked(bytes: &Tensor, first_high: bool) -> Result<Tensor> {
    let low = bytes.f_bitwise_and(15)?;
    let high = bytes.f_bitwise_right_shift_tensor_scalar(4)?;
    let pair = if first_high { [high, low] } else { [low, high] };
    Ok(Tensor::f_stack(&pair, -1)?.f_flatten(-2, -1)?)
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;
    use crate::QuantizedWeight;
    use crate::device_dequantize::{dequantize, rows};

    /// Compares them on the CPU, where both exist.
    #[test]
    fn operators_give_the_codes_and_numbers_of_the_codecs() {
        tch::manual_seed(3);
        let weight = Tensor::randn([24, 256], (Kind::Float, Device::Cpu));
        // Rows of zeros, of tiny numbers, and of one sign.
        let _ = weight.get(1).zero_();
        let _ = weight.get(2).fill_(1e-39);
        let _ = weight.get(3).abs_();
        for name in Scheme::NAMES.iter().chain(&["int8-g32", "int8-g16-asym"]) {
            let scheme: Scheme = name.parse().expect("a name");
            let codec = QuantizedWeight::quantize(&weight, scheme).expect("it fits");
            let composed = quantize(&weight, scheme, GroupScales::Half).expect("it fits");
            let pairs = codec.storage.tensors().into_iter().zip(composed.tensors());
            for (codec, composed) in pairs {
                assert_eq!(codec.kind(), composed.kind(), "{name}");
                assert_eq!(codec, composed, "{name}");
            }
            let numbers = dequantize(&codec, Kind::Float).expect("memory");
            assert_eq!(
                codec.dequantize(Kind::Float).expect("memory"),
                numbers,
                "{name}"
            );
            let ids = Tensor::from_slice(&[5i64, 0, 23, 5]);
            assert_eq!(
                rows(&codec, &ids, Kind::Float).expect("memory"),
                numbers.index_select(0, &ids),
                "{name}"
            );
        }
    }

    #[test]
    fn operators_give_scales_of_either_kind() {
        tch::manual_seed(4);
        for (exponent, kind) in [(-20, Kind::Float), (0, Kind::Half), (15, Kind::Float)] {
            let dense = Tensor::randn([24, 256], (Kind::Float, Device::Cpu));
            let dense = (dense + 0.7) * 2f64.powi(exponent);
            for bits in [4, 8] {
                for symmetric in [true, false] {
                    for scales in [GroupScales::Half, GroupScales::Float] {
                        let options = GroupOptions {
                            bits,
                            group_size: 32,
                            symmetric,
                        };
                        let codec = QuantizedWeight::quantize_groups(&dense, options, scales);
                        let codec = codec.expect("it fits");
                        let composed = quantize(&dense, codec.scheme(), scales).expect("it fits");
                        for (a, b) in codec.storage.tensors().into_iter().zip(composed.tensors()) {
                            assert_eq!((a, a.kind()), (b, b.kind()), "{options:?} {scales:?}");
                        }
                        let expected = if scales == GroupScales::Half {
                            kind
                        } else {
                            Kind::Float
                        };
                        // Steps of bytes are 17 times as small, and fit there.
                        if bits == 4 || exponent != 15 {
                            assert_eq!(codec.storage.tensors()[1].kind(), expected);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn operators_take_a_last_block_that_is_shorter() {
        let weight = Tensor::randn([3, 43], (Kind::Float, Device::Cpu));
        for name in ["nf4-single", "fp4"] {
            let codec = QuantizedWeight::quantize(&weight, name.parse().expect("a name"));
            let codec = codec.expect("it fits");
            let composed = quantize(&weight, codec.scheme(), GroupScales::Half).expect("it fits");
            for (a, b) in codec.storage.tensors().into_iter().zip(composed.tensors()) {
                assert_eq!(a, b, "{name}");
            }
            let numbers = dequantize(&codec, Kind::Float).expect("memory");
            assert_eq!(codec.dequantize(Kind::Float).expect("memory"), numbers);
        }
    }

    #[test]
    fn operators_name_the_first_bad_number() {
        let weight = Tensor::ones([3, 64], (Kind::Float, Device::Cpu));
        let _ = weight.get(1).get(7).fill_(f64::NAN);
        let error = quantize(&weight, Scheme::Int8Dynamic, GroupScales::Half).expect_err("NaN");
        assert!(error.to_string().contains("NaN at [1, 7]"), "{error}");
    }
}
