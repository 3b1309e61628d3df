//! All experts in two of libtorch's grouped matmuls, for GPUs: the host reads no token counts.
//!
//! The operator is tested on a CPU, where libtorch computes it group by group. It has not been run on a GPU.

use overdrive_autograd::{BackwardContext, ForwardContext, Function, FunctionResult, apply};
use overdrive_fused::glu;
use overdrive_sys::engine;
use tch::{Kind, Tensor};

use crate::Result;
use crate::feed_forward::GatedMlp;

/// The row length must be a multiple of this many elements, because the kernel loads 16 bytes at a time.
const ALIGNMENT: i64 = 8;

/// Returns `true` if a GPU has the kernel for rows like `x`: those of libtorch 2.11 are for bf16.
pub(super) fn has_kernel(x: &Tensor) -> bool {
    x.kind() == Kind::BFloat16 && x.size().last().is_some_and(|width| width % ALIGNMENT == 0)
}

/// Computes the experts for `x (S, C)`, whose rows are sorted by expert; `ends (E,)` has the number after the last
/// row of each, i32. The result is `None` if a weight is quantized, has an active adapter or another dtype, or if the
/// weights do not lie one behind the other.
pub(super) fn feed_forward(
    experts: &[GatedMlp],
    x: &Tensor,
    ends: &Tensor,
) -> Result<Option<Tensor>> {
    // An observer needs the rows of each layer.
    if overdrive_quantization::is_observed() {
        return Ok(None);
    }
    let Some(activation) = experts.first().and_then(GatedMlp::activation) else {
        return Ok(None);
    };
    let (mut inner, mut outer) = (Vec::new(), Vec::new());
    for expert in experts {
        let weights: Option<Vec<&Tensor>> = expert.layers().map(|l| l.dense_weight()).collect();
        let Some((&down, joint)) = weights.as_deref().and_then(<[_]>::split_last) else {
            return Ok(None);
        };
        inner.extend(joint);
        outer.push(down);
    }
    let count = experts.len() as i64;
    let stacks = (
        stack(&inner, count, x.kind())?,
        stack(&outer, count, x.kind())?,
    );
    let (Some(inner_stack), Some(outer_stack)) = stacks else {
        return Ok(None);
    };
    let joint = linear(x, ends, &inner, inner_stack)?;
    let gated = glu(&joint, activation)?;
    Ok(Some(linear(&gated, ends, &outer, outer_stack)?))
}

/// Returns weights that are contiguous in memory as one tensor `(count, O, I)`, without a copy.
fn stack(weights: &[&Tensor], count: i64, kind: Kind) -> Result<Option<Tensor>> {
    let Some(&first) = weights.first() else {
        return Ok(None);
    };
    let width = first.size()[1];
    let (mut next, mut rows) = (first.data_ptr() as usize, 0);
    for weight in weights {
        let fits = weight.kind() == kind
            && weight.device() == first.device()
            && weight.is_contiguous()
            && weight.size()[1] == width
            && weight.data_ptr() as usize == next;
        if !fits {
            return Ok(None);
        }
        next += weight.numel() * kind.elt_size_in_bytes();
        rows += weight.size()[0];
    }
    if width % ALIGNMENT != 0 || rows / count % ALIGNMENT != 0 {
        return Ok(None);
    }
    let _no_grad = engine::GradMode::new(false);
    let (size, strides) = (
        [count, rows / count, width],
        [rows / count * width, width, 1],
    );
    // libtorch refuses a view beyond the storage: neighbours of separate allocations are not one tensor.
    let whole = first.f_detach()?.f_as_strided(size, strides, None);
    Ok(whole.ok())
}

/// Computes `x · Wₑᵀ` for the rows of each expert, with the gradients of `weights`, of which `stack` is a view.
fn linear(x: &Tensor, ends: &Tensor, weights: &[&Tensor], stack: Tensor) -> Result<Tensor> {
    let function = GroupedLinear {
        rows: weights.iter().map(|weight| weight.size()[0]).collect(),
    };
    let inputs = [x, ends, &stack].into_iter().chain(weights.iter().copied());
    let inputs: Vec<&Tensor> = inputs.collect();
    let mut outputs = apply(function, &inputs).map_err(overdrive_fused::Error::from)?;
    Ok(outputs.remove(0))
}

struct GroupedLinear {
    /// The number of rows of each weight.
    rows: Vec<i64>,
}

/// The inputs before the weights.
const OTHER_INPUTS: usize = 3;

impl Function for GroupedLinear {
    const NAME: &'static str = "GroupedLinear";

    fn forward(
        &mut self,
        context: &mut ForwardContext<'_>,
        inputs: &[&Tensor],
    ) -> FunctionResult<Vec<Tensor>> {
        let (x, ends, stack) = (inputs[0], inputs[1], inputs[2]);
        context.save_for_backward(&[x, ends, stack]);
        let transposed = stack.f_transpose(1, 2)?;
        let y = x.f_internal_grouped_mm(&transposed, Some(ends), None, None)?;
        Ok(vec![y])
    }

    fn backward(
        &self,
        context: &BackwardContext,
        gradients: &[Option<Tensor>],
    ) -> FunctionResult<Vec<Option<Tensor>>> {
        let mut results: Vec<Option<Tensor>> = vec![None, None, None];
        results.extend(self.rows.iter().map(|_| None));
        let (Some(Some(gradient)), [x, ends, stack]) = (gradients.first(), context.saved()) else {
            return Ok(results);
        };
        let gradient = gradient.f_contiguous()?;
        if context.needs_input_grad(0) {
            results[0] = Some(gradient.f_internal_grouped_mm(stack, Some(ends), None, None)?);
        }
        if (0..self.rows.len()).any(|index| context.needs_input_grad(OTHER_INPUTS + index)) {
            let transposed = gradient.f_tr()?;
            let all = transposed.f_internal_grouped_mm(x, Some(ends), None, None)?;
            let all = all.f_reshape([-1, x.size()[1]])?;
            let each = all.f_split_with_sizes(self.rows.as_slice(), 0)?;
            for (index, gradient) in each.into_iter().enumerate() {
                if context.needs_input_grad(OTHER_INPUTS + index) {
                    results[OTHER_INPUTS + index] = Some(gradient);
                }
            }
        }
        Ok(results)
    }
}
