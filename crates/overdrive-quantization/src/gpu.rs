//! The GPU kernels of overdrive-gpu for weights of 4 and 8 bits; `None` if libtorch's operators are used.

use overdrive_gpu::{
    EightBitNumbers, EightBitWeight, FOUR_BIT_GROUPS, FourBitNumbers, FourBitScales, FourBitWeight,
    MOST_ROWS,
};
use tch::{Kind, Tensor};

use crate::codec::code_book::Book;
use crate::weight::{Magnitudes, Storage};
use crate::{QuantizedWeight, Result};

/// Returns `x (rows, I)` times the weight, `(rows, O)`, if there are few rows and a kernel. `offsets` are those of [joined
/// weights](crate::adjacent::Joined).
pub(crate) fn few_rows(
    x: &Tensor,
    weight: &QuantizedWeight,
    offsets: &[(i64, f64)],
) -> Result<Option<Tensor>> {
    if !(1..=MOST_ROWS).contains(&x.size()[0]) || x.numel() == 0 {
        return Ok(None);
    }
    let Some(kernels) = overdrive_gpu::kernels(x.device())? else {
        return Ok(None);
    };
    // The columns of the codes may be in another order than the inputs.
    let in_order = |x: &Tensor| match &weight.storage {
        Storage::Grouped {
            order: Some(order), ..
        } => x.f_index_select(1, order),
        _ => Ok(x.shallow_clone()),
    };
    if let Some(coded) = eight_bit(weight) {
        return match kernels.eight_bit(x.kind(), &coded)? {
            Some(kernels) => Ok(kernels.product(&in_order(x)?, &coded)?),
            None => Ok(None),
        };
    }
    // The kernels of f32 take scales in full.
    let takes_nested = x.kind() != Kind::Float;
    if !takes_nested && offsets.len() > 1 {
        return Ok(None);
    }
    with_weight(
        weight,
        takes_nested.then_some(offsets),
        |coded| match kernels.four_bit(x.kind(), coded)? {
            Some(kernels) => Ok(kernels.product(&in_order(x)?, coded)?),
            None => Ok(None),
        },
    )
}

/// Returns the dense weight `(O, I)`, if there is a kernel.
pub(crate) fn dequantize(weight: &QuantizedWeight, kind: Kind) -> Result<Option<Tensor>> {
    let reordered = matches!(weight.storage, Storage::Grouped { order: Some(_), .. });
    let Some(kernels) = overdrive_gpu::kernels(weight.device())?.filter(|_| !reordered) else {
        return Ok(None);
    };
    if let Some(coded) = eight_bit(weight) {
        return match kernels.eight_bit(kind, &coded)? {
            Some(kernels) => Ok(kernels.dequantize(&coded)?),
            None => Ok(None),
        };
    }
    with_weight(weight, None, |coded| {
        match kernels.four_bit(kind, coded)? {
            Some(kernels) => Ok(kernels.dequantize(coded)?),
            None => Ok(None),
        }
    })
}

/// Returns `true` if the kernels multiply with a weight of 4 bits in groups as it lies in rows.
pub(crate) fn takes_rows(weight: &QuantizedWeight) -> Result<bool> {
    let Storage::Grouped { scales, .. } = &weight.storage else {
        return Ok(false);
    };
    let group = weight.inputs / scales.size()[1].max(1);
    Ok(FOUR_BIT_GROUPS.contains(&group) && overdrive_gpu::kernels(weight.device())?.is_some())
}

/// Returns a weight with 8-bit codes in the form that the kernels take.
fn eight_bit(weight: &QuantizedWeight) -> Option<EightBitWeight<'_>> {
    let (codes, scales, numbers) = match &weight.storage {
        Storage::Int8 { codes, scales } => (codes, scales, EightBitNumbers::Integer),
        // The kernels have no floats with a scale for each group.
        Storage::Fp8 { codes, scales } if scales.dim() == 1 => {
            (codes, scales, EightBitNumbers::Float)
        }
        Storage::Grouped {
            codes,
            scales,
            offsets: None,
            ..
        } if codes.kind() == Kind::Int8 => (&**codes, &**scales, EightBitNumbers::Integer),
        _ => return None,
    };
    Some(EightBitWeight {
        codes,
        scales,
        numbers,
    })
}

