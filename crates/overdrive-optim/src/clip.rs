//! Gradient clipping, which the accumulator of overdrive-accumulation does in training.

use overdrive_core::check_option;
use overdrive_sys::op::{Output, Value, call};
use overdrive_sys::raw::host_value;
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::checks::sparse_gradient;
use crate::{Error, Optimizer, Result};

/// Keeps the quotient finite if all gradients are zero. The value of PyTorch.
const NORM_EPSILON: f64 = 1e-6;

/// The options of [`clip_grad_norm`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ClipOptions {
    /// The order of the norm, positive; `f64::INFINITY` for the maximum absolute value. Default: 2.
    pub norm_type: f64,
    /// If `true`, an infinite or NaN norm is an error, which costs a synchronization with the device.
    /// Default: `false`; the gradients are then scaled by the resulting factor, as in PyTorch.
    pub error_if_nonfinite: bool,
}

impl Default for ClipOptions {
    fn default() -> Self {
        Self {
            norm_type: 2.0,
            error_if_nonfinite: false,
        }
    }
}

/// Scales the gradients of `parameters` so that their total norm is at most `max_norm`, and returns the
/// norm before clipping ([`torch.nn.utils.clip_grad_norm_`]).
///
/// The norm is that of the concatenation of all gradients, a scalar on the device of the first one.
/// Clipping does not synchronize with the device; reading the norm does. All gradients are multiplied by
/// `min(1, max_norm / (norm + 1e-6))`. Parameters without a gradient are skipped; if there is no
/// gradient, the norm is a float32 0 on the CPU.
///
/// # Errors
/// [`Error::NonFiniteNorm`] with `error_if_nonfinite`, in which case the gradients are unchanged;
/// [`Error::Common`] if `max_norm` is negative or NaN, or `norm_type` is not positive;
/// [`Error::UnfitGradient`] if a gradient is sparse.
///
/// ```
/// use overdrive_optim::{ClipOptions, clip_grad_norm};
/// use tch::{Kind, Tensor};
///
/// let weight = Tensor::from_slice(&[3.0, 4.0]).set_requires_grad(true);
/// weight.square().sum(Kind::Double).backward(); // the gradient is (6, 8)
/// let norm = clip_grad_norm(&[weight.shallow_clone()], 1.0, ClipOptions::default())?;
/// assert_eq!(norm.double_value(&[]), 10.0);
/// assert!((weight.grad().double_value(&[0]) - 0.6).abs() < 1e-6);
/// # Ok::<(), overdrive_optim::Error>(())
/// ```
///
/// [`torch.nn.utils.clip_grad_norm_`]:
/// https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_norm_.html
pub fn clip_grad_norm(
    parameters: &[Tensor],
    max_norm: f64,
    options: ClipOptions,
) -> Result<Tensor> {
    check_bound("max_norm", max_norm)?;
    let _no_grad = tch::no_grad_guard();
    let buckets = gradient_buckets(parameters)?;
    let norm = norm_of(&buckets, options)?;
    scale_down(&buckets, max_norm, &norm)?;
    Ok(norm)
}

/// Returns the total norm of the gradients of `parameters` without clipping them.
///
/// # Errors
/// As [`clip_grad_norm`].
pub fn grad_norm(parameters: &[Tensor], options: ClipOptions) -> Result<Tensor> {
    let _no_grad = tch::no_grad_guard();
    norm_of(&gradient_buckets(parameters)?, options)
}

