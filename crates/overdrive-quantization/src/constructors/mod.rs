//! Constructors of weights from existing codes and scales.

mod float8;

use half::f16;
use tch::{Device, Kind, Tensor};

use crate::codec::{fp8, microscaling};
use crate::tensors::bytes;
use crate::weight::{Magnitudes, Storage};
use crate::{Error, GroupOptions, QuantizedWeight, Result, Scheme};
use overdrive_kernels::tensors::elements;

/// The tensors of a group-wise quantized weight, for [`QuantizedWeight::from_grouped`]:
/// `w = (code − zero) · scale + offset`.
///
/// Without offsets `zero` is 8 for codes of 4 bits and 0 for signed bytes; with offsets it is 0.
#[derive(Debug)]
pub struct GroupedParts {
    /// The number of bits of a code: 4 or 8.
    pub bits: u8,
    /// The codes. 4 bits: u8 `(O, I/2)`, input `2j` in the low half of byte `j`. 8 bits: i8 `(O, I)`, or u8
    /// if there are offsets.
    pub codes: Tensor,
    /// The scales, f32 or f16 `(O, G)`; `I/G` is the size of the groups: 16, 32, 64, 128 or 256.
    pub scales: Tensor,
    /// The offsets, f32 or f16, of the shape of the scales.
    pub offsets: Option<Tensor>,
    /// The input of each column of the codes, i32 `(I,)`, if the columns are not in the order of the inputs
    /// (GPTQ's `desc_act`). Every input appears once.
    pub order: Option<Tensor>,
}

impl QuantizedWeight {
    /// Creates a weight of 8-bit integers with one scale for each row: `codes` i8 `(O, I)`, `scales` f32
    /// `(O,)`. `scheme` is `Int8Dynamic`, `Int8WeightOnly` or `LlmInt8`.
    ///
    /// # Errors
    /// [`Error::Common`] if a tensor has another shape, dtype or device, or for another scheme;
    /// [`Error::Values`] for scales that are not finite.
    pub fn from_int8(scheme: Scheme, codes: Tensor, scales: Tensor) -> Result<QuantizedWeight> {
        scheme.validate(0)?;
        match scheme {
            Scheme::Int8Dynamic | Scheme::Int8WeightOnly | Scheme::LlmInt8 { .. } => {}
            _ => {
                return Err(Error::option(
                    "scheme",
                    scheme,
                    "int8, int8-weight or llm-int8",
                ));
            }
        }
        let [outputs, inputs] = matrix("codes", &codes, &[Kind::Int8])?;
        check_row_scales(&scales, outputs, codes.device())?;
        let storage = Storage::Int8 {
            codes: codes.f_contiguous()?,
            scales: scales.f_contiguous()?,
        };
        Ok(QuantizedWeight::of(scheme, [outputs, inputs], storage))
    }

