//! The linear layer by the kernels of this crate.

use overdrive_kernels::{Element, InstructionSet};
use tch::{Kind, Tensor};

use super::blocks;
use super::plan::{Plan, plan};
use crate::codec::fp8;
use crate::kernel::dequantizing_gemm::DequantizingGemm;
use crate::kernel::four_bit::{CodedGemm, CodedWeight, QuantizedInputs, coded_weight};
use crate::kernel::input_rows::InputRows;
use crate::kernel::int8::{Int8Gemm, MAX_WIDTH, OutlierSplit};
use crate::kernel::joint_gemm::{Gemm, JointGemm, joint_gemm};
use crate::weight::Storage;
use crate::{QuantizedWeight, Result};
use overdrive_kernels::tensors::{Fresh, elements};
use overdrive_kernels::with_element;

/// The largest number of rows for which codes are dequantized in registers instead of in blocks.
const FEW_ROWS: usize = 32;

/// Returns `true` if codes are dequantized in registers for this number of rows.
fn is_few(rows: usize) -> bool {
    // A matmul of the library with a dequantized block adds in an order that depends on the number of rows.
    rows <= FEW_ROWS || overdrive_kernels::is_batch_invariant()
}

/// Returns the results for `x (…, I)`, on the CPU and not empty; `compute` is Float, `BFloat16` or Half.
pub(super) fn forward(
    x: &Tensor,
    weights: &[&QuantizedWeight],
    biases: &[Option<&Tensor>],
    compute: Kind,
    recording: bool,
) -> Result<Tensor> {
    let x = x.f_to_kind(compute)?.f_contiguous()?;
    let biases: Vec<Option<Tensor>> = biases
        .iter()
        .map(|bias| {
            bias.map(|bias| bias.f_to_kind(compute)?.f_contiguous())
                .transpose()
        })
        .collect::<std::result::Result<_, _>>()?;
    with_element!(compute, T => joint::<T>(&x, weights, &biases, recording))
}

/// Returns the results for contiguous tensors of the dtype of `T`.
fn joint<T: Element>(
    x: &Tensor,
    weights: &[&QuantizedWeight],
    biases: &[Option<Tensor>],
    recording: bool,
) -> Result<Tensor> {
    let mut size = x.size();
    let columns: i64 = weights.iter().map(|weight| weight.outputs).sum();
    let width = size.pop().unwrap_or(1);
    size.push(columns);
    let mut y = Fresh::<T>::new(&size)?;
    let rows = InputRows::new(elements::<T>(x)?, width.unsigned_abs() as usize);
    let layers = weights.iter().zip(biases).map(|(weight, bias)| {
        let bias = bias.as_ref().map(elements::<T>).transpose()?;
        Layer::new(weight, bias, rows.rows, recording)
    });
    let layers: Vec<Layer<'_, T>> = layers.collect::<Result<_>>()?;
    let others = run_kernels(&rows, &layers, y.elements_mut()?)?;
    let y = y.into_tensor();
    if !others.is_empty() {
        let x = x.f_view([-1, width])?;
        let all = y.f_view([-1, columns])?;
        for (first, index) in others {
            let weight = weights[index];
            let y = all.f_narrow(1, first, weight.outputs)?;
            blocks::forward(&x, weight, biases[index].as_ref(), &y)?;
        }
    }
    Ok(y)
}

/// Writes the results for f32 rows; returns `false` if a weight has no kernel for this number of rows.
pub(super) fn forward_into(
    x: &[f32],
    width: usize,
    layers: &[(&QuantizedWeight, Option<&Tensor>)],
    y: &mut [f32],
) -> Result<bool> {
    let rows = InputRows::new(x, width);
    let layers = layers.iter().map(|(weight, bias)| {
        let bias = bias.map(elements::<f32>).transpose()?;
        Layer::new(weight, bias, rows.rows, false)
    });
    let layers: Vec<Layer<'_, f32>> = layers.collect::<Result<_>>()?;
    Ok(run_kernels(&rows, &layers, y)?.is_empty())
}

/// Returns `true` if a row has the same bits for any number of rows: the activations are integers.
pub(super) fn is_batch_invariant(weight: &QuantizedWeight) -> Result<bool> {
    Ok(match (plan(weight, true, false), &weight.storage) {
        (Plan::Int8, Storage::Int8 { .. }) => weight.inputs.unsigned_abs() as usize <= MAX_WIDTH,
        (Plan::ByGroup, _) => coded_weight(weight)?.is_some_and(|coded| coded.has_integers()),
        _ => false,
    })
}

/// A weight, and how it is multiplied.
struct Layer<'a, T> {
    weight: &'a QuantizedWeight,
    bias: Option<&'a [T]>,
    plan: Plan,
    coded: Option<CodedWeight<'a>>,
}

