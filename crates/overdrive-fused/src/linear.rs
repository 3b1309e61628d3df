use overdrive_autograd::{BackwardContext, ForwardContext, Function, FunctionResult, apply};
use overdrive_kernels::{Element, is_batch_invariant};
use overdrive_sys::gemm::{mm_into, product_kind};
use overdrive_sys::named_operator::{self, NamedOperator};
use overdrive_sys::{autocast, engine};
use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::error::{check_floating, wrong_shape};
use crate::fp8;
use crate::kernel::few_rows::{Layer, few_rows};
use overdrive_kernels::tensors::{Fresh, elements, has_kernel, joined_view};
use overdrive_kernels::with_element;

/// Returns `x · weightᵀ + bias`, as `torch.nn.functional.linear` does, with its three matmuls (forward, and the
/// gradients of `x` and of `weight`) on the library that [`overdrive_sys::gemm`] chooses.
///
/// `x (…, I)`, `weight (O, I)`, `bias (O,)`; the result is `(…, O)`. Under autocast the operands are cast as autocast
/// casts them, and backward saves `x` in the low precision and the original weight instead of a cast copy. A second
/// derivative is refused. f64 and GPUs use libtorch's operator, which has second derivatives, adds the bias in the
/// matmul's kernel, and saves the copies that autocast makes, except under autocast on CUDA: there the
/// gradient of an f32 weight comes out of the matmul in f32, without a cast.
///
/// Under autocast with FP8 (`Precision::Fp8` of overdrive-precision) the three matmuls are of 8-bit floats (`_scaled_mm`) if
/// `I` and `O` are multiples of 16: `x` and `weight` in E4M3, the gradient of the result in E5M2, each with one scale, which
/// takes its largest element to the largest number of the format. Backward saves the codes of `x` and `weight`. Sources:
/// Micikevicius et al., [*FP8 Formats for Deep Learning*](https://arxiv.org/abs/2209.05433), 2022; torchao's float8 training
/// with tensorwise scaling, whose numbers it has.
///
/// # Errors
/// [`Error::Common`](crate::Error::Common) if the shapes do not match or the dtype of `x` is not a floating-point one.
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// let x = Tensor::ones([2, 3], (Kind::Float, Device::Cpu));
/// let y = overdrive_fused::linear(&x, &Tensor::ones([4, 3], (Kind::Float, Device::Cpu)), None)?;
/// assert_eq!(y, Tensor::full([2, 4], 3.0, (Kind::Float, Device::Cpu)));
/// # Ok::<(), overdrive_fused::Error>(())
/// ```
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    joint_linear(
        x,
        &[weight],
        bias.map(|bias| [bias]).as_ref().map(|b| &b[..]),
    )
}

/// Computes several linear layers of the same `x` as one matmul: `x · [w₁; w₂; …]ᵀ + [b₁; b₂; …]`, `(…, ΣO)`.
///
/// Weights that are adjacent in memory (see [`adjacent`]) are used in place; others are first copied together, in each
/// pass. Backward is one matmul for `x` and one for all weights, whose gradients are views of one tensor. On a GPU,
/// each of the three matmuls is libtorch's operator.
///
/// # Errors
/// As [`linear`]; [`Error::Common`](crate::Error::Common) for no weight at all.
pub fn joint_linear(x: &Tensor, weights: &[&Tensor], biases: Option<&[&Tensor]>) -> Result<Tensor> {
    let biases = biases.unwrap_or_default();
    check(x, weights, biases)?;
    let inputs: Vec<&Tensor> = std::iter::once(x)
        .chain(weights.iter().copied())
        .chain(biases.iter().copied())
        .collect();
    let recording = engine::is_grad_enabled() && inputs.iter().any(|tensor| tensor.requires_grad());
    let compute = compute_kind(x, weights, biases);
    let is_trained = recording && weights.iter().all(|weight| weight.requires_grad());
    let wide = is_trained && has_wide_gradients(x.device(), compute, weights[0].kind());
    let by_libtorch = is_left_to_libtorch(x.device(), weights.len(), recording, wide);
    if compute.is_some() && is_fp8(x.device()) && fp8::takes(weights) {
        return fp8::linear(x, weights, biases);
    }
    let Some(compute) = compute.filter(|_| !by_libtorch) else {
        let weight = joined(weights)?;
        let bias = (!biases.is_empty()).then(|| joined(biases)).transpose()?;
        return Ok(x.f_linear(&weight, bias.as_ref())?);
    };
    // No gradient is needed, so this creates no node of the graph.
    if is_decoding(&inputs, compute) {
        return decode(x, weights, biases);
    }
    let function = Linear {
        outputs: weights.iter().map(|weight| weight.size()[0]).collect(),
        biased: !biases.is_empty(),
        compute,
        weight_kind: weights[0].kind(),
        has_epilogue: x.device() != Device::Cpu,
        wide,
    };
    Ok(apply(function, &inputs)?.remove(0))
}

