//! Adam's update through libtorch's operators: for devices and dtypes that the kernels of this crate do
//! not support, and for float32 states, where libtorch's fused kernel is already limited by memory
//! bandwidth.

use std::ops::Range;

use overdrive_gpu::{Adam8, AdamFactors, CodedAverage};
use overdrive_sys::op::{Value, call};
use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::adamw8bit::AdamState;
use crate::code_book::{BLOCK, CODES, CodeBook};
use crate::kernels::AdamNumbers;
use crate::paging::{Allocated, Storage};

/// Updates elements `range` by AdamW with averages in float32 (float64 for float64 parameters).
pub(crate) fn adam32(
    numbers: &AdamNumbers,
    parameter: &Tensor,
    gradient: &Tensor,
    state: &AdamState,
    range: &Range<usize>,
) -> Result<()> {
    let mut target = flat_range(parameter, range)?;
    let kind = state.exp_avg.tensor.kind();
    let exp_avg = fetch(&state.exp_avg, range, parameter.device())?;
    let exp_avg_sq = fetch(&state.exp_avg_sq, range, parameter.device())?;
    // `to_kind` returns the same tensor if the dtypes agree, so the update is then in place.
    let wide = target.f_to_kind(kind)?;
    let gradient = flat_range(gradient, range)?.f_to_kind(kind)?;
    adamw(numbers, &wide, &gradient, &exp_avg, &exp_avg_sq)?;
    if target.kind() != kind {
        target.f_copy_(&wide)?;
    }
    put_back(&state.exp_avg, range, &exp_avg)?;
    put_back(&state.exp_avg_sq, range, &exp_avg_sq)
}

/// Updates elements `range`, which are whole blocks, by AdamW with averages in 8 bits.
pub(crate) fn adam8(
    numbers: &AdamNumbers,
    parameter: &Tensor,
    gradient: &Tensor,
    state: &AdamState,
    scales: &(Tensor, Tensor),
    range: &Range<usize>,
) -> Result<()> {
    let device = parameter.device();
    let blocks = range.start / BLOCK..range.end.div_ceil(BLOCK);
    let books = [
        BookTensors::new(CodeBook::signed(), device)?,
        BookTensors::new(CodeBook::unsigned(), device)?,
    ];
    // Scales are on the device already; only codes may be in host memory.
    let codes1 = fetch(&state.exp_avg, range, device)?;
    let codes2 = fetch(&state.exp_avg_sq, range, device)?;
    let mut scales1 = flat_range(&scales.0, &blocks)?;
    let mut scales2 = flat_range(&scales.1, &blocks)?;
    let mut target = flat_range(parameter, range)?;
    let gradient = flat_range(gradient, range)?;
    if let Some(kernel) = gpu_kernel(&[&target, &gradient, &codes1, &codes2, &scales1, &scales2])? {
        let coded = |index: usize, codes, scales| CodedAverage {
            codes,
            scales,
            book: &books[index].codes,
            bounds: &books[index].bounds,
        };
        let average = coded(0, &codes1, &scales1);
        let squares = coded(1, &codes2, &scales2);
        kernel.step(&target, &gradient, average, squares, &factors(numbers))?;
        put_back(&state.exp_avg, range, &codes1)?;
        return put_back(&state.exp_avg_sq, range, &codes2);
    }
    let exp_avg = books[0].dequantize(&codes1, &scales1)?;
    let exp_avg_sq = books[1].dequantize(&codes2, &scales2)?;

    let wide = target.f_to_kind(Kind::Float)?;
    let gradient = gradient.f_to_kind(Kind::Float)?;
    adamw(numbers, &wide, &gradient, &exp_avg, &exp_avg_sq)?;
    if target.kind() != Kind::Float {
        target.f_copy_(&wide)?;
    }

    let (new_codes, new_scales) = books[0].quantize(&exp_avg)?;
    codes1.shallow_clone().f_copy_(&new_codes)?;
    scales1.f_copy_(&new_scales)?;
    let (new_codes, new_scales) = books[1].quantize(&exp_avg_sq)?;
    codes2.shallow_clone().f_copy_(&new_codes)?;
    scales2.f_copy_(&new_scales)?;
    put_back(&state.exp_avg, range, &codes1)?;
    put_back(&state.exp_avg_sq, range, &codes2)
}

