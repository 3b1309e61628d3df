//! Adam's update through libtorch's operators: for devices and dtypes that the kernels of this crate do
//! not support, and for float32 states, where libtorch's fused kernel is already limited by memory
//! bandwidth.
//!
//! On a GPU an operator costs microseconds however few elements it has. Each operator here therefore works on the
//! pieces of many parameters at once: `cat` and `_foreach_copy_` gather and scatter them.

use overdrive_gpu::{Adam8, AdamFactors, CodedAverage};
use overdrive_sys::op::{Value, call};
use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::code_book::{BLOCK, CODES};
use crate::device_books::DeviceBooks;
use crate::kernels::AdamNumbers;

/// A part of a parameter and what its update needs, all flat and on one device.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) parameter: Tensor,
    pub(crate) gradient: Tensor,
    /// The average and the average of squares: floats, or codes if there are scales.
    pub(crate) averages: [Tensor; 2],
    /// The scales of the blocks of both averages. A piece begins where a block does.
    pub(crate) scales: Option<[Tensor; 2]>,
}

impl Piece {
    fn len(&self) -> i64 {
        self.parameter.numel() as i64
    }
}

/// Updates the pieces by AdamW with averages in float32 (float64 for float64 parameters). All have the same dtypes.
pub(crate) fn adam32(numbers: &AdamNumbers, pieces: &[Piece]) -> Result<()> {
    let Some(first) = pieces.first() else {
        return Ok(());
    };
    let kind = first.averages[0].kind();
    let wide = Wide::new(pieces, kind)?;
    let averages = [0, 1].map(|average| {
        let of_piece = |piece: &Piece| piece.averages[average].shallow_clone();
        pieces.iter().map(of_piece).collect::<Vec<_>>()
    });
    adamw(numbers, &wide, &averages)?;
    wide.narrow_to(pieces)
}

/// Updates the pieces by AdamW with averages in 8 bits. All parameters have the same dtype.
pub(crate) fn adam8(numbers: &AdamNumbers, pieces: &[Piece]) -> Result<()> {
    let Some(first) = pieces.first() else {
        return Ok(());
    };
    let device = first.parameter.device();
    let books = DeviceBooks::of(device)?;
    if adam8_by_kernel(numbers, pieces, &books)? {
        return Ok(());
    }
    let gathered = Gathered::new(pieces, &books)?;
    // The codes of the squares index the second half of the values.
    let index = gathered.codes.f_add(&books.first_codes)?.f_view([-1])?;
    let values = books.values.f_index_select(0, &index)?;
    drop(index);
    let mut blocks = values.f_view([-1, BLOCK as i64])?;
    let _ = blocks.f_mul_(&gathered.scales.f_unsqueeze(1)?)?;

    let values = values.f_view([2, -1])?;
    let averages = [gathered.parts(&values, 0)?, gathered.parts(&values, 1)?];
    let wide = Wide::new(pieces, Kind::Float)?;
    adamw(numbers, &wide, &averages)?;
    wide.narrow_to(pieces)?;

    let scales = largest(&blocks)?;
    // The reciprocal of a subnormal scale is infinite; such blocks are quantized to 0.
    let least = f64::from(f32::MIN_POSITIVE);
    let inverse = scales.f_clamp_min(least)?.f_reciprocal()?;
    let inverse = inverse.f_mul(&scales.f_ge(least)?)?;
    let _ = blocks.f_mul_(&inverse.f_unsqueeze(1)?)?;
    let codes = values.f_empty_like()?.f_view_dtype(Kind::Int)?;
    for (average, bounds) in (0..).zip(&books.bounds) {
        let target = codes.f_get(average)?;
        let _ = values
            .f_get(average)?
            .f_bucketize_tensor_out(&target, bounds, true, false)?;
    }
    gathered.scatter(pieces, &codes, &scales)
}

