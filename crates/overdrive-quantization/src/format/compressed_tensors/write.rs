//! Writing: from a weight to the tensors of a file.

use tch::{Device, Kind, Tensor};

use super::args::{QuantizationArgs, Strategy};
use super::config::CompressedTensorsConfig;
use crate::codec::microscaling;
use crate::constructors::code_bytes;
use crate::format::fp8::scales_of_blocks;
use crate::weight::{Magnitudes, Storage};
use crate::{Error, GroupOptions, QuantizedWeight, Result, Scheme};
use overdrive_kernels::tensors::elements;

impl CompressedTensorsConfig {
    /// Returns the tensors that a file has for a weight.
    pub(in crate::format) fn write(
        &self,
        weight: &QuantizedWeight,
        module: &str,
    ) -> Result<Vec<(String, Tensor)>> {
        let named = |part: &str, tensor: Tensor| (format!("{module}.{part}"), tensor);
        let shape = || Tensor::f_from_slice(&weight.size());
        let weight = &weight.in_rows()?;
        match &weight.storage {
            Storage::Int8 { codes, scales } => {
                let scale = named("weight_scale", scales.f_unsqueeze(1)?);
                // The library stores W8A8 as bytes (`int-quantized`), and weight-only INT8 as words
                // (`pack-quantized`).
                if weight.scheme != Scheme::Int8WeightOnly {
                    return Ok(vec![named("weight", codes.shallow_clone()), scale]);
                }
                let packed = packed(&code_bytes(codes)?, weight.inputs, 8, 0x80)?;
                Ok(vec![
                    named("weight_packed", packed),
                    scale,
                    named("weight_shape", shape()?),
                ])
            }
            Storage::Fp8 { codes, scales } => {
                let scales = match weight.scheme {
                    Scheme::Fp8Blocks => scales_of_blocks(scales, module)?,
                    _ => scales.f_unsqueeze(1)?,
                };
                Ok(vec![
                    named("weight", codes.f_view_dtype(Kind::Float8e4m3fn)?),
                    named("weight_scale", scales),
                ])
            }
            Storage::Grouped {
                codes,
                scales,
                offsets,
                order: None,
            } => {
                let Scheme::Grouped(options) = weight.scheme else {
                    return Err(unsupported(weight));
                };
                let flip = match (options.bits, codes.kind()) {
                    (8, Kind::Int8) => 0x80,
                    _ => 0,
                };
                let width = codes.size()[1];
                let args = self.group_of(module)?.and_then(|group| group.weights);
                let groups = args
                    .as_ref()
                    .and_then(|args| groups_of(args, weight.inputs));
                let of_groups = |numbers: &Tensor| of_groups(numbers, groups, module);
                let scales = &of_groups(scales)?;
                let mut tensors = vec![
                    named(
                        "weight_packed",
                        packed(&code_bytes(codes)?, width, options.bits, flip)?,
                    ),
                    named("weight_scale", scales.shallow_clone()),
                    named("weight_shape", shape()?),
                ];
                // Signed codes begin at -128.
                let first = if flip == 0 { 0.0 } else { 128.0 };
                let (offsets, first) = match offsets {
                    Some(offsets) => (of_groups(offsets)?, first),
                    // All zero points of the weight are the middle, which its configuration does not say.
                    None if args.is_some_and(|args| !args.symmetric) => {
                        let middle = 1u8 << (options.bits - 1);
                        (scales.f_zeros_like()?, f32::from(middle))
                    }
                    None => return Ok(tensors),
                };
                let zeros = packed_zeros(weight, module, options, scales, &offsets, first)?;
                tensors.push(named("weight_zero_point", zeros));
                Ok(tensors)
            }
            Storage::Blocks {
                codes,
                magnitudes:
                    Magnitudes::Quantized {
                        codes: scales,
                        code_book,
                        ..
                    },
            } if matches!(weight.scheme, Scheme::Mxfp4 | Scheme::Nvfp4) => {
                let rows = |tensor: &Tensor| tensor.f_view([weight.outputs, -1]);
                let packed = named("weight_packed", rows(&low_half_first(codes)?)?);
                if weight.scheme == Scheme::Mxfp4 {
                    return Ok(vec![packed, named("weight_scale", rows(scales)?)]);
                }
                let numbers = code_book.f_to_device(Device::Cpu)?;
                let Some(global) = microscaling::global_scale(elements::<f32>(&numbers)?) else {
                    return Err(unsupported(weight));
                };
                let scales = rows(&scales.f_view_dtype(Kind::Float8e4m3fn)?)?;
                let global = Tensor::f_from_slice(&[global])?.f_to_device(scales.device())?;
                Ok(vec![
                    packed,
                    named("weight_scale", scales),
                    named("weight_global_scale", global),
                ])
            }
            _ => Err(unsupported(weight)),
        }
    }
}

/// Returns the number of groups in a row of a weight; `None` if its configuration does not say.
fn groups_of(args: &QuantizationArgs, inputs: i64) -> Option<i64> {
    match args.strategy()? {
        Strategy::Group(size) => Some((inputs + size - 1) / size),
        Strategy::Tensor | Strategy::Channel => Some(1),
        Strategy::TensorGroup(_) | Strategy::Block => None,
    }
}