/// Returns `true` under an autocast region with FP8.
fn is_fp8(device: Device) -> bool {
    autocast::state(device).is_ok_and(|state| state.enabled && state.fp8)
}

/// Returns `true` if a layer runs entirely on libtorch's operator. On a GPU, these are all layers except those that need
/// gradients and either have several weights, whose recorded joint weight would be a copy in each pass, or get `wide`
/// gradients.
fn is_left_to_libtorch(device: Device, weights: usize, recording: bool, wide: bool) -> bool {
    device != Device::Cpu && (!recording || weights == 1 && !wide)
}

/// Returns `true` if the matmul for the gradients of f32 weights writes f32 although it computes in low precision
/// (`mm.dtype`, which libtorch has on CUDA). This saves a cast, which reads and writes 6 bytes for each weight.
fn has_wide_gradients(device: Device, compute: Option<Kind>, weight: Kind) -> bool {
    let is_low = matches!(compute, Some(Kind::BFloat16 | Kind::Half));
    device.is_cuda() && is_low && weight == Kind::Float
}

/// Copies tensors into one buffer and returns views of it, in the same order: the best layout for the weights
/// of a [`joint_linear`]. All dimensions but the first must be equal.
///
/// # Errors
/// An error of libtorch if they are not.
pub fn adjacent(tensors: &[&Tensor]) -> Result<Vec<Tensor>> {
    // The views must be leaves; with a recorded `cat`, gradients would go to the originals.
    let _no_grad = engine::GradMode::new(false);
    let joint = Tensor::f_cat(tensors, 0)?;
    let sizes: Vec<i64> = tensors.iter().map(|tensor| tensor.size()[0]).collect();
    Ok(joint.f_split_with_sizes(sizes.as_slice(), 0)?)
}

/// The number of rows of `x` up to which [`linear`] without gradients gives a row of f32 the same bits alone and beside
/// others on a CPU.
//
// Up to it this crate's kernel, which reads the weights once, is faster than libtorch's packed matmul (the benchmark
// `few_rows`, Zen 4): by 2.3x at one row, 2x at 8 and 1.4x at 32 in fp32.
pub const FEW_ROWS: usize = 32;

/// Returns the number of rows of `x` up to which this crate's kernel is used.
fn few_rows_limit(kind: Kind) -> usize {
    match kind {
        // With instructions for bf16, libtorch is faster from about 8 rows on.
        Kind::BFloat16 if product_kind(Device::Cpu, kind) == kind => 8,
        _ => FEW_ROWS,
    }
}

/// Returns `true` if the matmul has few rows, needs no gradient, and all operands have the same dtype, which the kernel
/// supports.
fn is_decoding(inputs: &[&Tensor], compute: Kind) -> bool {
    let width = inputs[0]
        .size()
        .last()
        .map_or(1, |n| n.unsigned_abs() as usize);
    // Unlike a library, the kernel adds the terms of a row in the same order for any number of rows.
    let few = inputs[0].numel() <= few_rows_limit(compute) * width || is_batch_invariant();
    few && inputs
        .iter()
        .all(|tensor| has_kernel(tensor) && tensor.kind() == compute && tensor.is_contiguous())
        && !(engine::is_grad_enabled() && inputs.iter().any(|tensor| tensor.requires_grad()))
}

