//! Linear layers whose products are of 8-bit floats, as in torchao's float8 training with tensorwise scaling.

use overdrive_autograd::{BackwardContext, ForwardContext, Function, FunctionResult, apply};
use overdrive_gpu::Fp8Format;
use tch::{Kind, Tensor};

use crate::Result;
use crate::gpu;
use crate::linear::{hand_out, joined, rows_of};

/// The sizes of a product must be multiples of it.
const MULTIPLE: i64 = 16;

/// Returns `true` if a layer with these weights can multiply in FP8.
pub(crate) fn takes(weights: &[&Tensor]) -> bool {
    let inputs = weights[0].size()[1];
    let outputs: i64 = weights.iter().map(|weight| weight.size()[0]).sum();
    inputs % MULTIPLE == 0 && outputs % MULTIPLE == 0
}

/// Computes `x · [w₁; w₂; …]ᵀ + [b₁; b₂; …]` in bf16, of shapes that [`takes`] accepts.
pub(crate) fn linear(x: &Tensor, weights: &[&Tensor], biases: &[&Tensor]) -> Result<Tensor> {
    let function = Fp8Linear {
        outputs: weights.iter().map(|weight| weight.size()[0]).collect(),
        weight_kind: weights[0].kind(),
        biased: !biases.is_empty(),
    };
    let inputs: Vec<&Tensor> = std::iter::once(x)
        .chain(weights.iter().copied())
        .chain(biases.iter().copied())
        .collect();
    Ok(apply(function, &inputs)?.remove(0))
}

/// A matrix `(M, K)` in FP8: its elements multiplied by a scale, so that the largest of them is the largest number of the
/// format.
struct Matrix {
    /// The codes `(M, K)`.
    codes: Tensor,
    /// The codes of the transpose `(K, M')`, where M' is M rounded up to a multiple of 16, with zeros behind M.
    columns: Option<Tensor>,
    /// The factor from codes to elements, f32 `(1,)`.
    inverse: Tensor,
}

impl Matrix {
    fn new(x: &Tensor, format: Fp8Format, with_columns: bool) -> Result<Self> {
        let (kind, largest) = match format {
            Fp8Format::E4m3 => (Kind::Float8e4m3fn, 448.0),
            Fp8Format::E5m2 => (Kind::Float8e5m2, 57344.0),
        };
        if let Some(matrix) = gpu::to_fp8(x, format, with_columns)? {
            let columns = matrix.columns.map(|columns| columns.f_view_dtype(kind));
            return Ok(Self {
                codes: matrix.codes.f_view_dtype(kind)?,
                columns: columns.transpose()?,
                inverse: matrix.inverse,
            });
        }
        let amax = x
            .f_abs()?
            .f_amax([0i64, 1].as_slice(), false)?
            .f_to_kind(Kind::Float)?;
        let scale = amax
            .f_full_like(largest)?
            .f_div(&amax.f_clamp_min(1e-12)?)?;
        let scaled = x
            .f_to_kind(Kind::Float)?
            .f_mul(&scale)?
            .f_clamp(-largest, largest)?;
        let codes = scaled.f_to_kind(kind)?;
        let columns = with_columns.then(|| transposed(&codes)).transpose()?;
        Ok(Self {
            codes,
            columns,
            inverse: scale.f_reciprocal()?.f_view([1])?,
        })
    }
}

/// Returns the transpose of a matrix with its rows filled up with zeros to a multiple of 16.
fn transposed(codes: &Tensor) -> Result<Tensor> {
    // As bytes, because few operators know 8-bit floats.
    let bytes = codes.f_view_dtype(Kind::Uint8)?;
    let missing = (-codes.size()[0]).rem_euclid(MULTIPLE);
    let padded = bytes.f_constant_pad_nd([0, 0, 0, missing])?;
    Ok(padded.f_tr()?.f_contiguous()?.f_view_dtype(codes.kind())?)
}

/// Returns `a · b` of codes with their factors, where `b` is the transpose of a contiguous matrix.
fn product(
    (a, a_inverse): (&Tensor, &Tensor),
    (b, b_inverse): (&Tensor, &Tensor),
    bias: Option<&Tensor>,
    kind: Kind,
    fast_accumulation: bool,
) -> Result<Tensor> {
    let no_scale = None::<&Tensor>;
    Ok(a.f_internal_scaled_mm(
        b,
        a_inverse,
        b_inverse,
        bias,
        no_scale,
        kind,
        fast_accumulation,
    )?)
}

