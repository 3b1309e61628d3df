//! Weights that lie next to one another in memory, which one matmul multiplies.

use std::cell::Cell;

use overdrive_gpu::MOST_OFFSETS;
use overdrive_kernels::tensors::joined_view;
use tch::{Kind, Tensor};

use crate::codec::dynamic;
use crate::weight::{Magnitudes, Storage};
use crate::{QuantizedWeight, Result};

/// The alignment that GPU kernels need, in bytes.
const ALIGNMENT: usize = 16;

/// Copies the weights of layers with the same input next to one another in memory, and returns views of the copies in the
/// same order. On a GPU, [`joint_linear`](crate::joint_linear) then multiplies all of them in one launch.
///
/// Returns `None` for weights that cannot be multiplied as one: of several schemes, or with an order of the inputs; and with
/// double quantization for more than three, or for one whose number of blocks is not a multiple of 1,024.
///
/// ```
/// use overdrive_quantization::{QuantizedWeight, adjacent};
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let weight = |outputs| {
///     let dense = Tensor::randn([outputs, 64], (Kind::Float, Device::Cpu));
///     QuantizedWeight::quantize(&dense, "int4-g32".parse()?)
/// };
/// let (query, key) = (weight(32)?, weight(16)?);
/// let views = adjacent(&[&query, &key])?.expect("one scheme");
/// assert_eq!(views[1].dequantize(Kind::Float)?, key.dequantize(Kind::Float)?);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// An error of libtorch if memory runs out.
pub fn adjacent(weights: &[&QuantizedWeight]) -> Result<Option<Vec<QuantizedWeight>>> {
    if !are_alike(weights) {
        return Ok(None);
    }
    let parts = weights[0].storage.tensors().len();
    let shared = shared_part(weights[0]);
    let mut views: Vec<Vec<Tensor>> = weights.iter().map(|_| Vec::new()).collect();
    for part in 0..parts {
        let own = weights.iter().map(|weight| weight.storage.tensors()[part]);
        let own: Vec<&Tensor> = own.collect();
        if shared == Some(part) {
            if own[1..].iter().any(|other| *other != own[0]) {
                return Ok(None);
            }
            for views in &mut views {
                views.push(own[0].shallow_clone());
            }
            continue;
        }
        let sizes: Vec<i64> = own.iter().map(|tensor| tensor.size()[0]).collect();
        let copies = Tensor::f_cat(&own, 0)?.f_split_with_sizes(sizes.as_slice(), 0)?;
        if copies
            .iter()
            .any(|view| !(view.data_ptr() as usize).is_multiple_of(ALIGNMENT))
        {
            return Ok(None);
        }
        for (views, copy) in views.iter_mut().zip(copies) {
            views.push(copy);
        }
    }
    let weights = weights.iter().zip(&views).map(|(weight, views)| {
        let storage = with_parts(&weight.storage, |part| Ok(views[part].shallow_clone()))?;
        Ok(QuantizedWeight {
            storage,
            ..**weight
        })
    });
    weights.collect::<Result<_>>().map(Some)
}

/// Adjacent weights as one weight.
pub(crate) struct Joined {
    pub(crate) weight: QuantizedWeight,
    /// With double quantization, the number of outputs and the offset of each weight. Only [`few_rows`](crate::gpu::few_rows)
    /// takes several offsets.
    pub(crate) offsets: Vec<(i64, f64)>,
}

/// Returns the weights as one weight with the outputs of all, if they are adjacent.
pub(crate) fn joined(weights: &[&QuantizedWeight]) -> Result<Option<Joined>> {
    if !are_alike(weights) {
        return Ok(None);
    }
    let first = weights[0];
    let shared = shared_part(first);
    let view = |part: usize| {
        let own = weights.iter().map(|weight| weight.storage.tensors()[part]);
        let own: Vec<&Tensor> = own.collect();
        match shared == Some(part) {
            // The same tensor, by `adjacent`.
            true => own
                .iter()
                .all(|other| other.data_ptr() == own[0].data_ptr())
                .then(|| own[0].shallow_clone()),
            false => joined_view(&own),
        }
    };
    let views: Option<Vec<Tensor>> = (0..first.storage.tensors().len()).map(view).collect();
    let Some(views) = views else { return Ok(None) };
    let storage = with_parts(&first.storage, |part| Ok(views[part].shallow_clone()))?;
    Ok(Some(Joined {
        weight: QuantizedWeight {
            outputs: weights.iter().map(|weight| weight.outputs).sum(),
            storage,
            ..*first
        },
        offsets: weights.iter().filter_map(|weight| offset(weight)).collect(),
    }))
}

/// Returns the number of outputs and the offset of a weight with double quantization.
fn offset(weight: &QuantizedWeight) -> Option<(i64, f64)> {
    match &weight.storage {
        Storage::Blocks {
            magnitudes: Magnitudes::Quantized { offset, .. },
            ..
        } => Some((weight.outputs, f64::from(*offset))),
        _ => None,
    }
}

/// Returns the number of the tensor that is the same for several weights: the code book of double quantization.
fn shared_part(weight: &QuantizedWeight) -> Option<usize> {
    let Storage::Blocks {
        magnitudes: Magnitudes::Quantized { code_book, .. },
        ..
    } = &weight.storage
    else {
        return None;
    };
    let tensors = weight.storage.tensors();
    tensors
        .iter()
        .position(|tensor| std::ptr::eq(*tensor, code_book))
}

/// Returns a storage of the same form, with the tensors that `part` returns by their number.
fn with_parts(storage: &Storage, part: impl Fn(usize) -> Result<Tensor>) -> Result<Storage> {
    let next = Cell::new(0);
    storage.map(|_| part(next.replace(next.get() + 1)))
}

/// Returns `true` for several weights of one kind, whose tensors have their outputs one after another.
fn are_alike(weights: &[&QuantizedWeight]) -> bool {
    let [first, rest @ ..] = weights else {
        return false;
    };
    let kinds = |weight: &QuantizedWeight| -> Vec<Kind> {
        let tensors = weight.storage.tensors();
        tensors.iter().map(|tensor| tensor.kind()).collect()
    };
    let alike = |other: &&QuantizedWeight| {
        (
            other.scheme,
            other.activations,
            other.inputs,
            other.device(),
        ) == (
            first.scheme,
            first.activations,
            first.inputs,
            first.device(),
        ) && std::mem::discriminant(&other.storage) == std::mem::discriminant(&first.storage)
            && kinds(other) == kinds(first)
    };
    let nested = offset(first).is_some();
    !rest.is_empty()
        && weights.iter().all(|weight| lies_in_rows(weight))
        && rest.iter().all(alike)
        && !(nested && weights.len() > MOST_OFFSETS)
}

/// Returns `true` if no tensor of a weight belongs to the weight as a whole, or has parts of several outputs in one element.
fn lies_in_rows(weight: &QuantizedWeight) -> bool {
    match &weight.storage {
        Storage::Int8 { .. } | Storage::Fp8 { .. } => true,
        Storage::Grouped { order, .. } => order.is_none(),
        Storage::Blocks { magnitudes, .. } => {
            let block = weight
                .scheme
                .blocks()
                .map(|(_, options)| options.block_size.max(2) as i64);
            block.is_ok_and(|block| {
                let blocks = weight.outputs * weight.inputs / block;
                weight.inputs % block == 0
                    && (matches!(magnitudes, Magnitudes::Full(_))
                        || blocks % dynamic::BLOCK as i64 == 0)
            })
        }
        Storage::Tiled(_) => false,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;
    use crate::linear::operators_forward;
    use tch::Device;

    fn weights(scheme: &str) -> Vec<QuantizedWeight> {
        weights_of(scheme, [32, 16, 48])
    }

    /// Returns weights with these numbers of outputs.
    pub(crate) fn weights_of(scheme: &str, outputs: [i64; 3]) -> Vec<QuantizedWeight> {
        let scheme = scheme.parse().unwrap();
        let weight = |(seed, outputs): (usize, i64)| {
            let numbers = Tensor::arange(outputs * 128, (Kind::Float, Device::Cpu));
            let dense = ((numbers + seed as f64) * 0.7).sin().view([outputs, 128]);
            QuantizedWeight::quantize(&dense, scheme).unwrap()
        };
        outputs.into_iter().enumerate().map(weight).collect()
    }

    #[test]
    fn adjacent_weights_are_multiplied_as_one() {
        let x = Tensor::arange(5 * 128, (Kind::Float, Device::Cpu))
            .cos()
            .view([5, 128]);
        let biases: Vec<Tensor> = [32, 16, 48]
            .map(|outputs| Tensor::arange(outputs, (Kind::Float, Device::Cpu)))
            .into();
        for scheme in [
            "int8-weight",
            "int8",
            "fp8",
            "int4-g32",
            "int4-g32-asym",
            "int8-g32",
            "nf4-single",
            "fp4-single",
        ] {
            let apart = weights(scheme);
            let apart: Vec<&QuantizedWeight> = apart.iter().collect();
            assert!(joined(&apart).unwrap().is_none(), "{scheme}");
            let views = adjacent(&apart)
                .unwrap()
                .unwrap_or_else(|| panic!("{scheme}"));
            for (view, own) in views.iter().zip(&apart) {
                let (view, own) = (view.dequantize(Kind::Float), own.dequantize(Kind::Float));
                assert_eq!(view.unwrap(), own.unwrap(), "{scheme}");
            }
            let views: Vec<&QuantizedWeight> = views.iter().collect();
            let Joined {
                weight: joint,
                offsets,
            } = joined(&views).unwrap().unwrap();
            assert!(offsets.is_empty(), "{scheme}");
            assert_eq!(joint.size(), [96, 128], "{scheme}");
            let dense = apart.iter().map(|own| own.dequantize(Kind::Float).unwrap());
            let dense = Tensor::cat(&dense.collect::<Vec<_>>(), 0);
            assert_eq!(joint.dequantize(Kind::Float).unwrap(), dense, "{scheme}");
            // Not in this order, and not a part of them twice.
            assert!(joined(&[views[1], views[0]]).unwrap().is_none(), "{scheme}");
            assert!(joined(&[views[0], views[0]]).unwrap().is_none(), "{scheme}");
            let with = [Some(&biases[0]), Some(&biases[1]), Some(&biases[2])];
            for biases in [[None; 3], with, [None, with[1], None]] {
                let forward = |weights| operators_forward(&x, weights, &biases).unwrap();
                let far = (forward(&views) - forward(&apart)).abs().max();
                assert!(far.double_value(&[]) < 1e-5, "{scheme}: {far}");
            }
        }
    }

    #[test]
    fn adjacent_weights_with_double_quantization_keep_their_offsets() {
        let apart = weights_of("nf4", [512, 512, 1024]);
        let apart: Vec<&QuantizedWeight> = apart.iter().collect();
        let views = adjacent(&apart).unwrap().unwrap();
        let views: Vec<&QuantizedWeight> = views.iter().collect();
        let Joined { weight, offsets } = joined(&views).unwrap().unwrap();
        assert_eq!(weight.size(), [2048, 128]);
        let own: Vec<_> = apart.iter().filter_map(|weight| offset(weight)).collect();
        assert_eq!(offsets, own);
        // Without a kernel each is multiplied alone.
        let x = Tensor::arange(5 * 128, (Kind::Float, Device::Cpu))
            .cos()
            .view([5, 128]);
        let forward = |weights| operators_forward(&x, weights, &[None; 3]).unwrap();
        assert_eq!(forward(&views), forward(&apart));
    }

    #[test]
    fn weights_that_cannot_be_multiplied_as_one_stay_apart() {
        let (four, eight, double) = (weights("int4-g32"), weights("int8-weight"), weights("nf4"));
        for apart in [[&four[0], &eight[1]], [&double[0], &double[1]]] {
            assert!(adjacent(&apart).unwrap().is_none(), "{apart:?}");
        }
        assert!(adjacent(&[&four[0]]).unwrap().is_none());
        let four = [512, 1024, 512].map(|outputs| weights_of("nf4", [outputs; 3]));
        let many = [&four[0][0], &four[0][1], &four[1][0], &four[2][0]];
        assert!(
            adjacent(&many).unwrap().is_none(),
            "more offsets than a kernel takes"
        );
    }
}