/// Clamps every element of the gradients to `[-clip_value, clip_value]`
/// ([`torch.nn.utils.clip_grad_value_`]).
///
/// # Errors
/// [`Error::Common`] if `clip_value` is negative or NaN; [`Error::UnfitGradient`] if a gradient is sparse.
///
/// [`torch.nn.utils.clip_grad_value_`]:
/// https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_value_.html
pub fn clip_grad_value(parameters: &[Tensor], clip_value: f64) -> Result<()> {
    check_bound("clip_value", clip_value)?;
    let _no_grad = tch::no_grad_guard();
    for bucket in gradient_buckets(parameters)? {
        // Two calls: there is no foreach operator that clamps on both sides.
        let gradients = Value::Tensors(&bucket.gradients);
        call(
            "aten::_foreach_clamp_min_",
            "Scalar",
            &[gradients, Value::Float(-clip_value)],
        )?;
        call(
            "aten::_foreach_clamp_max_",
            "Scalar",
            &[gradients, Value::Float(clip_value)],
        )?;
    }
    Ok(())
}

/// Clips every parameter group of an optimizer by its own total norm, to at most `max_norms[i]` for group
/// i; `None` leaves a group unchanged. Returns the norm of each group before clipping.
///
/// Groups whose gradients differ in magnitude (a new head on a trained body, embeddings) then do not
/// scale each other down. No gradient is changed if a limit is out of its range.
///
/// # Errors
/// [`Error::BoundCount`] if the numbers of limits and groups differ; otherwise as [`clip_grad_norm`].
///
/// ```
/// use overdrive_optim::{AdamW, AdamWConfig, ClipOptions, ParamGroup, clip_grad_norm_by_group};
/// use tch::{Kind, Tensor};
///
/// let leaf = |values: &[f32]| Tensor::from_slice(values).set_requires_grad(true);
/// let (body, head) = (leaf(&[1.0, 1.0]), leaf(&[1.0]));
/// let groups = vec![
///     ParamGroup::new("body", vec![("body".into(), body.shallow_clone())]),
///     ParamGroup::new("head", vec![("head".into(), head.shallow_clone())]),
/// ];
/// let optimizer = AdamW::new(groups, AdamWConfig::default())?;
/// (body.sum(Kind::Float) * 3.0 + head.sum(Kind::Float) * 100.0).backward();
/// clip_grad_norm_by_group(&optimizer, &[None, Some(1.0)], ClipOptions::default())?;
/// assert_eq!(Vec::<f32>::try_from(body.grad())?, [3.0, 3.0]);
/// assert!((head.grad().double_value(&[0]) - 1.0).abs() < 1e-5);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn clip_grad_norm_by_group<O: Optimizer + ?Sized>(
    optimizer: &O,
    max_norms: &[Option<f64>],
    options: ClipOptions,
) -> Result<Vec<Tensor>> {
    let groups = optimizer.parameters_by_group();
    if groups.len() != max_norms.len() {
        return Err(Error::BoundCount {
            given: max_norms.len(),
            groups: groups.len(),
        });
    }
    // All limits are checked before a gradient is changed.
    for bound in max_norms.iter().flatten() {
        check_bound("max_norm", *bound)?;
    }
    let pairs = groups.iter().zip(max_norms);
    pairs
        .map(|(parameters, bound)| match bound {
            Some(bound) => clip_grad_norm(parameters, *bound, options),
            None => grad_norm(parameters, options),
        })
        .collect()
}

/// Multiplies the gradients of `parameters` by `factor`, a scalar tensor on any device, with one call for
/// each device and dtype and without synchronization.
///
/// # Errors
/// [`Error::UnfitGradient`] if a gradient is sparse, and libtorch's errors.
pub fn scale_grads(parameters: &[Tensor], factor: &Tensor) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    multiply(&gradient_buckets(parameters)?, factor)
}

/// Gradients of one device and dtype, which one foreach call can process.
struct GradientBucket {
    device: Device,
    kind: Kind,
    gradients: Vec<Tensor>,
}