/// Updates the pieces with the GPU kernel, a launch for each; returns `false` if it does not take all of them.
fn adam8_by_kernel(numbers: &AdamNumbers, pieces: &[Piece], books: &DeviceBooks) -> Result<bool> {
    let mut launches = Vec::with_capacity(pieces.len());
    for piece in pieces {
        let Some(kernel) = gpu_kernel(piece)? else {
            return Ok(false);
        };
        launches.push((kernel, piece));
    }
    let codes = CODES as i64;
    let halves = [0, codes].map(|first| books.values.f_narrow(0, first, codes));
    let [signed, unsigned] = halves;
    let values_of = [signed?, unsigned?];
    for (kernel, piece) in launches {
        let Some(scales) = &piece.scales else {
            continue;
        };
        let [average, squares] = [0, 1].map(|index| CodedAverage {
            codes: &piece.averages[index],
            scales: &scales[index],
            book: &values_of[index],
            bounds: &books.bounds[index],
        });
        let (parameter, gradient) = (&piece.parameter, &piece.gradient);
        kernel.step(parameter, gradient, average, squares, &factors(numbers))?;
    }
    Ok(true)
}

/// Returns the GPU kernel, if it takes the tensors of a piece with averages in 8 bits.
fn gpu_kernel(piece: &Piece) -> Result<Option<Adam8>> {
    let (parameter, gradient) = (&piece.parameter, &piece.gradient);
    let (Some(kernels), Some(scales)) =
        (overdrive_gpu::kernels(parameter.device())?, &piece.scales)
    else {
        return Ok(None);
    };
    let tensors = [
        parameter,
        gradient,
        &piece.averages[0],
        &piece.averages[1],
        &scales[0],
        &scales[1],
    ];
    if gradient.kind() != parameter.kind() || !Adam8::takes(&tensors) {
        return Ok(None);
    }
    Ok(kernels.adam8(parameter.kind(), piece.len())?)
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

/// Returns the largest magnitude of each row.
fn largest(rows: &Tensor) -> Result<Tensor> {
    // One pass, where `abs` and `amax` are two.
    let arguments = [
        Value::Tensor(rows),
        Value::Float(f64::INFINITY),
        Value::Ints(&[1]),
        Value::Bool(false),
        Value::None,
    ];
    let mut norms = call("aten::linalg_vector_norm", "", &arguments)?;
    Ok(norms.remove(0).into_tensor()?)
}

/// The codes and scales of pieces, one after another.
struct Gathered {
    /// u8 `(2, blocks · BLOCK)`: those of the averages, and those of the squares. The last block of a piece is filled
    /// up with codes of 0.
    codes: Tensor,
    /// f32 `(2 · blocks,)`.
    scales: Tensor,
    /// The first element and the number of elements of each piece.
    ranges: Vec<(i64, i64)>,
}

impl Gathered {
    fn new(pieces: &[Piece], books: &DeviceBooks) -> Result<Self> {
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        for (average, zeros) in books.zeros.iter().enumerate() {
            for piece in pieces {
                codes.push(piece.averages[average].shallow_clone());
                let missing = padded(piece.len()) - piece.len();
                if missing > 0 {
                    codes.push(zeros.f_narrow(0, 0, missing)?);
                }
                scales.extend(piece.scales.as_ref().map(|s| s[average].shallow_clone()));
            }
        }
        let mut ranges = Vec::with_capacity(pieces.len());
        let mut first = 0;
        for piece in pieces {
            ranges.push((first, piece.len()));
            first += padded(piece.len());
        }
        Ok(Self {
            codes: Tensor::f_cat(&codes, 0)?.f_view([2, first])?,
            scales: Tensor::f_cat(&scales, 0)?,
            ranges,
        })
    }

    /// Returns the views of the pieces in row `average` of `values (2, blocks · BLOCK)`.
    fn parts(&self, values: &Tensor, average: i64) -> Result<Vec<Tensor>> {
        let row = values.f_get(average)?;
        let ranges = self.ranges.iter();
        let parts = ranges.map(|&(first, len)| row.f_narrow(0, first, len));
        Ok(parts.collect::<std::result::Result<_, _>>()?)
    }

    /// Copies new codes and scales to the states of the pieces.
    fn scatter(&self, pieces: &[Piece], codes: &Tensor, scales: &Tensor) -> Result<()> {
        let mut targets = [Vec::new(), Vec::new()];
        let mut sources = [Vec::new(), Vec::new()];
        let scales = scales.f_view([2, -1])?;
        let block = BLOCK as i64;
        for average in [0, 1] {
            sources[0].extend(self.parts(codes, average)?);
            let row = scales.f_get(average)?;
            for (piece, &(first, len)) in pieces.iter().zip(&self.ranges) {
                let index = usize::from(average == 1);
                targets[0].push(piece.averages[index].shallow_clone());
                let Some(of_piece) = &piece.scales else {
                    continue;
                };
                targets[1].push(of_piece[index].shallow_clone());
                sources[1].push(row.f_narrow(0, first / block, padded(len) / block)?);
            }
        }
        copy_each(&targets[0], &sources[0])?;
        copy_each(&targets[1], &sources[1])
    }
}

fn padded(len: i64) -> i64 {
    len.unsigned_abs().next_multiple_of(BLOCK as u64) as i64
}

/// The parameters and gradients of pieces in the dtype of the update: copies, or themselves if they have it.
struct Wide {
    parameters: Vec<Tensor>,
    gradients: Vec<Tensor>,
    /// If `true`, these are copies.
    copied: bool,
}

impl Wide {
    fn new(pieces: &[Piece], kind: Kind) -> Result<Self> {
        let parameters = pieces.iter().map(|piece| piece.parameter.shallow_clone());
        let parameters: Vec<Tensor> = parameters.collect();
        let gradients = pieces.iter().map(|piece| piece.gradient.shallow_clone());
        let gradients: Vec<Tensor> = gradients.collect();
        let all_are = |list: &[Tensor]| list.iter().all(|tensor| tensor.kind() == kind);
        let copied = !all_are(&parameters) || !all_are(&gradients);
        if !copied {
            return Ok(Self {
                parameters,
                gradients,
                copied,
            });
        }
        let total: i64 = pieces.iter().map(Piece::len).sum();
        let device = parameters[0].device();
        let buffer = Tensor::f_empty([2, total], (kind, device))?;
        let parts = |row: i64| -> Result<Vec<Tensor>> {
            let (row, mut first) = (buffer.f_get(row)?, 0);
            let mut parts = Vec::with_capacity(pieces.len());
            for piece in pieces {
                parts.push(row.f_narrow(0, first, piece.len())?);
                first += piece.len();
            }
            Ok(parts)
        };
        let wide = Self {
            parameters: parts(0)?,
            gradients: parts(1)?,
            copied,
        };
        copy_each(&wide.parameters, &parameters)?;
        copy_each(&wide.gradients, &gradients)?;
        Ok(wide)
    }

    /// Rounds the updated parameters to those of the pieces.
    fn narrow_to(&self, pieces: &[Piece]) -> Result<()> {
        if !self.copied {
            return Ok(());
        }
        let parameters = pieces.iter().map(|piece| piece.parameter.shallow_clone());
        copy_each(&parameters.collect::<Vec<_>>(), &self.parameters)
    }
}

/// Copies each tensor to its target, which may have another dtype.
fn copy_each(targets: &[Tensor], sources: &[Tensor]) -> Result<()> {
    let arguments = [Value::Tensors(targets), Value::Tensors(sources)];
    call("aten::_foreach_copy_", "", &arguments)?;
    Ok(())
}

/// Updates in place. All tensors are flat and of one dtype.
fn adamw(numbers: &AdamNumbers, wide: &Wide, averages: &[Vec<Tensor>; 2]) -> Result<()> {
    let Some(first) = wide.parameters.first() else {
        return Ok(());
    };
    let device = first.device();
    if !matches!(device, Device::Cpu | Device::Cuda(_)) {
        // Other devices (MPS) have no fused kernel.
        let of_pieces = wide.parameters.iter().zip(&wide.gradients);
        for ((parameter, gradient), (exp_avg, exp_avg_sq)) in
            of_pieces.zip(averages[0].iter().zip(&averages[1]))
        {
            adamw_of_one(numbers, parameter, gradient, exp_avg, exp_avg_sq)?;
        }
        return Ok(());
    }
    // The kernel reads the step count on the parameter's device, and writes none.
    let step = Tensor::f_full([0i64; 0], numbers.step, (Kind::Float, device))?;
    let steps: Vec<Tensor> = averages[0].iter().map(|_| step.shallow_clone()).collect();
    call(
        "aten::_fused_adamw_",
        "",
        &[
            Value::Tensors(&wide.parameters),
            Value::Tensors(&wide.gradients),
            Value::Tensors(&averages[0]),
            Value::Tensors(&averages[1]),
            Value::Tensors(&[]),
            Value::Tensors(&steps),
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
    Ok(())
}

fn adamw_of_one(
    numbers: &AdamNumbers,
    parameter: &Tensor,
    gradient: &Tensor,
    exp_avg: &Tensor,
    exp_avg_sq: &Tensor,
) -> Result<()> {
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;
    use crate::kernels::{Quantized, adam8 as adam8_on_slices};

    /// Returns a piece of `len` elements with states of zeros.
    fn piece(len: i64, kind: Kind) -> Piece {
        let zeros = |kind, len| Tensor::zeros([len], (kind, Device::Cpu));
        let scales = || zeros(Kind::Float, padded(len) / BLOCK as i64);
        let start = (Tensor::arange(len, (Kind::Float, Device::Cpu)) * 0.37 + len).sin();
        Piece {
            gradient: start.zeros_like().to_kind(kind),
            parameter: start.to_kind(kind),
            averages: [zeros(Kind::Uint8, len), zeros(Kind::Uint8, len)],
            scales: Some([scales(), scales()]),
        }
    }

    fn numbers(step: i32) -> AdamNumbers {
        AdamNumbers::new(f64::from(step), 1e-2, 0.1, (0.9, 0.99), 1e-8, false)
    }

    fn set_gradient(piece: &Piece, step: i32) {
        let phase = Tensor::arange(piece.len(), (Kind::Float, Device::Cpu));
        let phase = phase * (0.011 * f64::from(step));
        let gradient = phase.sin() * phase.cos().pow_tensor_scalar(9.0);
        piece.gradient.shallow_clone().copy_(&gradient);
    }

    // The other test of these functions holds with the stand-in too, which serves the whole process from its
    // installation on.
    #[test]
    fn operators_slices_and_the_gpu_kernel_give_the_same_codes_and_parameters() {
        // The second and the third piece end within a block.
        let [by_operators, by_kernel, by_slices] =
            [(); 3].map(|()| [5120, 5000, 300].map(|len| piece(len, Kind::Float)));
        let every_step = |pieces: &[Piece]| {
            for step in 1..=5 {
                pieces.iter().for_each(|piece| set_gradient(piece, step));
                adam8(&numbers(step), pieces).unwrap();
            }
        };
        every_step(&by_operators);
        let _log = crate::stand_in::install();
        every_step(&by_kernel);
        for step in 1..=5 {
            for piece in &by_slices {
                set_gradient(piece, step);
                let [scales1, scales2] = piece.scales.as_ref().unwrap();
                let quantized = Quantized {
                    exp_avg: &piece.averages[0],
                    absmax1: scales1,
                    exp_avg_sq: &piece.averages[1],
                    absmax2: scales2,
                };
                let (parameter, gradient) = (&piece.parameter, &piece.gradient);
                let whole = 0..parameter.numel();
                adam8_on_slices::<f32>(&numbers(step), parameter, gradient, &quantized, whole)
                    .unwrap();
            }
        }
        let by_others = by_operators.iter().chain(&by_kernel);
        for (a, b) in by_others.zip(by_slices.iter().cycle()) {
            for average in [0, 1] {
                // Rounding differs by one ulp, which moves a value next to a bound to the next code.
                let [a, b] = [a, b].map(|piece| piece.averages[average].to_kind(Kind::Int));
                let apart = (a - b).abs();
                assert!(apart.max().int64_value(&[]) <= 1);
                assert!(apart.sum(Kind::Int64).int64_value(&[]) <= 3);
            }
            let difference = (&a.parameter - &b.parameter).abs().max().double_value(&[]);
            assert!(difference < 1e-4, "{difference}");
        }
    }

    #[test]
    fn a_stored_state_that_ends_within_a_block_keeps_its_scale() {
        // What fills up a block must not take part in it, whatever scale was loaded.
        let piece = piece(300, Kind::Float);
        let _ = piece.averages[0].shallow_clone().fill_(127);
        let [scales, _] = piece.scales.as_ref().unwrap();
        let _ = scales.shallow_clone().fill_(5.0);
        adam8(&numbers(2), std::slice::from_ref(&piece)).unwrap();
        assert_eq!(scales.abs().max().double_value(&[]), 0.0);
    }
}