/// The inputs: x, the weights, the biases if `biased`.
struct Fp8Linear {
    outputs: Vec<i64>,
    weight_kind: Kind,
    biased: bool,
}

impl Function for Fp8Linear {
    const NAME: &'static str = "fp8_linear";

    fn forward(
        &mut self,
        context: &mut ForwardContext<'_>,
        inputs: &[&Tensor],
    ) -> FunctionResult<Vec<Tensor>> {
        let x = inputs[0];
        let (weights, biases) = inputs[1..].split_at(self.outputs.len());
        let needs_weights = (1..=weights.len()).any(|input| context.needs_input_grad(input));
        let rows = rows_of(&x.f_contiguous()?)?;
        let x_codes = Matrix::new(&rows, Fp8Format::E4m3, needs_weights)?;
        let weight = joined(weights)?.f_contiguous()?;
        let w_codes = Matrix::new(&weight, Fp8Format::E4m3, context.needs_input_grad(0))?;
        let bias = self.biased.then(|| joined(biases)).transpose()?;
        let bias = bias
            .map(|bias| bias.f_to_kind(Kind::BFloat16))
            .transpose()?;
        // Sums of low precision are enough forward, as in torchao.
        let y = product(
            (&x_codes.codes, &x_codes.inverse),
            (&w_codes.codes.f_tr()?, &w_codes.inverse),
            bias.as_ref(),
            Kind::BFloat16,
            true,
        )?;
        let mut size = x.size();
        if let Some(last) = size.last_mut() {
            *last = self.outputs.iter().sum();
        }
        // Empty where no gradient needs them.
        let empty = || Tensor::f_empty([0], (Kind::Float, x.device()));
        let saved = [
            x_codes.columns.map_or_else(empty, Ok)?,
            x_codes.inverse,
            w_codes.columns.map_or_else(empty, Ok)?,
            w_codes.inverse,
        ];
        context.save_for_backward(&saved.each_ref());
        Ok(vec![y.f_view(size.as_slice())?])
    }

    fn backward(
        &self,
        context: &BackwardContext,
        gradients: &[Option<Tensor>],
    ) -> FunctionResult<Vec<Option<Tensor>>> {
        let count = self.outputs.len();
        let inputs = 1 + count + if self.biased { count } else { 0 };
        let mut results: Vec<Option<Tensor>> = Vec::new();
        results.resize_with(inputs, || None);
        let (Some(dy), [x, x_inverse, weight, w_inverse]) = (&gradients[0], context.saved()) else {
            return Ok(results);
        };
        let width: i64 = self.outputs.iter().sum();
        let rows = dy.f_contiguous()?.f_view([-1, width])?;
        let needs_weights = (1..=count).any(|input| context.needs_input_grad(input));
        let needs_x = context.needs_input_grad(0);
        if needs_x || needs_weights {
            let codes = Matrix::new(&rows, Fp8Format::E5m2, needs_weights)?;
            if needs_x {
                let a = (&codes.codes, &codes.inverse);
                let b = (&weight.f_tr()?, w_inverse);
                let dx = product(a, b, None, Kind::BFloat16, false)?;
                let mut size = dy.size();
                if let Some(last) = size.last_mut() {
                    *last = weight.size()[0];
                }
                results[0] = Some(dx.f_view(size.as_slice())?);
            }
            if let Some(columns) = &codes.columns {
                let a = (columns, &codes.inverse);
                let b = (&x.f_tr()?, x_inverse);
                // Gradients of f32 weights come out of the product in f32.
                let kind = match self.weight_kind {
                    Kind::Float => Kind::Float,
                    _ => Kind::BFloat16,
                };
                let dw = product(a, b, None, kind, false)?;
                hand_out(&self.outputs, dw, &mut results[1..=count])?;
            }
        }
        if (count + 1..inputs).any(|input| context.needs_input_grad(input)) {
            let db = rows.f_sum_dim_intlist([0i64].as_slice(), false, rows.kind())?;
            hand_out(&self.outputs, db, &mut results[count + 1..])?;
        }
        Ok(results)
    }
}
