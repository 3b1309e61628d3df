//! Weights from codes that are there already.

use half::f16;
use tch::{Device, Kind, Tensor};

use crate::codec::fp8;
use crate::tensors::{bytes, elements};
use crate::weight::{Magnitudes, Storage};
use crate::{Error, GroupOptions, QuantizedWeight, Result, Scheme};

/// Codes and scales of groups, for [`QuantizedWeight::from_grouped`]: `w = (code − zero) · scale + offset`.
///
/// Without offsets `zero` is 8 for codes of 4 bits and 0 for signed bytes; with offsets it is 0.
#[derive(Debug)]
pub struct GroupedParts {
    /// 4 or 8.
    pub bits: u8,
    /// 4 bits: u8 `(O, I/2)`, input `2j` in the low half of byte `j`. 8 bits: i8 `(O, I)`, or u8 where
    /// there are offsets.
    pub codes: Tensor,
    /// f32 or f16 `(O, G)`; `I/G` is the size of the groups: 16, 32, 64, 128 or 256.
    pub scales: Tensor,
    /// f32 or f16, of the shape of the scales.
    pub offsets: Option<Tensor>,
    /// i32 `(I,)`: which input stands at each place of the codes, where they are not in order; each once.
    pub order: Option<Tensor>,
}

impl QuantizedWeight {
    /// A weight of bytes with one scale a row: `codes` i8 `(O, I)`, `scales` f32 `(O,)`; `scheme` is one of
    /// the 8-bit schemes by row.
    ///
    /// # Errors
    /// [`Error::BadInput`] for tensors that do not fit and scales that are not finite,
    /// [`Error::BadOption`] for another scheme.
    pub fn from_int8(scheme: Scheme, codes: Tensor, scales: Tensor) -> Result<QuantizedWeight> {
        scheme.validate(0)?;
        match scheme {
            Scheme::Int8Dynamic | Scheme::Int8WeightOnly | Scheme::LlmInt8 { .. } => {}
            _ => return Err(wrong_scheme(scheme, "int8, int8-weight or llm-int8")),
        }
        let [outputs, inputs] = matrix("codes", &codes, &[Kind::Int8])?;
        check_row_scales(&scales, outputs, codes.device())?;
        let storage = Storage::Int8 {
            codes: codes.f_contiguous()?,
            scales: scales.f_contiguous()?,
        };
        Ok(QuantizedWeight::of(scheme, [outputs, inputs], storage))
    }

    /// A weight of 8-bit floats with one scale a row: `codes` u8 (or `Float8e4m3fn`) `(O, I)`, `scales` f32
    /// `(O,)`.
    ///
    /// # Errors
    /// [`Error::BadInput`] for tensors that do not fit, scales that are not finite and codes of NaN.
    pub fn from_fp8(codes: Tensor, scales: Tensor) -> Result<QuantizedWeight> {
        let [outputs, inputs] = matrix("codes", &codes, &[Kind::Uint8, Kind::Float8e4m3fn])?;
        check_row_scales(&scales, outputs, codes.device())?;
        let codes = codes.f_contiguous()?.f_view_dtype(Kind::Uint8)?;
        let nan = codes
            .f_bitwise_and(i64::from(fp8::NAN))?
            .f_eq(i64::from(fp8::NAN))?;
        if nan.f_any()?.f_int64_value(&[])? != 0 {
            return Err(bad("codes", "NaN among them", "numbers"));
        }
        let scales = scales.f_contiguous()?;
        let storage = Storage::Fp8 { codes, scales };
        Ok(QuantizedWeight::of(Scheme::Fp8, [outputs, inputs], storage))
    }

