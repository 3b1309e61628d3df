//! The blockwise CPU kernel as a differentiable function of tensors.

use overdrive_autograd::{BackwardContext, ForwardContext, Function, FunctionResult, apply};
use overdrive_core::Error as Common;
use overdrive_kernels::tensors::{Fresh, Strided};
use overdrive_kernels::{Accumulate, InstructionSet};
use overdrive_sys::named_operator::{self, NamedOperator};
use tch::{Kind, Tensor};

use crate::kernel::{
    self, AttentionInputs, BackwardInputs, BackwardOutputs, Bias, BiasValues, Dropout,
    ForwardOutputs, Limits, Rules, Sequence, Slopes, Stored, View, ViewMut, usize_of,
};
use crate::{Error, Result};

/// The inputs that are not differentiable tensors.
#[derive(Debug)]
pub(crate) struct Blockwise {
    pub(crate) set: InstructionSet,
    pub(crate) sequences: Vec<Sequence>,
    pub(crate) scale: f64,
    pub(crate) softcap: Option<f64>,
    pub(crate) limits: Limits,
    pub(crate) bottom_right: bool,
    /// The slopes of ALiBi, (H) or (sequences, H).
    pub(crate) slopes: Option<Tensor>,
    pub(crate) dropout: Option<Dropout>,
    /// If `true`, the fourth input is a bias.
    pub(crate) has_bias: bool,
    /// If `true`, the last input is the sinks.
    pub(crate) has_sinks: bool,
}

/// Returns the output (B, T, H, Dv) and log-sum-exp (B, H, T) for query (B, H, T, D), key (B, H_kv, S, D) and value
/// (B, H_kv, S, Dv), bias (four dimensions, each full or 1) and sinks (H).
pub(crate) fn blockwise(
    mut function: Blockwise,
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    bias: Option<&Tensor>,
    sinks: Option<&Tensor>,
) -> Result<(Tensor, Tensor)> {
    (function.has_bias, function.has_sinks) = (bias.is_some(), sinks.is_some());
    let mut inputs = vec![query, key, value];
    inputs.extend(bias);
    inputs.extend(sinks);
    let mut outputs = apply(function, &inputs)?.into_iter();
    match (outputs.next(), outputs.next()) {
        (Some(output), Some(logsumexp)) => Ok((output, logsumexp)),
        _ => unreachable!("forward returns two tensors"),
    }
}

/// Returns the dtype of sums and of the log-sum-exp.
pub(crate) fn accumulator(kind: Kind) -> Kind {
    match kind {
        Kind::Double => Kind::Double,
        _ => Kind::Float,
    }
}

/// Calls a generic function for the Rust type of a dtype.
macro_rules! for_kind {
    ($kind:expr, $call:ident($($arg:expr),*)) => {
        match $kind {
            Kind::Float => $call::<f32>($($arg),*),
            Kind::Double => $call::<f64>($($arg),*),
            Kind::Half => $call::<half::f16>($($arg),*),
            Kind::BFloat16 => $call::<half::bf16>($($arg),*),
            kind => Err(Error::Common(Common::dtype("query", kind, "Float, Double, Half or BFloat16"))),
        }
    };
}

pub(crate) use for_kind;

impl Function for Blockwise {
    const NAME: &'static str = "BlockwiseAttention";

    fn forward(
        &mut self,
        context: &mut ForwardContext<'_>,
        inputs: &[&Tensor],
    ) -> FunctionResult<Vec<Tensor>> {
        context.set_materialize_grads(false);
        let arguments = Arguments::of(self, inputs)?;
        // Named, so that selective checkpointing can save the results.
        let results = named_operator::call(NamedOperator::Attention, inputs, || {
            let (output, logsumexp) = for_kind!(inputs[0].kind(), forward(self, &arguments))?;
            Ok(vec![output, logsumexp])
        })?;
        if context.needs_any_grad() {
            // Backward recomputes the scores from these, so nothing of their size is saved.
            context.save_for_backward(inputs);
            context.save_for_backward(&results.iter().collect::<Vec<_>>());
        }
        Ok(results)
    }