/// Computes the matmul with the kernel for few rows. Operands are contiguous and have the same dtype.
fn decode(x: &Tensor, weights: &[&Tensor], biases: &[&Tensor]) -> Result<Tensor> {
    let mut size = x.size();
    let width = size.last().map_or(1, |n| n.unsigned_abs() as usize);
    if let Some(last) = size.last_mut() {
        *last = weights.iter().map(|weight| weight.size()[0]).sum();
    }
    with_element!(x.kind(), T => {
        let mut y = Fresh::<T>::new(&size)?;
        let mut maps = Vec::with_capacity(weights.len());
        for (index, weight) in weights.iter().enumerate() {
            maps.push(Layer {
                weight: elements::<T>(*weight)?,
                bias: biases.get(index).map(|bias| elements::<T>(*bias)).transpose()?,
            });
        }
        // Widened once here, because every output reads all of `x`.
        let x: Vec<f32> = elements::<T>(x)?.iter().map(|x| x.to_f32()).collect();
        few_rows(&x, width, &maps, y.elements_mut()?);
        Ok(y.into_tensor())
    })
}

/// Returns the dtype of the matmuls: autocast's, or that of all operands. `None` for calls that libtorch handles: f64,
/// operands of different dtypes or devices (libtorch's error names them), no elements.
fn compute_kind(x: &Tensor, weights: &[&Tensor], biases: &[&Tensor]) -> Option<Kind> {
    let low = |kind| matches!(kind, Kind::Float | Kind::BFloat16 | Kind::Half);
    let device = x.device();
    let mut operands = std::iter::once(&x).chain(weights).chain(biases);
    if !operands.all(|tensor| tensor.device() == device && low(tensor.kind())) || x.numel() == 0 {
        return None;
    }
    match autocast::state(device) {
        Ok(state) if state.enabled => Some(state.dtype),
        _ => {
            let mut others = weights.iter().chain(biases);
            others
                .all(|tensor| tensor.kind() == x.kind())
                .then(|| x.kind())
        }
    }
}

fn check(x: &Tensor, weights: &[&Tensor], biases: &[&Tensor]) -> Result<()> {
    let wrong =
        |name, found: &Tensor, expected: String| Err(wrong_shape("linear", name, found, expected));
    let width = x.size().last().copied();
    if weights.is_empty() || width.is_none() {
        return wrong("x", x, "(…, I), with at least one weight".to_owned());
    }
    check_floating("linear", "x", x)?;
    for weight in weights {
        if weight.dim() != 2 || weight.size().last().copied() != width {
            let expected = format!("(O, {}) for x of shape {:?}", width.unwrap_or(0), x.size());
            return wrong("weight", weight, expected);
        }
    }
    if !biases.is_empty() && biases.len() != weights.len() {
        let expected = format!("one bias for each of {} weights, or none", weights.len());
        return wrong("biases", biases[0], expected);
    }
    for (weight, bias) in weights.iter().zip(biases) {
        if bias.size() != weight.size()[..1] {
            return wrong("bias", bias, format!("({},)", weight.size()[0]));
        }
    }
    Ok(())
}

/// Joins the tensors into one: a view if they are adjacent, else a copy.
pub(crate) fn joined(tensors: &[&Tensor]) -> Result<Tensor> {
    let [first, rest @ ..] = tensors else {
        unreachable!("checked: there is at least one")
    };
    if rest.is_empty() {
        return Ok(first.shallow_clone());
    }
    // If recorded, the view would give the gradients of all tensors to the first.
    if !engine::is_grad_enabled()
        && let Some(view) = joined_view(tensors)
    {
        return Ok(view);
    }
    Ok(Tensor::f_cat(tensors, 0)?)
}

/// The inputs: x, the weights, the biases if `biased`.
struct Linear {
    outputs: Vec<i64>,
    biased: bool,
    compute: Kind,
    weight_kind: Kind,
    /// If `true`, libtorch's matmul adds the bias in its kernel.
    has_epilogue: bool,
    /// If `true`, the matmul for the gradients of the weights writes f32.
    wide: bool,
}

