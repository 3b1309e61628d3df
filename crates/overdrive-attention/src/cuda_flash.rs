//! libtorch's flash attention on CUDA: padded or packed, with a window and sink logits.
//!
//! `_flash_attention_forward` is not differentiable by itself. Its backward operator takes the output and the
//! log-sum-exp, and is also correct with sink logits if these include the sinks.
#![allow(
    unsafe_code,
    reason = "libtorch's kernels check neither cumulative lengths nor all shapes"
)]

use overdrive_autograd::{BackwardContext, ForwardContext, Function, FunctionResult, apply};
use overdrive_sys::op::{Output, Value, call_unchecked};
use tch::Tensor;

use crate::{Error, Result};

/// The inputs that are not differentiable tensors.
#[derive(Debug)]
pub(crate) struct CudaFlash {
    /// The cumulative lengths of queries and keys (int32), if they are packed.
    pub(crate) cumulative: Option<(Tensor, Tensor)>,
    /// The largest numbers of queries and keys of a sequence.
    pub(crate) longest: (i64, i64),
    pub(crate) dropout_p: f64,
    pub(crate) scale: f64,
    pub(crate) left: Option<usize>,
    pub(crate) right: Option<usize>,
    pub(crate) has_sinks: bool,
}

/// Returns the output and log-sum-exp for query, key and value (B, T, H, D), or (total, H, D) if packed; the
/// log-sum-exp is (B, H, T), or (H, total), and has no gradient.
pub(crate) fn cuda_flash(
    mut flash: CudaFlash,
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    sinks: Option<&Tensor>,
) -> Result<(Tensor, Tensor)> {
    flash.has_sinks = sinks.is_some();
    let mut inputs = vec![query, key, value];
    inputs.extend(sinks);
    let mut outputs = apply(flash, &inputs)?.into_iter();
    match (outputs.next(), outputs.next()) {
        (Some(output), Some(lse)) => Ok((output, lse)),
        _ => unreachable!("forward returns two tensors"),
    }
}

impl CudaFlash {
    /// Returns flash-attn's `window_size`, where -1 is no limit.
    fn window(&self) -> (Value<'static>, Value<'static>) {
        let limit = |limit: Option<usize>| {
            Value::Int(limit.map_or(-1, |limit| i64::try_from(limit).unwrap_or(-1)))
        };
        (limit(self.left), limit(self.right))
    }

    fn is_causal(&self) -> bool {
        self.right == Some(0)
    }

    /// Returns the sinks in the shape of a log-sum-exp, (1, H, 1) or (H, 1).
    fn like_lse(&self, sinks: &Tensor, lse: &Tensor) -> Result<Tensor> {
        let sinks = sinks.f_to_kind(lse.kind())?;
        Ok(match self.cumulative {
            Some(_) => sinks.f_view([-1, 1])?,
            None => sinks.f_view([1, -1, 1])?,
        })
    }

    /// Returns the gradients of query, key and value from the inputs and results that forward saved.
    fn backward_operator(
        &self,
        gradient: &Tensor,
        inputs: &[Tensor],
        results: &[Tensor],
    ) -> Result<Vec<Output>> {
        // Not optional in the schema: the dense form gets undefined tensors.
        let undefined = Tensor::new();
        let (cumulative_q, cumulative_k) = match &self.cumulative {
            Some((q, k)) => (q, k),
            None => (&undefined, &undefined),
        };
        let (left, right) = self.window();
        let arguments = [
            Value::Tensor(gradient),
            Value::Tensor(&inputs[0]),
            Value::Tensor(&inputs[1]),
            Value::Tensor(&inputs[2]),
            Value::Tensor(&results[0]),
            Value::Tensor(&results[1]),
            Value::Tensor(cumulative_q),
            Value::Tensor(cumulative_k),
            Value::Int(self.longest.0),
            Value::Int(self.longest.1),
            Value::Float(self.dropout_p),
            Value::Bool(self.is_causal()),
            Value::Tensor(&results[2]),
            Value::Tensor(&results[3]),
            Value::Float(self.scale),
            left,
            right,
        ];
        // SAFETY: the inputs are those of the forward call below, the results its own, which autograd has found
        // unchanged, and the gradient has the shape of the output.
        Ok(unsafe { call_unchecked("aten::_flash_attention_backward", "", &arguments)? })
    }
}

impl Function for CudaFlash {
    const NAME: &'static str = "FlashAttention";