/// Calls `body` with a 4-bit weight in the form that the kernels take, and returns `None` for any other weight. With
/// `nested`, 8-bit scales are passed as they are stored, with these offsets or, where there are none, that of the weight; else
/// they are dequantized, which takes launches of libtorch's operators.
fn with_weight(
    weight: &QuantizedWeight,
    nested: Option<&[(i64, f64)]>,
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
            scales: FourBitScales::Full(scales),
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
            // The kernels know no blocks of e2m1.
            if inputs % block != 0 || book == Book::E2m1 {
                return Ok(None);
            }
            let (full, own);
            let scales = match (magnitudes, nested) {
                (
                    Magnitudes::Quantized {
                        codes,
                        code_book,
                        scales,
                        offset,
                    },
                    Some(offsets),
                ) => {
                    own = [(outputs, f64::from(*offset))];
                    FourBitScales::Nested {
                        codes,
                        book: code_book,
                        scales,
                        offsets: if offsets.is_empty() { &own } else { offsets },
                    }
                }
                _ => {
                    full = magnitudes.tensor()?;
                    FourBitScales::Full(&full)
                }
            };
            body(&FourBitWeight {
                codes,
                scales,
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
    use crate::adjacent::tests::weights_of;
    use crate::adjacent::{Joined, adjacent, joined};
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
        let scales = match weight.scales {
            FourBitScales::Full(scales) => scales.to_kind(Kind::Float),
            FourBitScales::Nested {
                codes,
                book,
                scales,
                offsets,
            } => {
                let outer = scales.repeat_interleave_self_int(256, 0, None);
                let outer = outer.narrow(0, 0, codes.numel() as i64);
                let groups = weight.inputs / weight.group;
                let added = |&(outputs, offset): &(i64, f64)| {
                    Tensor::full([outputs * groups], offset, (Kind::Float, Device::Cpu))
                };
                let added = Tensor::cat(&offsets.iter().map(added).collect::<Vec<_>>(), 0);
                book.index_select(0, &codes.to_kind(Kind::Int64)) * outer + added
            }
        }
        .view([-1, 1]);
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
            let stored = weight.dequantize(Kind::Float).expect("memory");
            for nested in [None, Some(&[][..])] {
                let given = with_weight(&weight, nested, |coded| {
                    let is_nested = matches!(coded.scales, FourBitScales::Nested { .. });
                    assert_eq!(
                        is_nested,
                        nested.is_some() && scheme == Scheme::Nf4(blocks(true))
                    );
                    Ok(Some(documented(coded)))
                });
                let given = given.expect("memory").expect("4 bits");
                let apart = (given - &stored).abs().max().double_value(&[]);
                assert!(apart < 1e-6, "{scheme}: {apart}");
            }
        }
        let apart = weights_of("nf4", [512, 512, 1024]);
        let apart: Vec<&QuantizedWeight> = apart.iter().collect();
        let views = adjacent(&apart).expect("memory").expect("one scheme");
        let views: Vec<&QuantizedWeight> = views.iter().collect();
        let Joined { weight, offsets } = joined(&views).expect("memory").expect("adjacent");
        let given = with_weight(&weight, Some(&offsets), |coded| Ok(Some(documented(coded))));
        let stored = apart
            .iter()
            .map(|weight| weight.dequantize(Kind::Float).expect("memory"));
        let stored = Tensor::cat(&stored.collect::<Vec<_>>(), 0);
        let far = (given.expect("memory").expect("4 bits") - stored)
            .abs()
            .max();
        assert!(far.double_value(&[]) < 1e-6, "{far}");
        let in_eight_bits = |symmetric| {
            Scheme::Grouped(GroupOptions {
                bits: 8,
                group_size: 64,
                symmetric,
            })
        };
        for scheme in [
            Scheme::Int8WeightOnly,
            Scheme::Fp8,
            in_eight_bits(true),
            in_eight_bits(false),
        ] {
            let weight = QuantizedWeight::quantize(&dense, scheme).expect("finite numbers");
            match eight_bit(&weight) {
                Some(given) => {
                    let numbers = match given.numbers {
                        EightBitNumbers::Integer => given.codes.to_kind(Kind::Float),
                        EightBitNumbers::Float => given
                            .codes
                            .view_dtype(Kind::Float8e4m3fn)
                            .to_kind(Kind::Float),
                    };
                    let scales = given.scales.to_kind(Kind::Float).view([6, -1, 1]);
                    let numbers = numbers.view([6, scales.size()[1], -1]) * scales;
                    let stored = weight.dequantize(Kind::Float).expect("memory");
                    let apart = numbers.view([6, 256]) - stored;
                    let apart = apart.abs().max().double_value(&[]);
                    assert!(apart < 1e-6, "{scheme}: {apart}");
                }
                None => assert_eq!(scheme, in_eight_bits(false)),
            }
            let none = with_weight(&weight, Some(&[]), |_| unreachable!("it has 8 bits"));
            assert!(none.expect("no kernel is asked").is_none());
        }
    }
}
