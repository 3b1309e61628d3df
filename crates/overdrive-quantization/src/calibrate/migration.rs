//! Migration of outliers from activations to weights before quantization: SmoothQuant (Xiao et al. 2022,
//! arXiv:2211.10438), and AWQ's search for the strength (Lin et al. 2023, arXiv:2306.00978).

use tch::{Kind, Tensor};

use super::statistics::InputStatistics;
use crate::{Error, QuantizedWeight, Result, Scheme};

/// The choice of the scales that divide the activations and multiply the weights.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub enum Migration {
    /// SmoothQuant, `max|x|^α / max|w|^(1−α)` of each input, for schemes that quantize activations. `α` is in
    /// `0..=1`, in the paper 0.5.
    Strength(f64),
    /// AWQ, `rms(x)^α` with the `α` in `0, 1/steps, …, 1` that minimizes the change of the outputs, for schemes
    /// that quantize only weights.
    Search {
        /// The number of steps; AWQ uses 20.
        steps: u32,
    },
}

/// Returns the scales that divide the inputs of the layers with `weights (O, I)` and multiply the columns of the
/// weights, so that both are easy to quantize: positive, f32 `(I,)`. All layers have the same input.
///
/// The division costs nothing if it is folded into the producer of the input: the weight of a norm, or the rows
/// of the previous layer ([`fold_into_rows`]).
///
/// # Errors
/// [`Error::Common`] for no weights, a wrong number of inputs and a strength out of range; the errors of
/// quantization.
pub fn migration_scales(
    weights: &[&Tensor],
    statistics: &InputStatistics,
    migration: Migration,
    scheme: Scheme,
) -> Result<Tensor> {
    let inputs = statistics.inputs();
    if weights.is_empty() || weights.iter().any(|w| w.size().get(1) != Some(&inputs)) {
        let shapes: Vec<_> = weights.iter().map(|weight| weight.size()).collect();
        let expected = format!("at least one weight, all of shape (O, {inputs})");
        return Err(Error::option(
            "weights",
            format!("of shapes {shapes:?}"),
            expected,
        ));
    }
    match migration {
        Migration::Strength(alpha) if (0.0..=1.0).contains(&alpha) => {
            let mut largest = Tensor::f_zeros_like(statistics.largest())?;
            for weight in weights {
                let own = weight.f_to_kind(Kind::Float)?.f_abs()?.f_amax([0], false)?;
                largest = largest.f_maximum(&own)?;
            }
            // 1e-5 is the bound of the paper's code: an input that is always 0 gives no scale.
            let activations = statistics.largest().f_clamp_min(1e-5)?;
            let numerator = activations.f_pow_tensor_scalar(alpha)?;
            let denominator = largest
                .f_clamp_min(1e-5)?
                .f_pow_tensor_scalar(1.0 - alpha)?;
            Ok(numerator.f_div(&denominator)?.f_clamp_min(1e-5)?)
        }
        Migration::Strength(alpha) => {
            Err(Error::option("migration strength", alpha, "from 0 to 1"))
        }
        Migration::Search { steps } => search(weights, statistics, steps.max(1), scheme),
    }
}

/// Returns the scales `rms(x)^α` whose quantized weights change the outputs least.
fn search(
    weights: &[&Tensor],
    statistics: &InputStatistics,
    steps: u32,
    scheme: Scheme,
) -> Result<Tensor> {
    let typical = statistics.mean_squares()?.f_sqrt()?.f_clamp_min(1e-4)?;
    let mut best: Option<(f64, Tensor)> = None;
    // Step 0 is `α = 0`, all scales 1: the result is never worse than no migration.
    for step in 0..=steps {
        let alpha = f64::from(step) / f64::from(steps);
        let raised = typical.f_pow_tensor_scalar(alpha)?;
        // Centred on 1: a common factor would only move the scales of the weights.
        let middle = raised.f_max()?.f_mul(&raised.f_min()?)?.f_sqrt()?;
        let scales = raised.f_div(&middle)?.f_clamp_min(1e-4)?;
        let mut error = 0.0;
        for weight in weights {
            let weight = weight.f_to_kind(Kind::Float)?;
            let scaled = weight.f_mul(&scales)?;
            let packed = QuantizedWeight::quantize(&scaled, scheme)?;
            let back = packed.dequantize(Kind::Float)?.f_div(&scales)?;
            error += statistics.output_error(&weight, &back)?;
        }
        if best.as_ref().is_none_or(|(least, _)| error < *least) {
            best = Some((error, scales));
        }
    }
    // Never `None`: there are at least two steps.
    match best {
        Some((_, scales)) => Ok(scales),
        None => Ok(typical.f_ones_like()?),
    }
}

/// Returns `weight (O, I)` with its columns multiplied by `scales (I,)`, for inputs divided by them.
///
/// # Errors
/// An error of libtorch.
pub fn fold_into_columns(weight: &Tensor, scales: &Tensor) -> Result<Tensor> {
    Ok(weight.f_mul(&scales.f_to_kind(weight.kind())?)?)
}

/// Returns the weight of a norm `(I,)`, or the weight `(I, J)` or bias `(I,)` of a linear layer, with outputs
/// divided by `scales (I,)`. `adds_one`: the norm multiplies by `1 + weight`, as in Gemma.
///
/// # Errors
/// An error of libtorch.
pub fn fold_into_rows(weight: &Tensor, scales: &Tensor, adds_one: bool) -> Result<Tensor> {
    let scales = scales.f_to_kind(weight.kind())?;
    let scales = match weight.dim() {
        2 => scales.f_unsqueeze(1)?,
        _ => scales,
    };
    if adds_one {
        // The norm adds 1 to what is stored, so 1 is added before the division and subtracted after it.
        let whole = weight.f_add_scalar(1.0)?.f_div(&scales)?;
        return Ok(whole.f_sub_scalar(1.0)?);
    }
    Ok(weight.f_div(&scales)?)
}