    fn forward(
        &mut self,
        context: &mut ForwardContext<'_>,
        inputs: &[&Tensor],
    ) -> FunctionResult<Vec<Tensor>> {
        let (cumulative_q, cumulative_k) = match &self.cumulative {
            Some((q, k)) => (Value::Tensor(q), Value::Tensor(k)),
            None => (Value::None, Value::None),
        };
        let (left, right) = self.window();
        // SAFETY: `Call` has checked dtypes, devices and that the shapes agree, and `PackedLengths`, which owns its
        // tensors, that the cumulative lengths stay within them.
        let outputs = unsafe {
            call_unchecked(
                "aten::_flash_attention_forward",
                "",
                &[
                    Value::Tensor(inputs[0]),
                    Value::Tensor(inputs[1]),
                    Value::Tensor(inputs[2]),
                    cumulative_q,
                    cumulative_k,
                    Value::Int(self.longest.0),
                    Value::Int(self.longest.1),
                    Value::Float(self.dropout_p),
                    Value::Bool(self.is_causal()),
                    // return_debug_mask
                    Value::Bool(false),
                    Value::Float(self.scale),
                    left,
                    right,
                ],
            )?
        };
        let [output, lse, random, unused] = tensors(outputs)?;
        // flash-attn returns +inf for a query that sees no key, and its backward expects it.
        let shown = lse.f_masked_fill(&lse.f_eq(f64::INFINITY)?, f64::NEG_INFINITY)?;
        let (output, lse, shown) = match self.has_sinks {
            false => (output, lse, shown),
            true => {
                let sinks = self.like_lse(inputs[3], &lse)?;
                // exp(lse) / (exp(lse) + exp(sink)), in the output's order of heads and queries.
                let share = lse.f_sub(&sinks)?.f_sigmoid()?;
                let last = share.dim() as i64 - 1;
                let share = share.f_transpose(last - 1, last)?.f_unsqueeze(-1)?;
                let output = output.f_mul(&share.f_to_kind(output.kind())?)?;
                (output, lse.f_logaddexp(&sinks)?, shown.f_logaddexp(&sinks)?)
            }
        };
        context.mark_non_differentiable(1);
        if context.needs_any_grad() {
            context.save_for_backward(inputs);
            context.save_for_backward(&[&output, &lse, &random, &unused]);
        }
        Ok(vec![output, shown])
    }

    fn backward(
        &self,
        context: &BackwardContext,
        gradients: &[Option<Tensor>],
    ) -> FunctionResult<Vec<Option<Tensor>>> {
        let saved = context.saved();
        let (inputs, results) = saved.split_at(saved.len() - 4);
        let Some(gradient) = &gradients[0] else {
            return Ok(inputs.iter().map(|_| None).collect());
        };
        // The gradient of a `sum` is expanded with strides of 0; the kernel reads contiguous rows.
        let gradient = gradient.f_contiguous()?;
        let (output, lse) = (&results[0], &results[1]);
        let outputs = self.backward_operator(&gradient, inputs, results)?;
        let mut all: Vec<Option<Tensor>> = Vec::new();
        for output in outputs {
            all.push(Some(output.into_tensor()?));
        }
        if self.has_sinks {
            let sinks = &inputs[3];
            let delta =
                gradient
                    .f_mul(output)?
                    .f_sum_dim_intlist(&[-1_i64][..], false, lse.kind())?;
            let last = delta.dim() as i64 - 1;
            let delta = delta.f_transpose(last - 1, last)?;
            // A sink has no value, so its gradient is minus its weight times delta.
            let weight = self.like_lse(sinks, lse)?.f_sub(lse)?.f_exp()?;
            let terms = weight.f_mul(&delta)?.f_neg()?;
            let all_but_heads = match self.cumulative {
                Some(_) => vec![1_i64],
                None => vec![0, 2],
            };
            let gradient = terms.f_sum_dim_intlist(all_but_heads.as_slice(), false, lse.kind())?;
            all.push(Some(gradient.f_to_kind(sinks.kind())?));
        }
        Ok(all)
    }
}

/// Returns the first four results: output, log-sum-exp, and the state of the random generator for backward.
fn tensors(outputs: Vec<Output>) -> Result<[Tensor; 4]> {
    let mut found = Vec::new();
    for output in outputs.into_iter().take(4) {
        found.push(output.into_tensor()?);
    }
    <[Tensor; 4]>::try_from(found).map_err(|found| {
        Error::Sys(overdrive_sys::Error::Torch {
            operation: "aten::_flash_attention_forward".to_owned(),
            message: format!("it returned {} results, expected at least 4", found.len()),
        })
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use tch::{Device, Kind, Tensor};

    use super::{CudaFlash, cuda_flash};

    /// No GPU is needed to see that the operators take these arguments: libtorch checks them against
    /// their schemas before it looks for the device.
    #[test]
    fn the_arguments_fit_the_schemas_of_flash_attention() {
        let packed = Tensor::zeros([4, 2, 8], (Kind::Half, Device::Cpu));
        let flash = |is_packed: bool| CudaFlash {
            cumulative: is_packed.then(|| {
                let lengths = Tensor::from_slice(&[0_i32, 4]);
                (lengths.shallow_clone(), lengths)
            }),
            longest: (4, 4),
            dropout_p: 0.1,
            scale: 0.5,
            left: Some(2),
            right: Some(0),
            has_sinks: false,
        };
        let saved = [0, 1, 2, 3].map(|_| packed.shallow_clone());
        for is_packed in [true, false] {
            let forward = cuda_flash(flash(is_packed), &packed, &packed, &packed, None);
            let backward = flash(is_packed).backward_operator(&packed, &saved, &saved);
            for (name, error) in [
                ("forward", forward.unwrap_err().to_string()),
                ("backward", backward.unwrap_err().to_string()),
            ] {
                let operator = format!("'aten::_flash_attention_{name}'");
                assert!(
                    error.contains("Could not run") && error.contains(&operator),
                    "{error}"
                );
            }
        }
    }
}