    fn backward(
        &self,
        context: &BackwardContext,
        gradients: &[Option<Tensor>],
    ) -> FunctionResult<Vec<Option<Tensor>>> {
        let saved = context.saved();
        let count = saved.len() - 2;
        let inputs: Vec<&Tensor> = saved[..count].iter().collect();
        let arguments = Arguments::of(self, &inputs)?;
        let (output, logsumexp) = (&saved[count], &saved[count + 1]);
        let gradient = match &gradients[0] {
            Some(gradient) => gradient.f_to_kind(output.kind())?,
            // Only the log-sum-exp was used; its gradient reaches the scores through delta.
            None => output.f_zeros_like()?,
        };
        let upstream = Upstream {
            // Results are (B, T, H, D) in memory, views of them (B, H, T, D).
            output: Strided::rows(&output.f_transpose(1, 2)?)?,
            gradient: Strided::rows(&gradient.f_transpose(1, 2)?)?,
            logsumexp: Strided::rows(&logsumexp.f_unsqueeze(-1)?)?,
            logsumexp_gradient: match &gradients[1] {
                Some(gradient) => Some(Strided::rows(&gradient.f_unsqueeze(-1)?)?),
                None => None,
            },
        };
        let mut results = Vec::new();
        let delta = for_kind!(
            inputs[0].kind(),
            backward(self, &arguments, &upstream, &mut results)
        )?;
        if self.has_bias {
            // Costs a pass over all scores, so it is skipped for a mask that is not learned.
            let wanted = context.needs_input_grad(3);
            results.push(match wanted {
                true => Some(for_kind!(
                    inputs[0].kind(),
                    bias_gradient(self, &arguments, &upstream, inputs[3])
                )?),
                false => None,
            });
        }
        if self.has_sinks {
            // The sink has the weight exp(sink - logsumexp) and a value of zero.
            let sinks = inputs[count - 1]
                .f_to_kind(delta.kind())?
                .f_view([1, -1, 1])?;
            let weight = (sinks.f_sub(logsumexp)?).f_exp()?;
            let all = [0_i64, 2];
            let gradient =
                weight
                    .f_mul(&delta)?
                    .f_neg()?
                    .f_sum_dim_intlist(&all[..], false, delta.kind())?;
            results.push(Some(gradient.f_to_kind(inputs[count - 1].kind())?));
        }
        Ok(results)
    }
}

/// The tensors of a call as slices with strides.
struct Arguments {
    query: Strided,
    key: Strided,
    value: Strided,
    bias: Option<Strided>,
    keep: bool,
    sinks: Option<Strided>,
    slopes: Option<Strided>,
    /// The sizes of query and value, in BHTD.
    query_sizes: [i64; 4],
    kv_sizes: [i64; 4],
    key_dim: i64,
}

impl Arguments {
    fn of(function: &Blockwise, inputs: &[&Tensor]) -> Result<Arguments> {
        let kind = accumulator(inputs[0].kind());
        let flat = |tensor: &Tensor| Strided::rows(&tensor.f_detach()?.f_to_kind(kind)?);
        let bias = function.has_bias.then(|| inputs[3]);
        let keep = bias.is_some_and(|bias| bias.kind() == Kind::Bool);
        let sinks = function.has_sinks.then(|| inputs[inputs.len() - 1]);
        Ok(Arguments {
            query: Strided::rows(inputs[0])?,
            key: Strided::rows(inputs[1])?,
            value: Strided::rows(inputs[2])?,
            bias: match bias {
                Some(bias) if keep => Some(Strided::any(bias)?),
                Some(bias) => Some(Strided::any(&bias.f_to_kind(kind)?)?),
                None => None,
            },
            keep,
            sinks: sinks.map(flat).transpose()?,
            slopes: function
                .slopes
                .as_ref()
                .map(|slopes| flat(&slopes.f_contiguous()?))
                .transpose()?,
            query_sizes: sizes(inputs[0]),
            kv_sizes: sizes(inputs[2]),
            key_dim: inputs[1].size()[3],
        })
    }