/// Returns the GPU kernel, if it takes these tensors: the parameter, the gradient and the state.
fn gpu_kernel(tensors: &[&Tensor; 6]) -> Result<Option<Adam8>> {
    let [parameter, gradient, ..] = tensors;
    let Some(kernels) = overdrive_gpu::kernels(parameter.device())? else {
        return Ok(None);
    };
    if gradient.kind() != parameter.kind() || !Adam8::takes(tensors) {
        return Ok(None);
    }
    let count = parameter.numel() as i64;
    Ok(kernels.adam8(parameter.kind(), count)?)
}

/// Returns the coefficients as the GPU kernel takes them.
fn factors(numbers: &AdamNumbers) -> AdamFactors {
    let sign = if numbers.maximize { -1.0 } else { 1.0 };
    AdamFactors {
        betas: numbers.betas,
        rests: (sign * (1.0 - numbers.betas.0), 1.0 - numbers.betas.1),
        decay: numbers.decay,
        step_size: numbers.step_size,
        correction2: 1.0 / numbers.correction2,
        eps: numbers.eps,
    }
}

/// Updates in place. All tensors are flat and of one dtype.
fn adamw(
    numbers: &AdamNumbers,
    parameter: &Tensor,
    gradient: &Tensor,
    exp_avg: &Tensor,
    exp_avg_sq: &Tensor,
) -> Result<()> {
    let device = parameter.device();
    if matches!(device, Device::Cpu | Device::Cuda(_)) {
        // The kernel reads the step count on the parameter's device.
        let step = Tensor::f_full([0i64; 0], numbers.step, (Kind::Float, device))?;
        let list = |tensor: &Tensor| [tensor.shallow_clone()];
        let lists = [parameter, gradient, exp_avg, exp_avg_sq].map(list);
        call(
            "aten::_fused_adamw_",
            "",
            &[
                Value::Tensors(&lists[0]),
                Value::Tensors(&lists[1]),
                Value::Tensors(&lists[2]),
                Value::Tensors(&lists[3]),
                Value::Tensors(&[]),
                Value::Tensors(&[step]),
                Value::Float(numbers.learning_rate),
                Value::Float(numbers.betas.0),
                Value::Float(numbers.betas.1),
                Value::Float(numbers.weight_decay),
                Value::Float(numbers.eps),
                Value::Bool(false),
                Value::Bool(numbers.maximize),
                Value::None,
                Value::None,
            ],
        )?;
        return Ok(());
    }
    // Other devices (MPS) have no fused kernel.
    let gradient = if numbers.maximize {
        gradient.f_neg()?
    } else {
        gradient.shallow_clone()
    };
    let mut exp_avg = exp_avg.shallow_clone();
    let mut exp_avg_sq = exp_avg_sq.shallow_clone();
    let _ = exp_avg.f_lerp_(&gradient, 1.0 - numbers.betas.0)?;
    let squares = gradient.f_mul(&gradient)?;
    let _ = exp_avg_sq.f_lerp_(&squares, 1.0 - numbers.betas.1)?;
    let mut denominator = exp_avg_sq.f_sqrt()?;
    let _ = denominator.f_div_scalar_(numbers.correction2)?;
    let _ = denominator.f_add_scalar_(numbers.eps)?;
    let mut update = exp_avg.f_div(&denominator)?;
    let _ = update.f_mul_scalar_(-numbers.step_size)?;
    let mut parameter = parameter.shallow_clone();
    let _ = parameter.f_mul_scalar_(numbers.decay)?;
    let _ = parameter.f_add_(&update)?;
    Ok(())
}