fn gradient_buckets(parameters: &[Tensor]) -> Result<Vec<GradientBucket>> {
    let mut buckets: Vec<GradientBucket> = Vec::new();
    for (index, parameter) in parameters.iter().enumerate() {
        let gradient = parameter.f_grad()?;
        if !gradient.defined() {
            continue;
        }
        if gradient.is_sparse() {
            return Err(sparse_gradient(format!("parameters[{index}]")));
        }
        let (device, kind) = (gradient.device(), gradient.f_kind()?);
        match buckets
            .iter_mut()
            .find(|b| (b.device, b.kind) == (device, kind))
        {
            Some(bucket) => bucket.gradients.push(gradient),
            None => buckets.push(GradientBucket {
                device,
                kind,
                gradients: vec![gradient],
            }),
        }
    }
    Ok(buckets)
}

/// Returns the norm of the norms, which is the norm of the concatenation of all gradients.
fn norm_of(buckets: &[GradientBucket], options: ClipOptions) -> Result<Tensor> {
    let ClipOptions {
        norm_type,
        error_if_nonfinite,
    } = options;
    let expected = "positive; infinity is allowed";
    check_option(norm_type > 0.0, "norm_type", norm_type, expected)?;
    // As in PyTorch, a model without gradients has the norm 0.
    let Some(first) = buckets.first() else {
        return Ok(Tensor::f_zeros([0i64; 0], (Kind::Float, Device::Cpu))?);
    };
    let mut norms = Vec::new();
    for bucket in buckets {
        let arguments = [Value::Tensors(&bucket.gradients), Value::Float(norm_type)];
        let outputs = call("aten::_foreach_norm", "Scalar", &arguments)?;
        for norm in outputs.into_iter().map(Output::into_tensors) {
            for norm in norm? {
                norms.push(norm.f_to_device(first.device)?);
            }
        }
    }
    // Stacking promotes mixed dtypes to the wider one.
    let norms = Tensor::f_stack(&norms, 0)?;
    let norm = one_norm(&norms, norm_type)?;
    // Reading the value synchronizes with the device.
    if error_if_nonfinite {
        let value = norm.f_double_value(&[])?;
        if !value.is_finite() {
            return Err(Error::NonFiniteNorm {
                norm_type,
                norm: value,
            });
        }
    }
    Ok(norm)
}

fn one_norm(tensor: &Tensor, norm_type: f64) -> Result<Tensor> {
    let arguments = [Value::Tensor(tensor), Value::Float(norm_type)];
    let output = call("aten::linalg_vector_norm", "", &arguments)?
        .into_iter()
        .next();
    Ok(output.unwrap_or(Output::None).into_tensor()?)
}

fn scale_down(buckets: &[GradientBucket], max_norm: f64, norm: &Tensor) -> Result<()> {
    // Only measured: no pass over the gradients, and an infinite norm does not turn them into NaN.
    if max_norm == f64::INFINITY {
        return Ok(());
    }
    let coefficient = norm
        .f_add_scalar(NORM_EPSILON)?
        .f_reciprocal()?
        .f_mul_scalar(max_norm)?;
    let coefficient = coefficient.f_clamp_max(1.0)?;
    // On a CPU reading the coefficient costs nothing, and a factor of 1 changes no bit. On a device it is not read.
    if host_value(&coefficient) == Some(1.0) {
        return Ok(());
    }
    multiply(buckets, &coefficient)
}

fn multiply(buckets: &[GradientBucket], factor: &Tensor) -> Result<()> {
    for bucket in buckets {
        // A CPU scalar is passed as an argument of the kernel, without a copy to the device.
        let factor = match factor.device() {
            Device::Cpu => factor.shallow_clone(),
            _ => factor.f_to_device(bucket.device)?,
        };
        let arguments = [Value::Tensors(&bucket.gradients), Value::Tensor(&factor)];
        call("aten::_foreach_mul_", "Tensor", &arguments)?;
    }
    Ok(())
}

fn check_bound(option: &'static str, value: f64) -> Result<()> {
    // Infinity is allowed: it measures the norm without clipping.
    let expected = "0 or positive; infinity is allowed";
    Ok(check_option(value >= 0.0, option, value, expected)?)
}
