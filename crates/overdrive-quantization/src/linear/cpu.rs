//! The linear layer by the kernels of this crate.

use overdrive_kernels::{Element, InstructionSet};
use tch::{Kind, Tensor};

use super::blocks;
use super::plan::{Plan, plan};
use crate::kernel::dequantizing_gemm::DequantizingGemm;
use crate::kernel::four_bit::{CodedGemm, CodedWeight, QuantizedInputs, coded_weight};
use crate::kernel::input_rows::InputRows;
use crate::kernel::int8::{Int8Gemm, MAX_WIDTH, OutlierSplit};
use crate::kernel::joint_gemm::{Gemm, joint_gemm};
use crate::tensors::{Fresh, elements, with_float};
use crate::weight::Storage;
use crate::{Activations, QuantizedWeight, Result};

/// The largest number of rows for which codes are dequantized in registers, not in blocks.
const FEW_ROWS: usize = 32;

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
    with_float!(compute, T => joint::<T>(&x, weights, &biases, recording))
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
    let slices: Vec<Option<&[T]>> = biases
        .iter()
        .map(|bias| bias.as_ref().map(elements::<T>).transpose())
        .collect::<Result<_>>()?;
    let others = run_kernels(&rows, weights, &slices, recording, y.elements_mut()?)?;
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

/// Writes the results for rows of f32; returns `false` if a weight has no kernel for so many rows.
pub(super) fn forward_into(
    x: &[f32],
    width: usize,
    layers: &[(&QuantizedWeight, Option<&Tensor>)],
    y: &mut [f32],
) -> Result<bool> {
    let weights: Vec<&QuantizedWeight> = layers.iter().map(|(weight, _)| *weight).collect();
    let biases: Vec<Option<&[f32]>> = layers
        .iter()
        .map(|(_, bias)| bias.map(elements::<f32>).transpose())
        .collect::<Result<_>>()?;
    let rows = InputRows::new(x, width);
    Ok(run_kernels(&rows, &weights, &biases, false, y)?.is_empty())
}

/// Writes the results of the weights that have a kernel for so many rows; returns the first column and the index of
/// each of the others.
fn run_kernels<T: Element>(
    rows: &InputRows<'_, T>,
    weights: &[&QuantizedWeight],
    biases: &[Option<&[T]>],
    recording: bool,
    y: &mut [T],
) -> Result<Vec<(i64, usize)>> {
    let columns: i64 = weights.iter().map(|weight| weight.outputs).sum();
    let few = rows.rows <= FEW_ROWS;
    let plans: Vec<Plan> = weights
        .iter()
        .map(|weight| plan(weight, true, recording))
        .collect();
    let coded: Vec<Option<CodedWeight<'_>>> = weights
        .iter()
        .zip(&plans)
        .map(|(weight, plan)| match plan {
            // For many rows, words are no faster than a dequantized weight.
            Plan::ByGroup => Ok(coded_weight(weight)?.filter(|coded| {
                let bytes = coded.bytes && coded.byte_coding().is_some();
                few || bytes || weight.activations == Activations::Int8
            })),
            _ => Ok(None),
        })
        .collect::<Result<_>>()?;
    // Converted only if a kernel takes floats.
    let floats = match coded.iter().any(Option::is_some) {
        true => rows.floats(),
        false => &[],
    };
    let forms = Forms {
        set: InstructionSet::best(),
        splits: splits(&plans, rows),
        quantized: QuantizedInputs::new(InstructionSet::best(), floats, coded.iter().flatten()),
        rows,
    };

    let mut gemms: Vec<(usize, Box<dyn Gemm + '_>)> = Vec::with_capacity(weights.len());
    let mut gemm_biases: Vec<Option<&[T]>> = Vec::with_capacity(weights.len());
    let mut others: Vec<(i64, usize)> = Vec::new();
    let mut first: i64 = 0;
    for (index, weight) in weights.iter().enumerate() {
        match gemm(weight, plans[index], coded[index].as_ref(), &forms)? {
            Some(gemm) => {
                gemms.push((first.unsigned_abs() as usize, gemm));
                gemm_biases.push(biases[index]);
            }
            None => others.push((first, index)),
        }
        first += weight.outputs;
    }
    let borrowed: Vec<(usize, &dyn Gemm, Option<&[T]>)> = gemms
        .iter()
        .zip(gemm_biases)
        .map(|((first, gemm), bias)| (*first, &**gemm, bias))
        .collect();
    joint_gemm(&borrowed, rows.rows, columns.unsigned_abs() as usize, y);
    Ok(others)
}

/// Splits the outlier columns off the activations, once for each threshold.
fn splits<T: Element>(plans: &[Plan], rows: &InputRows<'_, T>) -> Vec<(f64, OutlierSplit)> {
    let mut splits: Vec<(f64, OutlierSplit)> = Vec::new();
    for plan in plans {
        let Plan::Split(threshold) = plan else {
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
    weight: &'a QuantizedWeight,
    plan: Plan,
    coded: Option<&'a CodedWeight<'a>>,
    forms: &'a Forms<'a, T>,
) -> Result<Option<Box<dyn Gemm + 'a>>> {
    let (set, rows) = (forms.set, forms.rows);
    let few = rows.rows <= FEW_ROWS;
    if let Some(weight) = coded {
        let gemm = CodedGemm::new(set, rows.floats(), &forms.quantized, weight);
        return Ok(Some(Box::new(gemm)));
    }
    let gemm: Box<dyn Gemm> = match (&weight.storage, plan) {
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
            set,
        }),
        (Storage::Fp8 { codes, scales }, _) if few => Box::new(DequantizingGemm {
            x: rows.floats(),
            width: rows.width,
            codes: elements::<u8>(codes)?,
            scales: elements::<f32>(scales)?,
            set,
        }),
        _ => return Ok(None),
    };
    Ok(Some(gemm))
}
