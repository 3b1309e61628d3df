//! Adam's update through libtorch's operators: for devices and kinds that the slice kernels do not
//! cover, and for float32 states, where libtorch's fused kernel already runs at the speed of memory.

use std::ops::Range;

use overdrive_sys::op::{Value, call};
use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::adamw8bit::AdamState;
use crate::code_book::{BLOCK, CODES, CodeBook};
use crate::kernels::AdamNumbers;
use crate::paging::{Allocated, Storage};

/// One AdamW update of elements `range` with averages in float32 (float64 for float64 parameters).
pub(crate) fn adam32(
    numbers: &AdamNumbers,
    parameter: &Tensor,
    gradient: &Tensor,
    state: &AdamState,
    range: &Range<usize>,
) -> Result<()> {
    let mut target = part(parameter, range)?;
    let kind = state.exp_avg.tensor.kind();
    let exp_avg = fetch(&state.exp_avg, range, parameter.device())?;
    let exp_avg_sq = fetch(&state.exp_avg_sq, range, parameter.device())?;
    // The same tensors where the kinds agree.
    let wide = target.f_to_kind(kind)?;
    let gradient = part(gradient, range)?.f_to_kind(kind)?;
    adamw(numbers, &wide, &gradient, &exp_avg, &exp_avg_sq)?;
    if target.kind() != kind {
        target.f_copy_(&wide)?;
    }
    put_back(&state.exp_avg, range, &exp_avg)?;
    put_back(&state.exp_avg_sq, range, &exp_avg_sq)
}

/// One AdamW update of elements `range`, whole blocks, with averages in 8 bits.
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
        Operands::new(CodeBook::signed(), device)?,
        Operands::new(CodeBook::unsigned(), device)?,
    ];
    let codes1 = fetch(&state.exp_avg, range, device)?;
    let codes2 = fetch(&state.exp_avg_sq, range, device)?;
    let mut scales1 = part(&scales.0, &blocks)?;
    let mut scales2 = part(&scales.1, &blocks)?;
    let exp_avg = books[0].dequantize(&codes1, &scales1)?;
    let exp_avg_sq = books[1].dequantize(&codes2, &scales2)?;

    let mut target = part(parameter, range)?;
    let wide = target.f_to_kind(Kind::Float)?;
    let gradient = part(gradient, range)?.f_to_kind(Kind::Float)?;
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

/// The update in place, all tensors flat and of one kind.
fn adamw(
    numbers: &AdamNumbers,
    parameter: &Tensor,
    gradient: &Tensor,
    exp_avg: &Tensor,
    exp_avg_sq: &Tensor,
) -> Result<()> {
    let device = parameter.device();
    if matches!(device, Device::Cpu | Device::Cuda(_)) {
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

/// Elements `range` of a dense tensor, flat, sharing its memory.
fn part(tensor: &Tensor, range: &Range<usize>) -> Result<Tensor> {
    let flat = tensor.f_view(-1i64)?;
    Ok(flat.f_narrow(0, range.start as i64, range.len() as i64)?)
}

/// Elements `range` of a state where the parameter is: the state itself, or a copy on the device.
fn fetch(state: &Allocated, range: &Range<usize>, device: Device) -> Result<Tensor> {
    let here = part(&state.tensor, range)?;
    if state.storage != Storage::Host {
        return Ok(here);
    }
    let there = Tensor::f_empty(range.len() as i64, (here.kind(), device))?;
    copy_without_waiting(&there, &here)?;
    Ok(there)
}

fn put_back(state: &Allocated, range: &Range<usize>, fetched: &Tensor) -> Result<()> {
    if state.storage == Storage::Host {
        copy_without_waiting(&part(&state.tensor, range)?, fetched)?;
    }
    Ok(())
}

/// On the device's stream, in order with what is computed there.
fn copy_without_waiting(to: &Tensor, from: &Tensor) -> Result<()> {
    let arguments = [Value::Tensor(to), Value::Tensor(from), Value::Bool(true)];
    call("aten::copy_", "", &arguments)?;
    Ok(())
}

/// A code book on a device.
struct Operands {
    codes: Tensor,
    /// The bounds between codes, one fewer than there are codes.
    bounds: Tensor,
}

impl Operands {
    fn new(book: &CodeBook, device: Device) -> Result<Self> {
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

/// Flat values as rows of a block each, zeros filling up the last.
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

    #[test]
    fn operators_and_slices_give_the_same_codes_and_parameters() {
        let len = 5000;
        let kind = (Kind::Float, Device::Cpu);
        let start = (Tensor::arange(len, kind) * 0.37).sin();
        let (by_operators, by_slices) = (start.copy(), start.copy());
        let (state1, state2) = (state(len), state(len));
        for step in 1..=5 {
            let phase = Tensor::arange(len, kind) * (0.011 * f64::from(step));
            let gradient = phase.sin() * phase.cos().pow_tensor_scalar(9.0);
            let numbers = AdamNumbers::new(f64::from(step), 1e-2, 0.1, (0.9, 0.99), 1e-8, false);
            let whole = 0..len as usize;
            let scales = state1.scales.as_ref().unwrap();
            adam8(&numbers, &by_operators, &gradient, &state1, scales, &whole).unwrap();
            let scales = state2.scales.as_ref().unwrap();
            let quantized = crate::kernels::Quantized {
                exp_avg: &state2.exp_avg.tensor,
                absmax1: &scales.0,
                exp_avg_sq: &state2.exp_avg_sq.tensor,
                absmax2: &scales.1,
            };
            crate::kernels::adam8::<f32>(&numbers, &by_slices, &gradient, &quantized, whole)
                .unwrap();
        }
        // Rounding differs by an ulp, which moves a number beside a bound to the next code.
        let moved = |a: &Allocated, b: &Allocated| {
            let apart = (a.tensor.to_kind(Kind::Int) - b.tensor.to_kind(Kind::Int)).abs();
            assert!(apart.max().int64_value(&[]) <= 1);
            apart.sum(Kind::Int64).int64_value(&[])
        };
        assert!(moved(&state1.exp_avg, &state2.exp_avg) <= 3);
        assert!(moved(&state1.exp_avg_sq, &state2.exp_avg_sq) <= 3);
        let difference = (by_operators - by_slices).abs().max().double_value(&[]);
        assert!(difference < 1e-4, "{difference}");
    }
}