/// Returns elements `range` of a dense tensor as a flat view.
fn flat_range(tensor: &Tensor, range: &Range<usize>) -> Result<Tensor> {
    let flat = tensor.f_view(-1i64)?;
    Ok(flat.f_narrow(0, range.start as i64, range.len() as i64)?)
}

/// Returns elements `range` of a state on the device of the parameter: a view of the state, or a copy.
fn fetch(state: &Allocated, range: &Range<usize>, device: Device) -> Result<Tensor> {
    let stored = flat_range(&state.tensor, range)?;
    if !matches!(state.storage, Storage::Host) {
        return Ok(stored);
    }
    let copy = Tensor::f_empty(range.len() as i64, (stored.kind(), device))?;
    copy_async(&copy, &stored)?;
    Ok(copy)
}

/// Copies fetched elements back to a state in host memory.
fn put_back(state: &Allocated, range: &Range<usize>, fetched: &Tensor) -> Result<()> {
    if matches!(state.storage, Storage::Host) {
        copy_async(&flat_range(&state.tensor, range)?, fetched)?;
    }
    Ok(())
}

/// Copies on the device's current stream, in order with its kernels, without blocking the host.
fn copy_async(to: &Tensor, from: &Tensor) -> Result<()> {
    let arguments = [Value::Tensor(to), Value::Tensor(from), Value::Bool(true)];
    call("aten::copy_", "", &arguments)?;
    Ok(())
}

/// A code book as tensors on a device.
struct BookTensors {
    codes: Tensor,
    /// The bounds between codes, one fewer than codes.
    bounds: Tensor,
}

impl BookTensors {
    fn new(book: &CodeBook, device: Device) -> Result<Self> {
        // The last bound is infinity, which `bucketize` does not need.
        let (codes, bounds) = (&book.codes, &book.nearest.bounds()[..CODES - 1]);
        Ok(Self {
            codes: Tensor::f_from_slice(codes)?.f_to_device(device)?,
            bounds: Tensor::f_from_slice(bounds)?.f_to_device(device)?,
        })
    }

    fn dequantize(&self, codes: &Tensor, scales: &Tensor) -> Result<Tensor> {
        let len = codes.numel() as i64;
        let mut values = in_blocks(&self.codes.f_index_select(0, &codes.f_to_kind(Kind::Int)?)?)?;
        let _ = values.f_mul_(&scales.f_unsqueeze(1)?)?;
        Ok(values.f_view(-1i64)?.f_narrow(0, 0, len)?)
    }

    fn quantize(&self, values: &Tensor) -> Result<(Tensor, Tensor)> {
        let len = values.numel() as i64;
        let blocks = in_blocks(values)?;
        let scales = blocks.f_abs()?.f_amax([1i64].as_slice(), false)?;
        // The reciprocal of a subnormal scale is infinite; such blocks are quantized to 0.
        let least = f64::from(f32::MIN_POSITIVE);
        let used = scales.f_ge(least)?;
        let inverse = scales.f_clamp_min(least)?.f_reciprocal()?;
        let inverse = inverse.f_mul(&used.f_to_kind(Kind::Float)?)?;
        let scaled = blocks.f_mul(&inverse.f_unsqueeze(1)?)?;
        let codes = scaled.f_bucketize(&self.bounds, true, false)?;
        let codes = codes.f_to_kind(Kind::Uint8)?;
        Ok((codes.f_view(-1i64)?.f_narrow(0, 0, len)?, scales))
    }
}

