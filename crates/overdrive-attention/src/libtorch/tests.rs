//! libtorch's operators on CPU tensors, by stand-ins for the kernels.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::cell::RefCell;

use overdrive_autograd::{
    BackwardContext, ForwardContext, Function, FunctionResult, GradOptions, apply, grad,
};
use overdrive_sys::engine::GradMode;
use overdrive_sys::op::Value;
use tch::{Device, Kind, Tensor};

use super::{cudnn, efficient};
use crate::call::Call;
use crate::paged_packed::tests::{StandIn, assert_close, tensor, with};
use crate::{AttentionOptions, Backend, Result, attention_with_lse};

fn numbers(shape: &[i64], seed: f64) -> Tensor {
    let count: i64 = shape.iter().product();
    let at = Tensor::arange(count, (Kind::Double, Device::Cpu)) * 12.9898 + seed;
    ((at.sin() * 43_758.545_3).frac() * 2.0).reshape(shape)
}

#[test]
fn grouped_heads_with_a_mask_equal_the_math_back_end() {
    let (batch, heads, kv_heads, keys) = (3, 6, 2, 21);
    for queries in [1, 4] {
        let query = numbers(&[batch, heads, queries, 8], 0.1);
        let (key, value) = (
            numbers(&[batch, kv_heads, keys, 8], 0.2),
            numbers(&[batch, kv_heads, keys, 8], 0.3),
        );
        let seen = |shape: &[i64]| {
            let seen = numbers(shape, 0.4).gt(-0.5);
            // Every query sees a key.
            let _first = seen.narrow(3, 0, 1).fill_(1);
            seen
        };
        let masks = [
            None,
            Some(seen(&[1, 1, 1, keys])),
            Some(seen(&[batch, 1, 1, keys])),
            Some(seen(&[batch, 1, queries, keys])),
            Some(seen(&[1, heads, queries, keys])),
            Some(seen(&[batch, heads, queries, keys])),
            Some(numbers(&[batch, heads, queries, keys], 0.5)),
        ];
        for mask in &masks {
            let options = AttentionOptions {
                mask: mask.as_ref(),
                backend: Backend::Math,
                ..AttentionOptions::default()
            };
            let expected = attention_with_lse(&query, &key, &value, &options).unwrap();
            let call = Call::new(&query, &key, &value, &options, true).unwrap();
            let (output, lse) = with(StandIn::Computes, || efficient(&call).unwrap());
            let name = format!("{queries} {:?}", mask.as_ref().map(Tensor::size));
            assert_close(&output, &expected.0, 1e-12, &name);
            assert_close(&lse, &expected.1, 1e-12, &name);
        }
    }
}

fn gradients_of(
    output: &Tensor,
    inputs: &[&Tensor],
    gradient: &Tensor,
) -> overdrive_autograd::Result<Vec<Option<Tensor>>> {
    let options = GradOptions {
        gradients: &[Some(gradient)],
        ..GradOptions::default()
    };
    grad(&[output], inputs, &options)
}

/// The sizes and strides of query, key and value, by which libtorch keeps the plans of cuDNN's backward.
type Key = Vec<(Vec<i64>, Vec<i64>)>;

thread_local! {
    /// The plans: the strides of the gradient with which a key came first.
    static PLANS: RefCell<Vec<(Key, Vec<i64>)>> = const { RefCell::new(Vec::new()) };
}

/// Attention with the backward of libtorch 2.11 to 2.13 on cuDNN: the elements of the gradient are read with the strides
/// that the first gradient of the same key had.
struct Planned {
    is_causal: bool,
    scale: f64,
}

impl Planned {
    fn compute(&self, inputs: &[&Tensor]) -> Result<(Tensor, Tensor)> {
        let options = AttentionOptions {
            causal: self.is_causal,
            scale: Some(self.scale),
            backend: Backend::Math,
            ..AttentionOptions::default()
        };
        attention_with_lse(inputs[0], inputs[1], inputs[2], &options)
    }
}

impl Function for Planned {
    const NAME: &'static str = "ScaledDotProductCudnnAttention";

    fn forward(
        &mut self,
        context: &mut ForwardContext<'_>,
        inputs: &[&Tensor],
    ) -> FunctionResult<Vec<Tensor>> {
        context.save_for_backward(inputs);
        context.mark_non_differentiable(1);
        let (output, lse) = self.compute(inputs)?;
        // The order of the query, and a log-sum-exp with a last dimension.
        let mut ordered = inputs[0].f_empty_like()?;
        ordered.f_copy_(&output)?;
        Ok(vec![ordered, lse.f_unsqueeze(-1)?])
    }