    /// A weight of integers in groups.
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
    /// [`Error::BadInput`] for tensors that do not fit one another, numbers that are not finite and an
    /// order that is none, [`Error::BadOption`] for other bits and sizes of groups.
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
            let found = format!("{groups} a row, for {inputs} inputs");
            return Err(bad("scales", &found, "a divisor of the inputs"));
        }
        let options = GroupOptions {
            bits,
            // Not negative, and a tensor in memory has as many elements.
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
        let storage = Storage::Grouped {
            codes: codes.f_contiguous()?,
            scales: scales.f_contiguous()?,
            offsets: contiguous(offsets)?,
            order: contiguous(order)?,
        };
        let scheme = Scheme::Grouped(options);
        Ok(QuantizedWeight::of(scheme, [outputs, inputs], storage))
    }

    /// A weight `(O, I)` of 4-bit code books in blocks, as bitsandbytes packs them: `codes` u8, two weights
    /// a byte, the first in the high half, in any shape. `scheme` is [`Scheme::Nf4`] or [`Scheme::Fp4`].
    ///
    /// # Errors
    /// [`Error::BadInput`] for tensors that do not fit and magnitudes that are not finite,
    /// [`Error::BadOption`] for another scheme, or one whose double quantization is not that of the
    /// magnitudes.
    pub fn from_blocks(
        scheme: Scheme,
        [outputs, inputs]: [i64; 2],
        codes: Tensor,
        magnitudes: Magnitudes,
    ) -> Result<QuantizedWeight> {
        scheme.validate(0)?;
        let options = match scheme {
            Scheme::Nf4(options) | Scheme::Fp4(options) => options,
            _ => return Err(wrong_scheme(scheme, "nf4 or fp4")),
        };
        let len = outputs
            .checked_mul(inputs)
            .filter(|_| outputs > 0 && inputs > 0);
        let Some(len) = len else {
            let found = format!("({outputs}, {inputs})");
            return Err(bad(
                "size",
                &found,
                "positive numbers of outputs and inputs",
            ));
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
            return Err(wrong_scheme(
                scheme,
                "one with the magnitudes' double quantization",
            ));
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
                    return Err(bad("magnitudes' offset", &offset.to_string(), "a number"));
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
}

fn bad(name: &'static str, found: &str, expected: &str) -> Error {
    Error::BadInput {
        name,
        found: found.to_owned(),
        expected: expected.to_owned(),
    }
}

fn wrong_scheme(scheme: Scheme, expected: &str) -> Error {
    Error::BadOption {
        option: "scheme",
        found: scheme.to_string(),
        expected: expected.to_owned(),
    }
}

/// The shape of a matrix with at least one element.
fn matrix(name: &'static str, tensor: &Tensor, kinds: &[Kind]) -> Result<[i64; 2]> {
    match tensor.size()[..] {
        [rows, columns] if rows > 0 && columns > 0 && kinds.contains(&tensor.kind()) => {
            Ok([rows, columns])
        }
        _ => {
            let found = format!("{:?} of {:?}", tensor.size(), tensor.kind());
            Err(bad(name, &found, &format!("a matrix of {}", listed(kinds))))
        }
    }
}

fn expect(
    name: &'static str,
    tensor: &Tensor,
    kinds: &[Kind],
    shape: &[i64],
    device: Device,
) -> Result<()> {
    if tensor.size() == shape && kinds.contains(&tensor.kind()) && tensor.device() == device {
        return Ok(());
    }
    let (size, kind, there) = (tensor.size(), tensor.kind(), tensor.device());
    let found = format!("{size:?} of {kind:?} on {there:?}");
    let expected = format!("{shape:?} of {} on {device:?}", listed(kinds));
    Err(bad(name, &found, &expected))
}

/// f32, one for each of `outputs` rows.
fn check_row_scales(scales: &Tensor, outputs: i64, device: Device) -> Result<()> {
    expect("scales", scales, &[Kind::Float], &[outputs], device)?;
    finite("scales", scales)
}

fn listed(kinds: &[Kind]) -> String {
    let names: Vec<String> = kinds.iter().map(|kind| format!("{kind:?}")).collect();
    names.join(" or ")
}

/// Refuses numbers that are infinite or NaN.
fn finite(name: &'static str, tensor: &Tensor) -> Result<()> {
    let first = match (tensor.device(), tensor.is_contiguous(), tensor.kind()) {
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
            let found = format!("{number} at place {index}");
            Err(bad(name, &found, "finite numbers"))
        }
    }
}

/// Refuses what does not name each of `0..len` once.
fn permutation(order: &Tensor) -> Result<()> {
    let order = order.f_to_device(Device::Cpu)?.f_contiguous()?;
    let order = elements::<i32>(&order)?;
    let mut seen = vec![false; order.len()];
    for (place, &input) in order.iter().enumerate() {
        let slot = usize::try_from(input)
            .ok()
            .and_then(|input| seen.get_mut(input));
        let twice = slot.is_none_or(|slot| std::mem::replace(slot, true));
        if twice {
            let found = format!("{input} at place {place}");
            let expected = format!("each of 0..{} once", order.len());
            return Err(bad("order", &found, &expected));
        }
    }
    Ok(())
}

/// The bytes of codes, for tests and writers on the CPU.
pub(crate) fn code_bytes(codes: &Tensor) -> Result<Vec<u8>> {
    let codes = codes.f_to_device(Device::Cpu)?.f_contiguous()?;
    Ok(bytes(&codes)?.to_vec())
}
