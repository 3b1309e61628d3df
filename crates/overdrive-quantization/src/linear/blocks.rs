//! Matmuls with a weight that is dequantized a block of outputs at a time: each block is used while it is in
//! a cache, and the next one overwrites its memory.

use overdrive_sys::gemm::{mm_into, product_kind};
use tch::{Device, Kind, Tensor};

use crate::kernel::four_bit::{coded_weight, dequantize_rows};
use crate::weight::Storage;
use crate::{QuantizedWeight, Result};
use overdrive_kernels::tensors::Fresh;
use overdrive_kernels::with_element;

/// The elements of a dequantized block: enough for a matmul at full speed, few enough for the last cache.
const BLOCK: i64 = 1 << 20;

/// Computes `y = x · weightᵀ + bias` for `x (rows, I)` in the dtype of the matmul and a view `y (rows, O)`.
pub(super) fn forward(
    x: &Tensor,
    weight: &QuantizedWeight,
    bias: Option<&Tensor>,
    y: &Tensor,
) -> Result<()> {
    let computed = product_kind(x.device(), x.kind());
    let x = x.f_to_kind(computed)?;
    each_block(weight, computed, |first, block| {
        let count = block.size()[0];
        let mut columns = y.f_narrow(1, first, count)?;
        let part = Tensor::f_empty([x.size()[0], count], (computed, x.device()))?;
        if let Some(bias) = bias {
            part.shallow_clone()
                .f_copy_(&bias.f_narrow(0, first, count)?)?;
        }
        mm_into(&part, &x, &block.f_tr()?, bias.is_some())?;
        columns.f_copy_(&part)?;
        Ok(())
    })
}

/// Returns `Σ dyᵢ · weightᵢ`, in the dtype and leading shape of `dy (…, ΣO)`.
pub(super) fn backward(dy: &Tensor, weights: &[QuantizedWeight]) -> Result<Tensor> {
    let mut size = dy.size();
    let outputs = size.pop().unwrap_or(0);
    let inputs = weights.first().map_or(0, |weight| weight.inputs);
    size.push(inputs);
    let dx = if dy.numel() == 0 || inputs == 0 {
        Tensor::f_zeros(&size, (dy.kind(), dy.device()))?
    } else {
        let computed = product_kind(dy.device(), dy.kind());
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

/// Calls `body` with the blocks `(outputs, I)` of the dense weight, in order, each with its first output.
fn each_block(
    weight: &QuantizedWeight,
    kind: Kind,
    mut body: impl FnMut(i64, &Tensor) -> Result<()>,
) -> Result<()> {
    // A GPU needs large matmuls to be busy, and its blocks need not fit a cache.
    let numbers = match weight.device() {
        Device::Cpu => BLOCK,
        _ => 32 * BLOCK,
    };
    let count = (numbers / weight.inputs.max(1)).clamp(1, weight.outputs.max(1));
    let parts = (0..weight.outputs)
        .step_by(count.unsigned_abs() as usize)
        .map(|first| (first, count.min(weight.outputs - first)));
    let coded = match kind {
        Kind::Float | Kind::BFloat16 | Kind::Half => coded_weight(weight)?,
        _ => None,
    };
    if let Some(map) = coded {
        return with_element!(kind, T => {
            let mut scratch = Fresh::<T>::new(&[count, weight.inputs])?;
            for (first, count) in parts {
                let rows = first.unsigned_abs() as usize..(first + count).unsigned_abs() as usize;
                dequantize_rows(&map, rows, scratch.elements_mut()?);
                body(first, &scratch.rows(count)?)?;
            }
            Ok(())
        });
    }
    for (first, count) in parts {
        match outputs(weight, first, count)? {
            Some(part) => body(first, &part.dequantize(kind)?)?,
            None => return body(0, &weight.dequantize(kind)?),
        }
    }
    Ok(())
}

/// Returns a view of some outputs of a weight; `None` if its blocks of codes or its tiles may span outputs.
fn outputs(weight: &QuantizedWeight, first: i64, count: i64) -> Result<Option<QuantizedWeight>> {
    if matches!(weight.storage, Storage::Blocks { .. } | Storage::Tiled(_)) {
        return Ok(None);
    }
    let storage = weight.storage.narrowed(first, count)?;
    let size = [count, weight.inputs];
    Ok(Some(QuantizedWeight::of(weight.scheme, size, storage)))
}