    fn attention_inputs<E: Accumulate>(
        &self,
        function: &Blockwise,
    ) -> Result<AttentionInputs<'_, E>> {
        let bias = match &self.bias {
            Some(bias) if self.keep => Some(Bias {
                values: BiasValues::Keep(bias.elements()?),
                strides: bias.strides,
            }),
            Some(bias) => Some(Bias {
                values: BiasValues::Add(bias.elements()?),
                strides: bias.strides,
            }),
            None => None,
        };
        let slopes = match (&self.slopes, &function.slopes) {
            (Some(flat), Some(slopes)) => Some(Slopes {
                data: flat.elements()?,
                sequence: if slopes.dim() == 2 {
                    usize_of(self.query_sizes[1])
                } else {
                    0
                },
            }),
            _ => None,
        };
        Ok(AttentionInputs {
            set: function.set,
            sequences: function.sequences.clone(),
            heads: usize_of(self.query_sizes[1]),
            kv_heads: usize_of(self.kv_sizes[1]),
            key_dim: usize_of(self.key_dim),
            value_dim: usize_of(self.kv_sizes[3]),
            query: View::of(&self.query)?,
            key: Stored::Elements(View::of(&self.key)?),
            value: Stored::Elements(View::of(&self.value)?),
            pages: None,
            rules: Rules {
                scale: function.scale,
                softcap: function.softcap,
                limits: function.limits,
                bottom_right: function.bottom_right,
                slopes,
                sinks: self.sinks.as_ref().map(Strided::elements).transpose()?,
                bias,
                dropout: function.dropout,
            },
        })
    }
}

/// The upstream gradients of backward, with the results of forward.
struct Upstream {
    output: Strided,
    gradient: Strided,
    logsumexp: Strided,
    logsumexp_gradient: Option<Strided>,
}

impl Upstream {
    fn inputs<E: Accumulate>(&self) -> Result<BackwardInputs<'_, E>> {
        Ok(BackwardInputs {
            gradient: View::of(&self.gradient)?,
            output: View::of(&self.output)?,
            logsumexp: View::of(&self.logsumexp)?,
            logsumexp_gradient: self.logsumexp_gradient.as_ref().map(View::of).transpose()?,
        })
    }
}

fn forward<E: Accumulate>(function: &Blockwise, arguments: &Arguments) -> Result<(Tensor, Tensor)> {
    let problem = arguments.attention_inputs::<E>(function)?;
    let [batch, heads, queries, _] = arguments.query_sizes;
    let shape = [batch, queries, heads, arguments.kv_sizes[3]];
    let mut output = Fresh::new(&shape)?;
    let mut logsumexp = Fresh::new(&[batch, heads, queries])?;
    let mut workspace = workspace::<E>(kernel::forward_workspace(&problem))?;
    let outputs = ForwardOutputs {
        output: ViewMut::by_row(&mut output)?,
        logsumexp: ViewMut::by_head(&mut logsumexp)?,
    };
    kernel::forward(&problem, &outputs, workspace.elements_mut()?);
    Ok((output.into_tensor(), logsumexp.into_tensor()))
}

/// Pushes the gradients of query, key and value; returns [`BackwardOutputs::delta`].
fn backward<E: Accumulate>(
    function: &Blockwise,
    arguments: &Arguments,
    upstream: &Upstream,
    results: &mut Vec<Option<Tensor>>,
) -> Result<Tensor> {
    let problem = arguments.attention_inputs::<E>(function)?;
    let [batch, heads, queries, _] = arguments.query_sizes;
    let [_, kv_heads, keys, value_dim] = arguments.kv_sizes;
    let key_dim = arguments.key_dim;
    let mut query = Fresh::<E>::new(&[batch, queries, heads, key_dim])?;
    let mut key = Fresh::<E>::new(&[batch, keys, kv_heads, key_dim])?;
    let mut value = Fresh::<E>::new(&[batch, keys, kv_heads, value_dim])?;
    let mut delta = Fresh::new(&[batch, heads, queries])?;
    let mut workspace = workspace::<E>(kernel::backward_workspace(&problem))?;
    let outputs = BackwardOutputs {
        query: ViewMut::by_row(&mut query)?,
        key: ViewMut::by_row(&mut key)?,
        value: ViewMut::by_row(&mut value)?,
        delta: ViewMut::by_head(&mut delta)?,
    };
    kernel::backward(
        &problem,
        &upstream.inputs()?,
        &outputs,
        workspace.elements_mut()?,
    );
    for gradient in [query, key, value] {
        results.push(Some(gradient.into_tensor().f_transpose(1, 2)?));
    }
    Ok(delta.into_tensor())
}