/// Returns the numbers of `groups` groups in each row. Reading splits groups of other sizes than the kernels have, and
/// repeats their numbers.
fn of_groups(numbers: &Tensor, groups: Option<i64>, module: &str) -> Result<Tensor> {
    let [outputs, stored] = [0, 1].map(|axis| numbers.size()[axis]);
    let groups = groups.unwrap_or(stored);
    if groups == stored {
        return Ok(numbers.shallow_clone());
    }
    if stored % groups == 0 {
        let parts = numbers.f_view([outputs, groups, -1])?;
        let firsts = parts.f_narrow(2, 0, 1)?;
        if firsts.f_expand_as(&parts)?.f_equal(&parts)? {
            return Ok(firsts.f_squeeze_dim(2)?.f_contiguous()?);
        }
    }
    Err(Error::BadWeight {
        name: format!("{module}.weight"),
        reason: format!(
            "it has {stored} groups in a row, and its configuration has {groups}; dequantize the model first"
        ),
    })
}

/// Returns bytes of two codes with the first one in the low half, as files have it.
pub(in crate::format) fn low_half_first(codes: &Tensor) -> Result<Tensor> {
    let high = codes.f_bitwise_left_shift_tensor_scalar(4)?;
    let low = codes.f_bitwise_right_shift_tensor_scalar(4)?;
    Ok(high.f_bitwise_or_tensor(&low)?)
}

/// Packs rows of `width` bytes, each xor `flip`, into words; the last word of a row is padded with zeros.
fn packed(codes: &[u8], width: i64, bits: u8, flip: u8) -> Result<Tensor> {
    // `width` is a dimension of the codes.
    let width = match bits {
        _ if width > 0 => width.unsigned_abs() as usize,
        _ => 1,
    };
    let words = width.div_ceil(4);
    let mut rows = vec![0u8; codes.len() / width * words * 4];
    for (row, codes) in rows
        .chunks_exact_mut(words * 4)
        .zip(codes.chunks_exact(width))
    {
        for (to, code) in row.iter_mut().zip(codes) {
            *to = code ^ flip;
        }
    }
    words_tensor(&rows, &[(codes.len() / width) as i64, words as i64])
}

fn words_tensor(bytes: &[u8], shape: &[i64]) -> Result<Tensor> {
    let (chunks, _) = bytes.as_chunks::<4>();
    let words: Vec<i32> = chunks
        .iter()
        .map(|bytes| i32::from_le_bytes(*bytes))
        .collect();
    Ok(Tensor::f_from_slice(&words)?.f_view(shape)?)
}

/// Packs the zero points along the outputs, `(⌈O·bits/32⌉, G)`.
fn packed_zeros(
    weight: &QuantizedWeight,
    module: &str,
    options: GroupOptions,
    scales: &Tensor,
    offsets: &Tensor,
    first: f32,
) -> Result<Tensor> {
    let [scales, offsets] = [scales, offsets].map(|tensor| {
        let tensor = tensor.f_to_device(Device::Cpu)?.f_to_kind(Kind::Float)?;
        tensor.f_contiguous()
    });
    let (scales, offsets) = (scales?, offsets?);
    let groups = scales.size()[1].unsigned_abs() as usize;
    let outputs = weight.outputs.unsigned_abs() as usize;
    let per_word = 32 / usize::from(options.bits);
    let rows = outputs.div_ceil(per_word);
    let mut words = vec![0u32; rows * groups];
    let most = if options.bits == 4 { 15.0 } else { 255.0 };
    let pairs = elements::<f32>(&scales)?
        .iter()
        .zip(elements::<f32>(&offsets)?);
    for (index, (scale, offset)) in pairs.enumerate() {
        let exact = if *scale == 0.0 { 0.0 } else { -offset / scale } + first;
        let zero = exact.round_ties_even();
        // Scale and offset are rounded, so a zero point is computed to within 2⁻²² of itself.
        if !(0.0..=most).contains(&zero) || (exact - zero).abs() > 1e-3 {
            return Err(Error::BadWeight {
                name: format!("{module}.weight"),
                reason: format!(
                    "its group {} has the zero point {exact}; for compressed-tensors it must be an integer from 0 \
                     to {most}; dequantize the weight and quantize it again",
                    index % groups
                ),
            });
        }
        let (row, group) = (index / groups, index % groups);
        let shift = row % per_word * usize::from(options.bits);
        words[row / per_word * groups + group] |= (zero as u32) << shift;
    }
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    words_tensor(&bytes, &[rows as i64, groups as i64])
}

fn unsupported(weight: &QuantizedWeight) -> Error {
    let found = match &weight.storage {
        Storage::Grouped { order: Some(_), .. } => "groups of reordered inputs".to_owned(),
        _ => weight.scheme.to_string(),
    };
    let expected = "8 bits by row, groups in order, fp8, mxfp4 or nvfp4, the schemes of compressed-tensors; dequantize \
                    the weight and quantize it again";
    Error::option("scheme", found, expected)
}