    /// Creates a weight of integers with one scale for each group of inputs.
    ///
    /// ```
    /// use overdrive_quantization::{GroupedParts, QuantizedWeight};
    /// use tch::{Kind, Tensor};
    ///
    /// // One output, 16 inputs, all of them (9 − 8) · 0.5.
    /// let weight = QuantizedWeight::from_grouped(GroupedParts {
    ///     bits: 4,
    ///     codes: Tensor::from_slice(&[0x99u8; 8]).view([1, 8]),
    ///     scales: Tensor::from_slice(&[0.5f32]).view([1, 1]),
    ///     offsets: None,
    ///     order: None,
    /// })?;
    /// assert_eq!(weight.dequantize(Kind::Float)?, Tensor::full([1, 16], 0.5, tch::kind::FLOAT_CPU));
    /// # Ok::<(), overdrive_quantization::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Common`] if the tensors do not match, and for unsupported bits and group sizes;
    /// [`Error::Values`] for scales and offsets that are not finite and for an order that is not a permutation.
    pub fn from_grouped(parts: GroupedParts) -> Result<QuantizedWeight> {
        let GroupedParts {
            bits,
            codes,
            scales,
            offsets,
            order,
        } = parts;
        let kinds: &[Kind] = match (bits, &offsets) {
            (8, None) => &[Kind::Int8],
            (8, Some(_)) => &[Kind::Int8, Kind::Uint8],
            _ => &[Kind::Uint8],
        };
        let [outputs, width] = matrix("codes", &codes, kinds)?;
        let inputs = if bits == 4 { width * 2 } else { width };
        let device = codes.device();
        let [_, groups] = matrix("scales", &scales, &[Kind::Float, Kind::Half])?;
        expect(
            "scales",
            &scales,
            &[scales.kind()],
            &[outputs, groups],
            device,
        )?;
        finite("scales", &scales)?;
        if inputs % groups != 0 {
            let expected = format!("(O, G), where G divides the {inputs} inputs");
            return Err(Error::shape("scales", [outputs, groups], expected));
        }
        let options = GroupOptions {
            bits,
            // Positive, and a tensor in memory has as many elements, so that it fits.
            group_size: (inputs / groups).unsigned_abs() as usize,
            symmetric: offsets.is_none(),
        };
        Scheme::Grouped(options).validate(inputs)?;
        if let Some(offsets) = &offsets {
            expect(
                "offsets",
                offsets,
                &[Kind::Float, Kind::Half],
                &[outputs, groups],
                device,
            )?;
            finite("offsets", offsets)?;
        }
        if let Some(order) = &order {
            expect("order", order, &[Kind::Int], &[inputs], device)?;
            permutation(order)?;
        }
        let contiguous = |tensor: Option<Tensor>| tensor.map(|t| t.f_contiguous()).transpose();
        let storage = Storage::grouped(
            codes.f_contiguous()?,
            scales.f_contiguous()?,
            contiguous(offsets)?,
            contiguous(order)?,
        );
        let scheme = Scheme::Grouped(options);
        QuantizedWeight::of(scheme, [outputs, inputs], storage).laid_out()
    }

    /// Creates a weight `(O, I)` of blocks with a 4-bit code book, packed as in bitsandbytes: `codes` u8, two weights
    /// in a byte, the first in the high half, in any shape. `scheme` is [`Scheme::Nf4`],
    /// [`Scheme::Fp4`], [`Scheme::Mxfp4`] or [`Scheme::Nvfp4`].
    ///
    /// # Errors
    /// [`Error::Common`] if a tensor has the wrong shape, dtype or device, for another scheme, and for a scheme
    /// whose double quantization differs from that of the magnitudes; [`Error::Values`] for magnitudes that are
    /// not finite.
    pub fn from_blocks(
        scheme: Scheme,
        [outputs, inputs]: [i64; 2],
        codes: Tensor,
        magnitudes: Magnitudes,
    ) -> Result<QuantizedWeight> {
        let (_, options) = scheme.blocks()?;
        scheme.validate(inputs)?;
        let len = outputs
            .checked_mul(inputs)
            .filter(|_| outputs > 0 && inputs > 0);
        let Some(len) = len else {
            let expected = "(O, I), with both sizes positive";
            return Err(Error::shape("weight", [outputs, inputs], expected));
        };
        let device = codes.device();
        let codes = codes.f_contiguous()?.f_flatten(0, -1)?;
        expect(
            "codes",
            &codes,
            &[Kind::Uint8],
            &[len / 2 + len % 2],
            device,
        )?;
        let block = options.block_size as i64;
        let blocks = len / block + i64::from(len % block != 0);
        let matches = matches!(magnitudes, Magnitudes::Quantized { .. }) == options.double_quant;
        if !matches {
            let expected = "a scheme with the same double quantization as the magnitudes";
            return Err(Error::option("scheme", scheme, expected));
        }
        let magnitudes = match magnitudes {
            Magnitudes::Full(full) => {
                expect("magnitudes", &full, &[Kind::Float], &[blocks], device)?;
                finite("magnitudes", &full)?;
                Magnitudes::Full(full.f_contiguous()?)
            }
            Magnitudes::Quantized {
                codes,
                code_book,
                scales,
                offset,
            } => {
                let count = crate::codec::dynamic::BLOCK as i64;
                let groups = blocks / count + i64::from(blocks % count != 0);
                expect(
                    "magnitudes' codes",
                    &codes,
                    &[Kind::Uint8],
                    &[blocks],
                    device,
                )?;
                expect(
                    "magnitudes' book",
                    &code_book,
                    &[Kind::Float],
                    &[256],
                    device,
                )?;
                expect(
                    "magnitudes' scales",
                    &scales,
                    &[Kind::Float],
                    &[groups],
                    device,
                )?;
                finite("magnitudes' book", &code_book)?;
                finite("magnitudes' scales", &scales)?;
                if !offset.is_finite() {
                    return Err(Error::option("magnitudes' offset", offset, "finite"));
                }
                Magnitudes::Quantized {
                    codes: codes.f_contiguous()?,
                    code_book: code_book.f_contiguous()?,
                    scales: scales.f_contiguous()?,
                    offset,
                }
            }
        };
        let storage = Storage::Blocks { codes, magnitudes };
        Ok(QuantizedWeight::of(scheme, [outputs, inputs], storage))
    }