    fn backward(
        &self,
        context: &BackwardContext,
        gradients: &[Option<Tensor>],
    ) -> FunctionResult<Vec<Option<Tensor>>> {
        let gradient = gradients[0].as_ref().ok_or("gradients are materialized")?;
        // libtorch copies a gradient only if its rows are not contiguous.
        let gradient = match gradient.stride().last() {
            Some(1) => gradient.shallow_clone(),
            _ => gradient.f_contiguous()?,
        };
        let key: Key = context
            .saved()
            .iter()
            .map(|input| (input.size(), input.stride()))
            .collect();
        let strides = PLANS.with_borrow_mut(|plans| {
            if let Some((_, strides)) = plans.iter().find(|(other, _)| *other == key) {
                return strides.clone();
            }
            plans.push((key, gradient.stride()));
            gradient.stride()
        });
        let read = gradient.f_as_strided(gradient.size(), strides.as_slice(), None)?;
        let _recording = GradMode::new(true);
        let leaves: Vec<Tensor> = (context.saved().iter())
            .map(|input| input.detach().set_requires_grad(true))
            .collect();
        let inputs: Vec<&Tensor> = leaves.iter().collect();
        let (output, _) = self.compute(&inputs)?;
        Ok(gradients_of(&output, &inputs, &read)?)
    }
}

/// Returns the results of `_scaled_dot_product_cudnn_attention`.
pub(crate) fn planned(arguments: &[Value<'_>]) -> Result<(Tensor, Tensor)> {
    let inputs = [0, 1, 2].map(|at| tensor(&arguments[at]).unwrap());
    let Value::Float(scale) = arguments[8] else {
        panic!("no scale")
    };
    let function = Planned {
        is_causal: matches!(arguments[6], Value::Bool(true)),
        scale,
    };
    let mut outputs = apply(function, &inputs)?.into_iter();
    Ok((outputs.next().unwrap(), outputs.next().unwrap()))
}

#[test]
fn gradients_of_cudnn_are_right_in_whichever_order_the_gradients_of_a_shape_come() {
    // How the query and the gradient of the output lie in memory, by the dimension that lies before another one; the
    // gradient of a sum has strides of 0.
    let ordered = |tensor: Tensor, order: &str| match order {
        "bhtd" => tensor.contiguous(),
        "bthd" => tensor.transpose(1, 2).contiguous().transpose(1, 2),
        _ => tensor.sum(Kind::Double).expand(tensor.size(), false),
    };
    let mut keys = 2;
    for query_order in ["bhtd", "bthd"] {
        for orders in [
            ["bhtd", "bthd", "bhtd"],
            ["bthd", "bhtd", "bthd"],
            ["sum", "bthd", "bhtd"],
        ] {
            // A shape of its own, so that each order comes first once.
            keys += 1;
            for order in orders {
                let leaf = |heads: i64, seed: f64| {
                    let values = ordered(numbers(&[2, heads, keys, 8], seed), query_order);
                    values.set_requires_grad(true)
                };
                let inputs = [leaf(4, 0.1), leaf(2, 0.2), leaf(2, 0.3)];
                let gradient = ordered(numbers(&[2, 4, keys, 8], 0.4), order);
                let options = AttentionOptions::causal();
                let gradients = |output: &Tensor| {
                    let inputs: Vec<&Tensor> = inputs.iter().collect();
                    gradients_of(output, &inputs, &gradient).unwrap()
                };
                let call = Call::new(&inputs[0], &inputs[1], &inputs[2], &options, true).unwrap();
                let (output, lse) = with(StandIn::Computes, || cudnn(&call).unwrap());
                let found = gradients(&output);
                let math = AttentionOptions {
                    backend: Backend::Math,
                    ..options
                };
                let expected =
                    attention_with_lse(&inputs[0], &inputs[1], &inputs[2], &math).unwrap();
                let name = format!("{query_order}: {order} of {orders:?}");
                assert_close(&output, &expected.0, 1e-12, &name);
                assert_close(&lse, &expected.1, 1e-12, &name);
                for (found, expected) in found.iter().zip(gradients(&expected.0)) {
                    let (found, expected) = (found.as_ref().unwrap(), expected.unwrap());
                    assert_close(found, &expected, 1e-12, &name);
                }
            }
        }
    }
    let plans = PLANS.take();
    assert_eq!(plans.len(), 6);
    for (key, strides) in plans {
        assert_eq!(
            key[0].1, strides,
            "the gradient lies as the output, which lies as the query"
        );
    }
}