/// Returns flat values as rows of one block each; the last row is padded with zeros.
fn in_blocks(values: &Tensor) -> Result<Tensor> {
    let missing = values.numel().next_multiple_of(BLOCK) - values.numel();
    let filled = if missing == 0 {
        values.shallow_clone()
    } else {
        values.f_constant_pad_nd([0, missing as i64].as_slice())?
    };
    Ok(filled.f_view([-1, BLOCK as i64])?)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;
    use crate::paging::Allocated;

    fn state(len: i64) -> AdamState {
        let zeros = |kind, len| Tensor::zeros([len], (kind, Device::Cpu));
        let codes = || Allocated {
            tensor: zeros(Kind::Uint8, len),
            storage: Storage::Memory,
        };
        let scales = || zeros(Kind::Float, (len as usize).div_ceil(BLOCK) as i64);
        AdamState {
            step: Tensor::from(0f32),
            exp_avg: codes(),
            exp_avg_sq: codes(),
            scales: Some((scales(), scales())),
        }
    }

    /// Makes launches for tensors on the CPU run plain loops in C.
    fn install_stand_in() {
        let folder = tempfile::tempdir().unwrap().keep();
        let library = folder.join("libcuda.so.1");
        let sources = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../overdrive-gpu/tests/stand_in"
        );
        let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
        let status = std::process::Command::new(compiler)
            .args([
                "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o",
            ])
            .arg(&library)
            .arg(format!("{sources}/driver.c"))
            .args(["-DCOMPUTE", "-DCAPABILITY=103"])
            .arg(format!("-DLOG=\"{}\"", folder.join("log").display()))
            .arg("-lm")
            .status()
            .unwrap();
        assert!(status.success());
        overdrive_gpu::serve_cpu_with(&library).unwrap();
    }

    // The only test of this function, because the stand-in serves the whole process from its installation on.
    #[test]
    fn operators_slices_and_the_gpu_kernel_give_the_same_codes_and_parameters() {
        let len = 5000;
        let kind = (Kind::Float, Device::Cpu);
        let start = (Tensor::arange(len, kind) * 0.37).sin();
        let (by_operators, by_slices, by_kernel) = (start.copy(), start.copy(), start.copy());
        let (state1, state2, state3) = (state(len), state(len), state(len));
        let every_step = |work: &dyn Fn(&AdamNumbers, &Tensor)| {
            for step in 1..=5 {
                let phase = Tensor::arange(len, kind) * (0.011 * f64::from(step));
                let gradient = phase.sin() * phase.cos().pow_tensor_scalar(9.0);
                let numbers =
                    AdamNumbers::new(f64::from(step), 1e-2, 0.1, (0.9, 0.99), 1e-8, false);
                work(&numbers, &gradient);
            }
        };
        let whole = || 0..len as usize;
        every_step(&|numbers, gradient| {
            let scales = state1.scales.as_ref().unwrap();
            adam8(numbers, &by_operators, gradient, &state1, scales, &whole()).unwrap();
            let scales = state2.scales.as_ref().unwrap();
            let quantized = crate::kernels::Quantized {
                exp_avg: &state2.exp_avg.tensor,
                absmax1: &scales.0,
                exp_avg_sq: &state2.exp_avg_sq.tensor,
                absmax2: &scales.1,
            };
            crate::kernels::adam8::<f32>(numbers, &by_slices, gradient, &quantized, whole())
                .unwrap();
        });
        install_stand_in();
        every_step(&|numbers, gradient| {
            let scales = state3.scales.as_ref().unwrap();
            adam8(numbers, &by_kernel, gradient, &state3, scales, &whole()).unwrap();
        });
        // Rounding differs by one ulp, which moves a value next to a bound to the next code.
        let moved = |a: &Allocated, b: &Allocated| {
            let apart = (a.tensor.to_kind(Kind::Int) - b.tensor.to_kind(Kind::Int)).abs();
            assert!(apart.max().int64_value(&[]) <= 1);
            apart.sum(Kind::Int64).int64_value(&[])
        };
        for (state, parameter) in [(&state1, &by_operators), (&state3, &by_kernel)] {
            assert!(moved(&state.exp_avg, &state2.exp_avg) <= 3);
            assert!(moved(&state.exp_avg_sq, &state2.exp_avg_sq) <= 3);
            let difference = (parameter - &by_slices).abs().max().double_value(&[]);
            assert!(difference < 1e-4, "{difference}");
        }
    }
}