    /// Creates an MXFP4 weight `(O, I)`, as gpt-oss and compressed-tensors store it: `codes` u8 `(O, I/2)`, two 4-bit
    /// floats in a byte, the first in the low half, and `scales` u8 `(O, I/32)`, the exponents of powers of two with bias
    /// 127. gpt-oss's `(O, I/32, 16)` codes are accepted as well.
    ///
    /// ```
    /// use overdrive_quantization::QuantizedWeight;
    /// use tch::{Kind, Tensor};
    ///
    /// // 32 times the code 3, which is 1.5, with a scale of 2⁴.
    /// let codes = Tensor::from_slice(&[0x33_u8; 16]).view([1, 16]);
    /// let scales = Tensor::from_slice(&[131_u8]).view([1, 1]);
    /// let weight = QuantizedWeight::from_mxfp4(codes, scales)?;
    /// assert_eq!(weight.dequantize(Kind::Float)?.double_value(&[0, 31]), 24.0);
    /// # Ok::<(), overdrive_quantization::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Common`] for tensors of another shape, dtype or device, and [`Error::Values`] for a scale that is NaN.
    pub fn from_mxfp4(codes: Tensor, scales: Tensor) -> Result<QuantizedWeight> {
        let numbers = microscaling::e8m0_numbers();
        microscaled(Scheme::Mxfp4, codes, scales, &numbers, |scales| {
            Ok(scales.f_eq(i64::from(microscaling::E8M0_NAN))?)
        })
    }

    /// Creates an NVFP4 weight `(O, I)`, as compressed-tensors stores it: `codes` u8 `(O, I/2)`, two 4-bit floats in a byte,
    /// the first in the low half; `scales` e4m3 or u8 with its bits, `(O, I/16)`; the elements are the products of both
    /// divided by `global_scale`.
    ///
    /// # Errors
    /// As [`from_mxfp4`](Self::from_mxfp4), and for a `global_scale` that is not positive and finite.
    pub fn from_nvfp4(codes: Tensor, scales: Tensor, global_scale: f32) -> Result<QuantizedWeight> {
        if !(global_scale.is_normal() && global_scale > 0.0) {
            return Err(Error::option(
                "global_scale",
                global_scale,
                "positive and finite",
            ));
        }
        let scales = match scales.kind() {
            Kind::Float8e4m3fn => scales.f_view_dtype(Kind::Uint8)?,
            _ => scales,
        };
        let numbers = microscaling::e4m3_numbers(global_scale);
        finite("global_scale", &Tensor::f_from_slice(&numbers)?)?;
        microscaled(Scheme::Nvfp4, codes, scales, &numbers, |scales| {
            Ok(scales.f_bitwise_and(0x7F)?.f_eq(i64::from(fp8::NAN))?)
        })
    }
}

/// Builds a weight of 4-bit floats, the first of two in the low half of a byte, with the numbers of its scales.
fn microscaled(
    scheme: Scheme,
    codes: Tensor,
    scales: Tensor,
    numbers: &[f32; 256],
    is_nan: impl Fn(&Tensor) -> Result<Tensor>,
) -> Result<QuantizedWeight> {
    let (_, options) = scheme.blocks()?;
    let block = options.block_size as i64;
    let codes = match codes.size()[..] {
        [_, _, _] => codes.f_flatten(1, 2)?,
        _ => codes,
    };
    let [outputs, width] = matrix("codes", &codes, &[Kind::Uint8])?;
    let inputs = width * 2;
    scheme.validate(inputs)?;
    let shape = [outputs, inputs / block];
    expect("scales", &scales, &[Kind::Uint8], &shape, codes.device())?;
    if is_nan(&scales)?.f_any()?.f_int64_value(&[])? != 0 {
        return Err(Error::values("scales", "NaN", "finite numbers"));
    }
    let high = codes.f_bitwise_left_shift_tensor_scalar(4)?;
    let low = codes.f_bitwise_right_shift_tensor_scalar(4)?;
    let scales = scales.f_contiguous()?.f_flatten(0, -1)?;
    let magnitudes = microscaling::magnitudes(scales, numbers)?;
    let codes = high.f_bitwise_or_tensor(&low)?;
    QuantizedWeight::from_blocks(scheme, [outputs, inputs], codes, magnitudes)
}

