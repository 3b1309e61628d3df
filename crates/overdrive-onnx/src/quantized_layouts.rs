//! Quantized weights in the layouts of ONNX Runtime's operators, converted from the file layouts of
//! `overdrive-quantization`: compressed-tensors' for rows and groups, bitsandbytes' for code books of 16 values.

use overdrive_quantization::{GroupOptions, QuantizationConfig, QuantizedWeight, Scheme};
use tch::{Kind, Tensor};

use crate::{Error, Result};

/// A weight of 8-bit codes with one scale for each row.
#[derive(Debug)]
pub(crate) struct Rows {
    /// The codes `(O, I)`: i8, or e4m3 in u8.
    pub(crate) codes: Tensor,
    /// The scales, f32 `(O,)`.
    pub(crate) scales: Tensor,
}

/// The properties of a weight quantized in groups that must be known before it is written.
#[derive(Debug)]
pub(crate) struct Groups {
    pub(crate) bits: u8,
    pub(crate) group_size: usize,
    /// The zero points, u8 `(O, ⌈G·bits/8⌉)`, the first group in the low half of a byte; `None` for symmetric
    /// codes.
    pub(crate) zeros: Option<Tensor>,
}

/// A weight quantized in blocks with a code book.
#[derive(Debug)]
pub(crate) struct Blocks {
    /// If `true`, the code book is NF4's, else FP4's.
    pub(crate) normal: bool,
    pub(crate) block_size: usize,
    /// The values of the 16 codes.
    pub(crate) book: Vec<f32>,
    /// The codes, u8 `(⌈O·I/2⌉,)`.
    pub(crate) codes: Tensor,
    /// The largest magnitudes, f32 `(blocks,)`.
    pub(crate) magnitudes: Tensor,
}

/// The tensors that a file would hold, by their names without the module's.
struct Stored(Vec<(String, Tensor)>);

impl Stored {
    /// Writes the weight in the file layout of `scheme`.
    fn of(weight: &QuantizedWeight, scheme: Scheme) -> Result<Stored> {
        let layout = QuantizationConfig::for_scheme(scheme, Vec::new());
        Ok(Stored(layout.write_weight(weight, MODULE)?))
    }

    fn get(&self, part: &str) -> Option<&Tensor> {
        let own = format!("{MODULE}.{part}");
        let found = self.0.iter().find(|(name, _)| *name == own);
        found.map(|(_, tensor)| tensor)
    }

    fn part(&self, part: &str) -> Result<&Tensor> {
        self.get(part).ok_or_else(|| {
            let what = format!("the layout of a quantized weight lacks `{part}`");
            overdrive_core::Error::internal(what).into()
        })
    }
}

/// A module name; the tensors do not depend on it.
const MODULE: &str = "m";

/// Returns the codes and scales of one of the 8-bit schemes by row.
pub(crate) fn rows(weight: &QuantizedWeight) -> Result<Rows> {
    // The file layout of int8 stores the codes unchanged, and the other 8-bit schemes by row have the same codes.
    let (layout, own) = match weight.scheme() {
        Scheme::Fp8 => (Scheme::Fp8, None),
        Scheme::Int8WeightOnly => (Scheme::Int8WeightOnly, Some(weight.size())),
        _ => (Scheme::Int8Dynamic, None),
    };
    let stored = Stored::of(weight, layout)?;
    let codes = match own {
        // compressed-tensors packs them into words, each byte xor 128.
        Some([outputs, inputs]) => {
            let words = stored.part("weight_packed")?.f_view_dtype(Kind::Uint8)?;
            let bytes = words
                .f_view([outputs, -1])?
                .f_narrow(1, 0, inputs)?
                .f_bitwise_xor(128)?;
            bytes.f_contiguous()?.f_view_dtype(Kind::Int8)?
        }
        None => match weight.scheme() {
            Scheme::Fp8 => stored.part("weight")?.f_view_dtype(Kind::Uint8)?,
            _ => stored.part("weight")?.shallow_clone(),
        },
    };
    Ok(Rows {
        codes,
        scales: stored
            .part("weight_scale")?
            .f_to_kind(Kind::Float)?
            .f_view([-1])?,
    })
}

/// Returns the properties of a weight in groups.
///
/// # Errors
/// [`Error::Unsupported`] for groups that `MatMulNBits` does not read: those with fractional zero points or
/// reordered inputs.
pub(crate) fn groups(weight: &QuantizedWeight, name: &str) -> Result<Groups> {
    let options = group_options(weight);
    let stored = Stored::of(weight, weight.scheme()).map_err(|error| {
        Error::unsupported(
            format!("`{name}.weight`"),
            format!("quantized in groups that no operator of ONNX Runtime reads ({error})"),
            "quantize it again (`CausalLm::dequantize`, then `quantize`), or set \
             `dense_fallback` to write it dequantized",
        )
    })?;
    let zeros = stored.get("weight_zero_point");
    Ok(Groups {
        bits: options.bits,
        group_size: options.group_size,
        zeros: zeros
            .map(|words| row_zeros(words, weight, options))
            .transpose()?,
    })
}

