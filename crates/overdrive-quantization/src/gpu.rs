//! The GPU kernels of overdrive-gpu for weights of 4 bits, and of 8 bits by row; `None` where libtorch's operators are used.

use overdrive_gpu::{EightBitWeight, FourBitNumbers, FourBitWeight, MOST_ROWS};
use tch::{Kind, Tensor};

use crate::weight::Storage;
use crate::{QuantizedWeight, Result};

/// Returns `x (rows, I)` times the weight, `(rows, O)`, if there are few rows and a kernel.
pub(crate) fn few_rows(x: &Tensor, weight: &QuantizedWeight) -> Result<Option<Tensor>> {
    if !(1..=MOST_ROWS).contains(&x.size()[0]) || x.numel() == 0 {
        return Ok(None);
    }
    let Some(kernels) = overdrive_gpu::kernels(x.device())? else {
        return Ok(None);
    };
    if let Some(coded) = eight_bit(weight) {
        let kernels = kernels.eight_bit(x.kind(), &coded)?;
        return Ok(kernels
            .map(|kernels| kernels.product(x, &coded))
            .transpose()?);
    }
    with_weight(weight, |coded| {
        let Some(kernels) = kernels.four_bit(x.kind(), coded)? else {
            return Ok(None);
        };
        // The columns of the codes may be in another order than the inputs.
        Ok(Some(match &weight.storage {
            Storage::Grouped {
                order: Some(order), ..
            } => kernels.product(&x.f_index_select(1, order)?, coded)?,
            _ => kernels.product(x, coded)?,
        }))
    })
}

/// Returns the dense weight `(O, I)`, if there is a kernel.
pub(crate) fn dequantize(weight: &QuantizedWeight, kind: Kind) -> Result<Option<Tensor>> {
    let reordered = matches!(weight.storage, Storage::Grouped { order: Some(_), .. });
    let Some(kernels) = overdrive_gpu::kernels(weight.device())?.filter(|_| !reordered) else {
        return Ok(None);
    };
    if let Some(coded) = eight_bit(weight) {
        let kernels = kernels.eight_bit(kind, &coded)?;
        return Ok(kernels
            .map(|kernels| kernels.dequantize(&coded))
            .transpose()?);
    }
    with_weight(weight, |coded| match kernels.four_bit(kind, coded)? {
        Some(kernels) => Ok(Some(kernels.dequantize(coded)?)),
        None => Ok(None),
    })
}

/// Returns a weight with 8-bit codes and a scale for each output as the kernels take it.
fn eight_bit(weight: &QuantizedWeight) -> Option<EightBitWeight<'_>> {
    match &weight.storage {
        Storage::Int8 { codes, scales } => Some(EightBitWeight { codes, scales }),
        _ => None,
    }
}

/// Calls `body` with a weight of 4 bits as the kernels take it, and returns `None` for any other.
fn with_weight(
    weight: &QuantizedWeight,
    body: impl FnOnce(&FourBitWeight<'_>) -> Result<Option<Tensor>>,
) -> Result<Option<Tensor>> {
    let (outputs, inputs) = (weight.outputs, weight.inputs);
    match &weight.storage {
        Storage::Grouped {
            codes,
            scales,
            offsets,
            ..
        } if codes.size()[1] != inputs => body(&FourBitWeight {
            codes,
            scales,
            numbers: match offsets {
                None => FourBitNumbers::Centered,
                Some(offsets) => FourBitNumbers::Offset(offsets),
            },
            outputs,
            inputs,
            group: inputs / scales.size()[1].max(1),
        }),
        // Blocks of the flattened weight, which are groups of inputs where none spans outputs.
        Storage::Blocks { codes, magnitudes } => {
            let (book, options) = weight.scheme.blocks()?;
            let block = options.block_size as i64;
            if inputs % block != 0 {
                return Ok(None);
            }
            body(&FourBitWeight {
                codes,
                scales: &magnitudes.tensor()?,
                numbers: FourBitNumbers::Book(book.numbers()),
                outputs,
                inputs,
                group: block,
            })
        }
        _ => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BlockOptions, GroupOptions, Scheme};
    use tch::Device;

    /// Returns what the kernels make of a weight, as overdrive-gpu documents it and its interpreter proves it.
    fn documented(weight: &FourBitWeight<'_>) -> Tensor {
        let codes = weight.codes.flatten(0, -1).to_kind(Kind::Int64);
        let (high, low) = (
            codes.bitwise_right_shift_tensor_scalar(4),
            codes.bitwise_and(15),
        );
        let pair = match weight.numbers {
            FourBitNumbers::Book(_) => [high, low],
            _ => [low, high],
        };
        let codes = Tensor::stack(&pair, -1).view([-1, weight.group]);
        let scales = weight.scales.to_kind(Kind::Float).view([-1, 1]);
        let numbers = match weight.numbers {
            FourBitNumbers::Book(book) => Tensor::from_slice(book).take(&codes) * scales,
            FourBitNumbers::Centered => (codes.to_kind(Kind::Float) - 8.0) * scales,
            FourBitNumbers::Offset(offsets) => {
                codes.to_kind(Kind::Float) * scales + offsets.to_kind(Kind::Float).view([-1, 1])
            }
        };
        numbers.view([weight.outputs, weight.inputs])
    }

    #[test]
    fn a_weight_is_given_to_the_kernels_as_it_is_stored() {
        let positions = Tensor::arange(6 * 256, (Kind::Float, Device::Cpu));
        let dense = (positions * 0.7).sin().view([6, 256]);
        let groups = |symmetric| {
            Scheme::Grouped(GroupOptions {
                bits: 4,
                group_size: 64,
                symmetric,
            })
        };
        let blocks = |double_quant| BlockOptions {
            block_size: 64,
            double_quant,
        };
        for scheme in [
            groups(true),
            groups(false),
            Scheme::Nf4(blocks(false)),
            Scheme::Nf4(blocks(true)),
            Scheme::Fp4(blocks(false)),
        ] {
            let weight = QuantizedWeight::quantize(&dense, scheme).expect("finite numbers");
            let given = with_weight(&weight, |coded| Ok(Some(documented(coded))));
            let given = given.expect("memory").expect("4 bits");
            let stored = weight.dequantize(Kind::Float).expect("memory");
            let apart = (given - stored).abs().max().double_value(&[]);
            assert!(apart < 1e-6, "{scheme}: {apart}");
        }
        for scheme in [Scheme::Int8WeightOnly, Scheme::Fp8] {
            let weight = QuantizedWeight::quantize(&dense, scheme).expect("finite numbers");
            match eight_bit(&weight) {
                Some(given) => {
                    let numbers = given.codes * given.scales.unsqueeze(1);
                    let stored = weight.dequantize(Kind::Float).expect("memory");
                    let apart = (numbers - stored).abs().max().double_value(&[]);
                    assert!(apart < 1e-6, "{scheme}: {apart}");
                }
                None => assert_eq!(scheme, Scheme::Fp8),
            }
            let none = with_weight(&weight, |_| unreachable!("it has 8 bits"));
            assert!(none.expect("no kernel is asked").is_none());
        }
    }
}