impl Function for Linear {
    const NAME: &'static str = "linear";

    fn forward(
        &mut self,
        context: &mut ForwardContext<'_>,
        inputs: &[&Tensor],
    ) -> FunctionResult<Vec<Tensor>> {
        let x = inputs[0].f_to_kind(self.compute)?.f_contiguous()?;
        let (weights, biases) = inputs[1..].split_at(self.outputs.len());
        let weight = joined(weights)?.f_to_kind(self.compute)?;
        let rows = rows_of(&x)?;
        let width: i64 = self.outputs.iter().sum();
        let mut size = x.size();
        if let Some(last) = size.last_mut() {
            *last = width;
        }
        let product = || {
            if self.has_epilogue {
                let bias = self.biased.then(|| joined(biases)).transpose()?;
                let bias = bias.map(|bias| bias.f_to_kind(self.compute)).transpose()?;
                let y = rows.f_linear(&weight, bias.as_ref())?;
                return Ok(vec![y.f_view(size.as_slice())?]);
            }
            let y = Tensor::f_empty(&size, (x.kind(), x.device()))?;
            let y_rows = y.f_view([-1, width])?;
            if self.biased {
                // `mm_into` accumulates, which saves a pass over the result.
                y_rows.shallow_clone().f_copy_(&joined(biases)?)?;
            }
            mm_into(&y_rows, &rows, &weight.f_tr()?, self.biased)?;
            Ok(vec![y])
        };
        let y = named_operator::call(NamedOperator::Mm, &[&rows, &weight], product)?;
        // Saves the weights separately: a joint copy of them would live as long as the graph.
        let mut saved = vec![&x];
        // Only the gradient of `x` reads the weights.
        if context.needs_input_grad(0) {
            saved.extend(weights);
        }
        context.save_for_backward(&saved);
        Ok(y)
    }

    fn backward(
        &self,
        context: &BackwardContext,
        gradients: &[Option<Tensor>],
    ) -> FunctionResult<Vec<Option<Tensor>>> {
        let mut results: Vec<Option<Tensor>> = Vec::new();
        let n = self.outputs.len();
        let inputs = 1 + n + if self.biased { n } else { 0 };
        results.resize_with(inputs, || None);
        let (Some(dy), [x, weights @ ..]) = (&gradients[0], context.saved()) else {
            return Ok(results);
        };
        let width: i64 = self.outputs.iter().sum();
        let dy = dy.f_to_kind(self.compute)?.f_contiguous()?;
        let dy = dy.f_view([-1, width])?;
        if context.needs_input_grad(0) {
            let weights: Vec<&Tensor> = weights.iter().collect();
            let dx = x.f_empty_like()?;
            let weight = joined(&weights)?.f_to_kind(self.compute)?;
            mm_into(&rows_of(&dx)?, &dy, &weight, false)?;
            // The engine casts gradients to the dtypes of their inputs.
            results[0] = Some(dx);
        }
        if (1..=n).any(|input| context.needs_input_grad(input)) {
            let rows = rows_of(x)?;
            let dw = if self.wide {
                dy.f_tr()?.f_mm_dtype(&rows, Kind::Float)?
            } else {
                let dw = Tensor::f_empty([width, rows.size()[1]], (x.kind(), x.device()))?;
                mm_into(&dw, &dy.f_tr()?, &rows, false)?;
                // One cast instead of one for each weight.
                dw.f_to_kind(self.weight_kind)?
            };
            hand_out(&self.outputs, dw, &mut results[1..=n])?;
        }
        if (n + 1..inputs).any(|input| context.needs_input_grad(input)) {
            let db = dy.f_sum_dim_intlist([0i64].as_slice(), false, dy.kind())?;
            hand_out(&self.outputs, db, &mut results[n + 1..])?;
        }
        Ok(results)
    }
}

