use tch::Tensor;

use crate::forward::{product, shared_input};
use crate::low_rank::{Part, add_low_rank};
use crate::{AdaptedLinear, BaseWeight, Result};

/// The results of several maps of the same `x` side by side, `(…, ΣO)`: one product where all bases are
/// dense, or all quantized, and one more with the A's of all adapters on them.
///
/// # Errors
/// As [`AdaptedLinear::forward`].
pub fn joint_forward(x: &Tensor, maps: &[&AdaptedLinear]) -> Result<Tensor> {
    if maps.iter().all(|map| map.working().is_empty()) {
        return joint_base(x, maps);
    }
    let Some(parts) = parts(maps) else {
        // DoRA scales the results of its map.
        return one_by_one(x, maps);
    };
    let shared = shared_input(x)?;
    let x = shared.as_ref().unwrap_or(x);
    add_low_rank(joint_base(x, maps)?, x, &parts)
}

/// The adapters of all maps with their columns; `None` if one is more than a sum.
fn parts<'m>(maps: &[&'m AdaptedLinear]) -> Option<Vec<Part<'m>>> {
    let mut parts = Vec::new();
    let mut start = 0;
    for map in maps {
        parts.extend(map.parts(start)?);
        start += map.base().size()[0];
    }
    Some(parts)
}

fn one_by_one(x: &Tensor, maps: &[&AdaptedLinear]) -> Result<Tensor> {
    let each = maps.iter().map(|map| map.forward(x, true));
    Ok(Tensor::f_cat(&each.collect::<Result<Vec<_>>>()?, -1)?)
}

/// The bases alone.
fn joint_base(x: &Tensor, maps: &[&AdaptedLinear]) -> Result<Tensor> {
    let bases: Vec<(&BaseWeight, Option<&Tensor>)> = maps.iter().map(|map| map.in_use()).collect();
    let quantized = bases.iter().map(|(base, _)| match base {
        BaseWeight::Quantized(weight) => Some(weight),
        BaseWeight::Dense { .. } => None,
    });
    if let Some(weights) = quantized.collect::<Option<Vec<_>>>() {
        let biases: Vec<_> = bases.iter().map(|(_, bias)| *bias).collect();
        return Ok(overdrive_quantization::joint_linear(x, &weights, &biases)?);
    }
    let dense = bases.iter().map(|(base, _)| match base {
        BaseWeight::Dense {
            weight,
            transposed: false,
        } => Some(weight),
        _ => None,
    });
    let weights = dense.collect::<Option<Vec<&Tensor>>>();
    let biases: Vec<&Tensor> = bases.iter().filter_map(|(_, bias)| *bias).collect();
    match weights {
        Some(weights) if biases.is_empty() || biases.len() == maps.len() => {
            let biases = (!biases.is_empty()).then_some(biases.as_slice());
            Ok(overdrive_fused::joint_linear(x, &weights, biases)?)
        }
        _ => {
            let each = bases
                .iter()
                .map(|(base, bias)| product(base, x, *bias, true));
            Ok(Tensor::f_cat(&each.collect::<Result<Vec<_>>>()?, -1)?)
        }
    }
}