/// Returns the shape of a matrix with at least one element, of one of `kinds`.
fn matrix(name: &'static str, tensor: &Tensor, kinds: &[Kind]) -> Result<[i64; 2]> {
    check_kind(name, tensor, kinds)?;
    match tensor.size()[..] {
        [rows, columns] if rows > 0 && columns > 0 => Ok([rows, columns]),
        _ => {
            let expected = "a matrix with at least one element";
            Err(Error::shape(name, tensor.size(), expected))
        }
    }
}

fn check_kind(name: &'static str, tensor: &Tensor, kinds: &[Kind]) -> Result<()> {
    if kinds.contains(&tensor.kind()) {
        return Ok(());
    }
    let names: Vec<String> = kinds.iter().map(|kind| format!("{kind:?}")).collect();
    Err(overdrive_core::Error::dtype(name, tensor.kind(), names.join(" or ")).into())
}

fn expect(
    name: &'static str,
    tensor: &Tensor,
    kinds: &[Kind],
    shape: &[i64],
    device: Device,
) -> Result<()> {
    check_kind(name, tensor, kinds)?;
    if tensor.size() != shape {
        return Err(Error::shape(name, tensor.size(), format!("{shape:?}")));
    }
    if tensor.device() != device {
        let expected = format!("on {device:?}, as the codes are");
        return Err(overdrive_core::Error::device(name, tensor.device(), expected).into());
    }
    Ok(())
}

/// Checks for finite f32 scales, one for each of `outputs` rows.
fn check_row_scales(scales: &Tensor, outputs: i64, device: Device) -> Result<()> {
    check_scales(scales, &[outputs], device)
}

fn check_scales(scales: &Tensor, shape: &[i64], device: Device) -> Result<()> {
    expect("scales", scales, &[Kind::Float], shape, device)?;
    finite("scales", scales)
}

/// Checks that no value is infinite or NaN.
fn finite(name: &'static str, tensor: &Tensor) -> Result<()> {
    let first = match (tensor.device(), tensor.is_contiguous(), tensor.kind()) {
        // A scan of the slice allocates nothing; the operators below make three tensors of the size.
        (Device::Cpu, true, Kind::Float) => {
            elements::<f32>(tensor)?.iter().position(|x| !x.is_finite())
        }
        (Device::Cpu, true, Kind::Half) => {
            elements::<f16>(tensor)?.iter().position(|x| !x.is_finite())
        }
        _ => {
            let bad = tensor
                .f_isfinite()?
                .f_logical_not()?
                .f_flatten(0, -1)?
                .f_nonzero()?;
            match bad.size()[0] {
                0 => None,
                _ => Some(bad.f_int64_value(&[0, 0])?.unsigned_abs() as usize),
            }
        }
    };
    match first {
        None => Ok(()),
        Some(index) => {
            let number = tensor.f_flatten(0, -1)?.f_double_value(&[index as i64])?;
            let found = format!("{number} at index {index}");
            Err(Error::values(name, found, "finite values"))
        }
    }
}

/// Checks that `order` holds each of `0..len` once.
fn permutation(order: &Tensor) -> Result<()> {
    let order = order.f_to_device(Device::Cpu)?.f_contiguous()?;
    let order = elements::<i32>(&order)?;
    let mut seen = vec![false; order.len()];
    for (index, &input) in order.iter().enumerate() {
        let slot = usize::try_from(input)
            .ok()
            .and_then(|input| seen.get_mut(input));
        if slot.is_none_or(|slot| std::mem::replace(slot, true)) {
            let found = format!("{input} at index {index}");
            let expected = format!("each of 0..{} once", order.len());
            return Err(Error::values("order", found, expected));
        }
    }
    Ok(())
}

/// Returns the bytes of the codes, copied to the CPU.
pub(crate) fn code_bytes(codes: &Tensor) -> Result<Vec<u8>> {
    let codes = codes.f_to_device(Device::Cpu)?.f_contiguous()?;
    Ok(bytes(&codes)?.to_vec())
}
