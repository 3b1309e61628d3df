//! Products with a weight that is dequantized a block of outputs at a time: the block is made, used
//! while it is in a cache, and its memory made into the next one.

use overdrive_sys::product::mm_into;
use tch::{Device, Kind, Tensor};

use crate::weight::{Magnitudes, Storage};
use crate::{QuantizedWeight, Result};

/// Numbers of a dequantized block: large enough for a product at full speed, and in the last cache.
const BLOCK: i64 = 1 << 20;

/// `y = x · weightᵀ + bias` for `x (rows, I)` of the kind of the product and a view `y (rows, O)`.
pub(super) fn forward(
    x: &Tensor,
    weight: &QuantizedWeight,
    bias: Option<&Tensor>,
    y: &Tensor,
) -> Result<()> {
    let computed = product_kind(x);
    let x = x.f_to_kind(computed)?;
    each_block(weight, computed, |first, block| {
        let count = block.size()[0];
        let mut columns = y.f_narrow(1, first, count)?;
        let part = Tensor::f_empty([x.size()[0], count], (computed, x.device()))?;
        if let Some(bias) = bias {
            part.shallow_clone().f_copy_(&bias.f_narrow(0, first, count)?)?;
        }
        mm_into(&part, &x, &block.f_tr()?, bias.is_some())?;
        columns.f_copy_(&part)?;
        Ok(())
    })
}

/// `Σ dyᵢ · weightᵢ`, of the kind and leading shape of `dy (…, ΣO)`.
pub(super) fn backward(dy: &Tensor, weights: &[QuantizedWeight]) -> Result<Tensor> {
    let mut size = dy.size();
    let outputs = size.pop().unwrap_or(0);
    let inputs = weights.first().map_or(0, |weight| weight.inputs);
    size.push(inputs);
    let dx = if dy.numel() == 0 || inputs == 0 {
        Tensor::f_zeros(&size, (dy.kind(), dy.device()))?
    } else {
        let computed = product_kind(dy);
        let rows = dy.f_reshape([-1, outputs])?.f_to_kind(computed)?;
        let dx = Tensor::f_empty([rows.size()[0], inputs], (computed, dy.device()))?;
        let (mut column, mut begun) = (0, false);
        for weight in weights {
            each_block(weight, computed, |first, block| {
                let part = rows.f_narrow(1, column + first, block.size()[0])?;
                mm_into(&dx, &part, block, begun)?;
                begun = true;
                Ok(())
            })?;
            column += weight.outputs;
        }
        dx.f_to_kind(dy.kind())?.f_view(size.as_slice())?
    };
    Ok(dx)
}

/// The kind that libtorch multiplies fast: on a CPU f16 is not among them.
fn product_kind(x: &Tensor) -> Kind {
    match (x.device(), x.kind()) {
        (Device::Cpu, Kind::Half) => Kind::Float,
        (_, kind) => kind,
    }
}

/// Calls `body` with one block `(outputs, I)` of the dense weight after another and its first output.
fn each_block(
    weight: &QuantizedWeight,
    kind: Kind,
    mut body: impl FnMut(i64, &Tensor) -> Result<()>,
) -> Result<()> {
    // A GPU is kept busy by large products, not by caches.
    let numbers = match weight.device() {
        Device::Cpu => BLOCK,
        _ => 32 * BLOCK,
    };
    let unit = unit(weight);
    let count = (numbers / weight.inputs.max(1)).max(1);
    let count = ((count + unit - 1) / unit).saturating_mul(unit);
    let mut first = 0;
    while first < weight.outputs {
        let part = count.min(weight.outputs - first);
        if part == weight.outputs {
            return body(0, &weight.dequantize(kind)?);
        }
        body(first, &outputs(weight, first, part)?.dequantize(kind)?)?;
        first += part;
    }
    Ok(())
}

/// How many outputs belong together: blocks of magnitudes lie along the flattened weight.
fn unit(weight: &QuantizedWeight) -> i64 {
    let Storage::Blocks { codes, magnitudes } = &weight.storage else {
        return 1;
    };
    let (blocks, together) = match magnitudes {
        Magnitudes::Full(full) => (full.numel(), 1),
        Magnitudes::Quantized { codes, .. } => (codes.numel(), 256),
    };
    let numbers = 2 * codes.numel();
    let block = numbers.div_ceil(blocks.max(1)) * together;
    let Ok(block) = i64::try_from(block) else {
        return weight.outputs;
    };
    (block / gcd(block, weight.inputs).max(1)).max(1)
}

fn gcd(a: i64, b: i64) -> i64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Some outputs of a weight, in its memory; `first` is a multiple of the [`unit`].
fn outputs(weight: &QuantizedWeight, first: i64, count: i64) -> Result<QuantizedWeight> {
    let rows = |tensor: &Tensor| tensor.f_narrow(0, first, count);
    // The part of a flat tensor that has `whole` numbers for all outputs; the last may be a part.
    let share = |tensor: &Tensor| {
        let whole = i64::try_from(tensor.numel()).unwrap_or(i64::MAX);
        let numbers = weight.outputs * weight.inputs;
        let of = |outputs: i64| {
            let numerator = i128::from(outputs * weight.inputs) * i128::from(whole);
            (numerator, i128::from(numbers))
        };
        let (start, end) = (of(first), of(first + count));
        let start = i64::try_from(start.0 / start.1).unwrap_or(whole);
        let end = i64::try_from((end.0 + end.1 - 1) / end.1).unwrap_or(whole);
        tensor.f_narrow(0, start, end.min(whole) - start)
    };
    let storage = match &weight.storage {
        Storage::Int8 { codes, scales } => Storage::Int8 {
            codes: rows(codes)?,
            scales: rows(scales)?,
        },
        Storage::Fp8 { codes, scales } => Storage::Fp8 {
            codes: rows(codes)?,
            scales: rows(scales)?,
        },
        Storage::Grouped {
            codes,
            scales,
            offsets,
            order,
        } => Storage::Grouped {
            codes: rows(codes)?,
            scales: rows(scales)?,
            offsets: offsets.as_ref().map(rows).transpose()?,
            order: order.as_ref().map(Tensor::shallow_clone),
        },
        Storage::Blocks { codes, magnitudes } => Storage::Blocks {
            codes: share(codes)?,
            magnitudes: match magnitudes {
                Magnitudes::Full(full) => Magnitudes::Full(share(full)?),
                Magnitudes::Quantized {
                    codes,
                    code_book,
                    scales,
                    offset,
                } => Magnitudes::Quantized {
                    codes: share(codes)?,
                    code_book: code_book.shallow_clone(),
                    scales: share(scales)?,
                    offset: *offset,
                },
            },
        },
    };
    Ok(QuantizedWeight {
        storage,
        outputs: count,
        ..*weight
    })
}