fn bias_gradient<E: Accumulate>(
    function: &Blockwise,
    arguments: &Arguments,
    upstream: &Upstream,
    bias: &Tensor,
) -> Result<Tensor> {
    let problem = arguments.attention_inputs::<E>(function)?;
    let shape = sizes(bias);
    let mut gradient = Fresh::zeros(&shape)?;
    let shape = shape.map(usize_of);
    let mut workspace = workspace::<E>(kernel::bias_gradient_workspace(&problem, shape))?;
    kernel::bias_gradient(
        &problem,
        &upstream.inputs()?,
        shape,
        gradient.elements_mut()?,
        workspace.elements_mut()?,
    );
    Ok(gradient.into_tensor().f_to_kind(bias.kind())?)
}

/// Returns scratch memory from libtorch's allocator, which counts it and reuses it in the next call.
pub(crate) fn workspace<E: Accumulate>(elements: usize) -> Result<Fresh<E::Acc>> {
    Ok(Fresh::new(&[i64::try_from(elements).unwrap_or(i64::MAX)])?)
}

fn sizes(tensor: &Tensor) -> [i64; 4] {
    let mut sizes = [1; 4];
    sizes
        .iter_mut()
        .zip(tensor.size())
        .for_each(|(to, size)| *to = size);
    sizes
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use tch::{Device, Kind, Tensor};

    use super::{Blockwise, blockwise};
    use crate::kernel::{Limits, Sequence};
    use overdrive_kernels::InstructionSet;
    use overdrive_sys::denormals::take_subnormal_operands;

    /// Returns the output, log-sum-exp and gradients with the vectors of `set`.
    fn run(set: InstructionSet, kind: Kind) -> Vec<Tensor> {
        let (queries, keys, dim) = (71, 130, 20);
        let leaf = |heads: i64, length: i64, seed: f64| {
            let x = Tensor::arange(heads * length * dim, (Kind::Double, Device::Cpu)) * 12.9898;
            let x = (x + seed).sin().reshape([1, heads, length, dim]);
            x.to_kind(kind).set_requires_grad(true)
        };
        let (query, key, value) = (
            leaf(4, queries, 0.1),
            leaf(2, keys, 0.2),
            leaf(2, keys, 0.3),
        );
        let function = Blockwise {
            set,
            sequences: vec![Sequence {
                batch: 0,
                query_start: 0,
                queries: 71,
                key_start: 0,
                keys: 130,
            }],
            scale: 0.4,
            softcap: Some(3.0),
            limits: Limits {
                left: Some(90),
                right: Some(0),
                sink_tokens: 2,
            },
            bottom_right: true,
            slopes: Some(Tensor::from_slice(&[0.1_f32, 0.2, 0.0, 0.3])),
            dropout: Some(crate::kernel::Dropout {
                probability: 0.2,
                seed: 3,
            }),
            has_bias: false,
            has_sinks: false,
        };
        let (output, lse) = blockwise(function, &query, &key, &value, None, None).unwrap();
        let weight = (Tensor::arange(71 * 4 * dim, (kind, Device::Cpu)) * 7.7).cos();
        let loss = (&output * weight.reshape(output.size())).sum(kind) + lse.sum(kind);
        loss.backward();
        vec![output, lse, query.grad(), key.grad(), value.grad()]
    }

    /// Returns leaves whose scores, in natural logarithms, spread over some 170: most keys of a query have weights from
    /// 1e-30 down to none.
    fn peaked(kind: Kind) -> [Tensor; 3] {
        let (length, dim) = (96, 20);
        let leaf = |size: f64, seed: f64| {
            let x = Tensor::arange(2 * length * dim, (Kind::Double, Device::Cpu)) * 12.9898;
            let x = (x + seed).sin().reshape([1, 2, length, dim]) * size;
            x.to_kind(kind).set_requires_grad(true)
        };
        [leaf(7.0, 0.1), leaf(7.0, 0.2), leaf(0.1, 0.3)]
    }

    /// Returns the number of elements that are subnormal in `kind`.
    fn count_subnormal(x: &Tensor, kind: Kind) -> i64 {
        let least = match kind {
            Kind::Double => f64::MIN_POSITIVE,
            _ => f64::from(f32::MIN_POSITIVE),
        };
        let x = x.detach().to_kind(Kind::Double);
        let found = x.abs().lt(least) * x.not_equal(0.0);
        found.sum(Kind::Int64).int64_value(&[])
    }

    #[test]
    fn no_subnormal_number_reaches_a_product_of_peaked_attention() {
        let scale = 0.8;
        // In exact arithmetic many weights and gradients of scores are subnormal numbers of f32.
        let [query, key, value] = peaked(Kind::Double).map(|leaf| leaf.detach());
        let weights = (query.matmul(&key.transpose(2, 3)) * scale).softmax(-1, Kind::Double);
        let upstream = (Tensor::arange(value.numel() as i64, (Kind::Double, Device::Cpu)) * 7.7)
            .cos()
            .reshape(value.size());
        let of_weights = upstream.matmul(&value.transpose(2, 3));
        let delta = (&weights * &of_weights).sum_dim_intlist([-1_i64].as_slice(), true, None);
        let of_scores = &weights * (of_weights - delta);
        for exact in [&weights, &of_scores] {
            let found = count_subnormal(exact, Kind::Float);
            assert!(found > 100, "the case has {found} subnormal numbers only");
        }

        for set in InstructionSet::available() {
            for kind in [Kind::Float, Kind::Double] {
                let [query, key, value] = peaked(kind);
                let upstream = upstream.to_kind(kind);
                let function = Blockwise {
                    set,
                    sequences: vec![Sequence {
                        batch: 0,
                        query_start: 0,
                        queries: 96,
                        key_start: 0,
                        keys: 96,
                    }],
                    scale,
                    softcap: None,
                    limits: Limits::default(),
                    bottom_right: true,
                    slopes: None,
                    dropout: None,
                    has_bias: false,
                    has_sinks: false,
                };
                let operands = take_subnormal_operands();
                let (output, lse) = blockwise(function, &query, &key, &value, None, None).unwrap();
                // The kernel's output is (B, T, H, D).
                (output.transpose(1, 2) * upstream).sum(kind).backward();
                // `None` where the processor keeps no record of operands.
                let found = take_subnormal_operands();
                assert_eq!(found, operands.and(Some(false)), "{set:?} in {kind:?}");
                for result in [output, lse, query.grad(), key.grad(), value.grad()] {
                    assert_eq!(count_subnormal(&result, kind), 0, "{set:?} in {kind:?}");
                }
            }
        }
    }

    #[test]
    fn every_instruction_set_gives_the_same_to_rounding() {
        for (kind, tolerance) in [(Kind::Float, 2e-5), (Kind::Double, 1e-12)] {
            let expected = run(InstructionSet::from_name("portable").unwrap(), kind);
            for set in InstructionSet::available() {
                for (got, expected) in run(set, kind).iter().zip(&expected) {
                    let off = (got - expected).abs().max().double_value(&[]);
                    assert!(off < tolerance, "{set:?} in {kind:?} is off by {off}");
                }
            }
        }
    }

    #[test]
    fn a_repeated_run_is_equal_bit_for_bit() {
        let set = InstructionSet::best();
        let first = run(set, Kind::Float);
        for _ in 0..5 {
            assert_eq!(run(set, Kind::Float), first);
        }
    }
}