fn group_options(weight: &QuantizedWeight) -> GroupOptions {
    match weight.scheme() {
        Scheme::Grouped(options) => options,
        _ => GroupOptions::default(),
    }
}

/// Repacks zero points to `(O, ⌈G·bits/8⌉)` from words `(⌈O·bits/32⌉, G)` that are packed along the outputs.
fn row_zeros(words: &Tensor, weight: &QuantizedWeight, options: GroupOptions) -> Result<Tensor> {
    let outputs = weight.size()[0];
    let per_word = 32 / i64::from(options.bits);
    let mask = (1i64 << options.bits) - 1;
    let wide = words.f_to_kind(Kind::Int64)?;
    let shifts: Vec<i64> = (0..per_word)
        .map(|at| 1 << (at * i64::from(options.bits)))
        .collect();
    let shifts = Tensor::f_from_slice(&shifts)?.f_view([1, -1, 1])?;
    // libtorch has no logical shift of signed words; a division that rounds down is an arithmetic one.
    let zeros = wide
        .f_unsqueeze(1)?
        .f_divide_tensor_mode(&shifts, "floor")?
        .f_bitwise_and(mask)?
        .f_flatten(0, 1)?
        .f_narrow(0, 0, outputs)?;
    if options.bits == 8 {
        return Ok(zeros.f_to_kind(Kind::Uint8)?.f_contiguous()?);
    }
    let groups = zeros.size()[1];
    // The zero points of a row fill whole bytes.
    let even = zeros.f_constant_pad_nd([0, groups % 2])?;
    let pairs = even.f_view([outputs, -1, 2])?;
    let (low, high) = (pairs.f_select(2, 0)?, pairs.f_select(2, 1)?);
    let bytes = low.f_add(&high.f_mul_scalar(16)?)?;
    Ok(bytes.f_to_kind(Kind::Uint8)?.f_contiguous()?)
}

/// Returns the codes, u8 `(O, I·bits/8)`, the first of two in the low half of a byte.
pub(crate) fn group_codes(weight: &QuantizedWeight) -> Result<Tensor> {
    let [outputs, inputs] = weight.size();
    let width = inputs * i64::from(group_options(weight).bits) / 8;
    let stored = Stored::of(weight, weight.scheme())?;
    // The words of a row may end with unused codes.
    let bytes = stored.part("weight_packed")?.f_view_dtype(Kind::Uint8)?;
    Ok(bytes
        .f_view([outputs, -1])?
        .f_narrow(1, 0, width)?
        .f_contiguous()?)
}

/// Returns the scales `(O, G)`.
pub(crate) fn group_scales(weight: &QuantizedWeight) -> Result<Tensor> {
    let stored = Stored::of(weight, weight.scheme())?;
    Ok(stored.part("weight_scale")?.shallow_clone())
}

/// Returns the codes and magnitudes of NF4 and FP4.
pub(crate) fn blocks(weight: &QuantizedWeight) -> Result<Blocks> {
    let (normal, options) = match weight.scheme() {
        Scheme::Fp4(options) => (false, options),
        Scheme::Nf4(options) => (true, options),
        other => {
            let what = format!("a weight quantized by {other} has no code book");
            return Err(overdrive_core::Error::internal(what).into());
        }
    };
    let stored = Stored::of(weight, weight.scheme())?;
    let magnitudes = stored.part("weight.absmax")?;
    let magnitudes = match stored.get("weight.nested_absmax") {
        None => magnitudes.shallow_clone(),
        Some(scales) => nested(&stored, magnitudes, scales, normal)?,
    };
    Ok(Blocks {
        normal,
        block_size: options.block_size,
        book: Vec::try_from(stored.part("weight.quant_map")?.f_view([-1])?)?,
        codes: stored.part("weight")?.f_view([-1])?,
        magnitudes: magnitudes.f_to_kind(Kind::Float)?,
    })
}

/// Dequantizes magnitudes that are quantized themselves: `book[code] · scale + offset`, with one scale for 256.
fn nested(stored: &Stored, codes: &Tensor, scales: &Tensor, normal: bool) -> Result<Tensor> {
    let name = if normal { "nf4" } else { "fp4" };
    let state = stored.part(&format!("weight.quant_state.bitsandbytes__{name}"))?;
    let state = Vec::<u8>::try_from(state.f_view([-1])?)?;
    // A state that is not JSON has no offset, which is reported below.
    let state: serde_json::Value = serde_json::from_slice(&state).unwrap_or_default();
    let offset = state.get("nested_offset").and_then(|value| value.as_f64());
    let offset = offset.ok_or_else(|| {
        overdrive_core::Error::internal("the state of a quantized weight lacks `nested_offset`")
    })?;
    let book = stored.part("weight.nested_quant_map")?;
    let numbers = book.f_index_select(0, &codes.f_view([-1])?.f_to_kind(Kind::Int64)?)?;
    let count = numbers.size()[0];
    // bitsandbytes quantizes magnitudes in blocks of 256; the last block may be shorter.
    let each = scales.f_repeat_interleave_self_int(256, 0, None)?;
    Ok(numbers
        .f_mul(&each.f_narrow(0, 0, count)?)?
        .f_add_scalar(offset)?)
}