/// Divides the gradient of joint weights with these `outputs`. A single gradient is passed on unchanged, so that
/// accumulation can keep it instead of copying it.
pub(crate) fn hand_out(
    outputs: &[i64],
    joint: Tensor,
    results: &mut [Option<Tensor>],
) -> Result<()> {
    if let [only] = results {
        *only = Some(joint);
        return Ok(());
    }
    let parts = joint.f_split_with_sizes(outputs, 0)?;
    for (result, part) in results.iter_mut().zip(parts) {
        *result = Some(part);
    }
    Ok(())
}

/// Returns `(…, I)` as a matrix.
pub(crate) fn rows_of(x: &Tensor) -> Result<Tensor> {
    let width = x.size().last().copied().unwrap_or(1);
    Ok(x.f_view([-1, width])?)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use overdrive_profiling::OperatorCounts;

    use super::*;

    #[test]
    fn on_a_gpu_all_but_joint_layers_and_wide_gradients_in_training_are_left_to_libtorch() {
        for (device, weights, recording, wide, expected) in [
            (Device::Cuda(0), 1, true, false, true),
            (Device::Cuda(0), 1, true, true, false),
            (Device::Cuda(0), 1, false, false, true),
            (Device::Cuda(0), 3, false, false, true),
            (Device::Cuda(0), 3, true, false, false),
            (Device::Mps, 1, true, false, true),
            (Device::Cpu, 1, true, false, false),
            (Device::Cpu, 3, false, false, false),
        ] {
            let found = is_left_to_libtorch(device, weights, recording, wide);
            assert_eq!(found, expected, "{device:?} {weights} {recording} {wide}");
        }
    }

    #[test]
    fn gradients_are_wide_under_mixed_precision_on_cuda() {
        let cuda = Device::Cuda(0);
        for (device, compute, weight, expected) in [
            (cuda, Some(Kind::BFloat16), Kind::Float, true),
            (cuda, Some(Kind::Half), Kind::Float, true),
            (cuda, Some(Kind::BFloat16), Kind::BFloat16, false),
            (cuda, Some(Kind::Float), Kind::Float, false),
            (cuda, None, Kind::Double, false),
            (Device::Cpu, Some(Kind::BFloat16), Kind::Float, false),
        ] {
            let found = has_wide_gradients(device, compute, weight);
            assert_eq!(found, expected, "{device:?} {compute:?} {weight:?}");
        }
    }

    #[test]
    fn the_joint_layer_of_a_gpu_gives_the_same_results_and_gradients() {
        let kind = (Kind::Float, Device::Cpu);
        let leaf = |size: &[i64]| (Tensor::randn(size, kind) * 0.5).set_requires_grad(true);
        let x = leaf(&[2, 5, 16]);
        let (w, b) = ([leaf(&[8, 16]), leaf(&[4, 16])], [leaf(&[8]), leaf(&[4])]);
        let inputs = [&x, &w[0], &w[1], &b[0], &b[1]];
        let results = [false, true].map(|has_epilogue| {
            let function = Linear {
                outputs: vec![8, 4],
                biased: true,
                compute: Kind::Float,
                weight_kind: Kind::Float,
                has_epilogue,
                wide: false,
            };
            let y = apply(function, &inputs).unwrap().remove(0);
            let gradients =
                Tensor::run_backward(&[y.square().sum(Kind::Float)], &inputs, false, false);
            (y.detach(), gradients)
        });
        let [(own, own_gradients), (other, gradients)] = results;
        assert!(own.allclose(&other, 1e-5, 1e-6, false));
        for (own, other) in own_gradients.iter().zip(&gradients) {
            assert!(own.allclose(other, 1e-5, 1e-5, false));
        }
    }

    #[test]
    fn a_layer_of_libtorch_is_one_launch_with_its_bias() {
        let kind = (Kind::Double, Device::Cpu);
        let (x, weight, bias) = (
            Tensor::ones([6, 16], kind),
            Tensor::ones([8, 16], kind),
            Tensor::ones([8], kind),
        );
        // f64 is left to libtorch on a CPU, as every dtype is on a GPU.
        let counts = OperatorCounts::new();
        let _ = linear(&x, &weight, Some(&bias)).unwrap();
        assert_eq!(counts.launches(), 1, "{:?}", counts.by_name());
    }
}