impl<'a, T> Layer<'a, T> {
    fn new(
        weight: &'a QuantizedWeight,
        bias: Option<&'a [T]>,
        rows: usize,
        recording: bool,
    ) -> Result<Self> {
        let plan = plan(weight, true, recording);
        let coded = match plan {
            // Integers for any number of rows: what is computed for a row must not depend on the rows beside it.
            Plan::ByGroup => {
                coded_weight(weight)?.filter(|coded| is_few(rows) || coded.has_integers())
            }
            _ => None,
        };
        Ok(Layer {
            weight,
            bias,
            plan,
            coded,
        })
    }
}

/// Writes the results of the weights that have a kernel for this number of rows; returns the first column and index of
/// each of the others.
fn run_kernels<T: Element>(
    rows: &InputRows<'_, T>,
    layers: &[Layer<'_, T>],
    y: &mut [T],
) -> Result<Vec<(i64, usize)>> {
    let coded = || layers.iter().filter_map(|layer| layer.coded.as_ref());
    // Converted only if a kernel takes floats.
    let floats = match coded().next() {
        Some(_) => rows.floats(),
        None => &[],
    };
    let forms = Forms {
        set: InstructionSet::best(),
        splits: splits(layers, rows),
        quantized: QuantizedInputs::new(InstructionSet::best(), floats, coded()),
        rows,
    };
    let mut gemms = Vec::with_capacity(layers.len());
    let mut others: Vec<(i64, usize)> = Vec::new();
    let mut first: i64 = 0;
    for (index, layer) in layers.iter().enumerate() {
        match gemm(layer, &forms)? {
            Some(gemm) => {
                let first = first.unsigned_abs() as usize;
                gemms.push(JointGemm::new(first, gemm, layer.bias));
            }
            None => others.push((first, index)),
        }
        first += layer.weight.outputs;
    }
    joint_gemm(&gemms, rows.rows, first.unsigned_abs() as usize, y);
    Ok(others)
}

/// Splits the outlier columns off the activations, once for each threshold.
fn splits<T: Element>(
    layers: &[Layer<'_, T>],
    rows: &InputRows<'_, T>,
) -> Vec<(f64, OutlierSplit)> {
    let mut splits: Vec<(f64, OutlierSplit)> = Vec::new();
    for layer in layers {
        let Plan::Split(threshold) = &layer.plan else {
            continue;
        };
        if !splits.iter().any(|(known, _)| known == threshold) {
            #[allow(clippy::cast_possible_truncation, reason = "activations are f32")]
            let split = OutlierSplit::new(rows.floats(), rows.width, *threshold as f32);
            splits.push((*threshold, split));
        }
    }
    splits
}

/// The activations, in the forms that kernels take.
struct Forms<'a, T> {
    set: InstructionSet,
    rows: &'a InputRows<'a, T>,
    splits: Vec<(f64, OutlierSplit)>,
    quantized: QuantizedInputs<'a>,
}

/// Returns the kernel for a weight; `None` if it must be dequantized in blocks.
fn gemm<'a, T: Element>(
    layer: &'a Layer<'a, T>,
    forms: &'a Forms<'a, T>,
) -> Result<Option<Box<dyn Gemm + 'a>>> {
    let (set, rows, plan) = (forms.set, forms.rows, layer.plan);
    let few = is_few(rows.rows);
    if let Some(weight) = &layer.coded {
        let gemm = CodedGemm::new(set, rows.floats(), &forms.quantized, weight);
        return Ok(Some(Box::new(gemm)));
    }
    let gemm: Box<dyn Gemm> = match (&layer.weight.storage, plan) {
        (Storage::Int8 { codes, scales }, Plan::Int8 | Plan::Split(_))
            if rows.width <= MAX_WIDTH =>
        {
            let split = forms
                .splits
                .iter()
                .find(|(known, _)| plan == Plan::Split(*known));
            let split = split.map(|(_, split)| split);
            Box::new(Int8Gemm {
                x: split.map_or_else(|| rows.int8(), |split| &split.int8),
                codes: elements::<i8>(codes)?,
                scales: elements::<f32>(scales)?,
                split,
                set,
            })
        }
        (Storage::Int8 { codes, scales }, _) if few => Box::new(DequantizingGemm {
            x: rows.floats(),
            width: rows.width,
            codes: elements::<i8>(codes)?,
            scales: elements::<f32>(scales)?,
            group: rows.width,
            set,
        }),
        (Storage::Fp8 { codes, scales }, _) if few => Box::new(DequantizingGemm {
            x: rows.floats(),
            width: rows.width,
            codes: elements::<u8>(codes)?,
            scales: elements::<f32>(scales)?,
            group: fp8::group(scales, rows.width),
            set,
        }),
        _ => return Ok(None),
    };
    Ok(Some(gemm))
}
