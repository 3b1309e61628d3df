//! Functions with a backward in Rust: several inputs and outputs, in-place, saved tensors, errors, panics.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use overdrive_autograd::{
    BackwardContext, BackwardOptions, Error, ForwardContext, Function, FunctionResult, GradOptions,
    GradcheckOptions, apply, backward, grad, gradcheck, gradgradcheck, no_grad,
};
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

use crate::test_tensors::normal;

const F64: (Kind, Device) = (Kind::Double, Device::Cpu);

fn leaf(shape: &[i64]) -> Tensor {
    normal(shape).set_requires_grad(true)
}

/// a·b and a + b, with one saved pair and a gradient for each input.
struct ProductAndSum;

impl Function for ProductAndSum {
    const NAME: &'static str = "ProductAndSum";
    const TWICE_DIFFERENTIABLE: bool = true;

    fn forward(
        &mut self,
        context: &mut ForwardContext<'_>,
        inputs: &[&Tensor],
    ) -> FunctionResult<Vec<Tensor>> {
        context.save_for_backward(inputs);
        Ok(vec![
            inputs[0].f_mul(inputs[1])?,
            inputs[0].f_add(inputs[1])?,
        ])
    }

    fn backward(
        &self,
        context: &BackwardContext,
        gradients: &[Option<Tensor>],
    ) -> FunctionResult<Vec<Option<Tensor>>> {
        let [a, b] = context.saved() else {
            return Err("two tensors were saved".into());
        };
        let [Some(product), Some(sum)] = gradients else {
            return Err("gradients are materialized".into());
        };
        Ok(vec![
            Some(product.f_mul(b)?.f_add(sum)?),
            Some(product.f_mul(a)?.f_add(sum)?),
        ])
    }
}

#[test]
fn a_function_with_two_inputs_and_outputs_passes_gradcheck_and_gradgradcheck() {
    let inputs = [leaf(&[2, 3]), leaf(&[2, 3])];
    let run = |inputs: &[Tensor]| Ok(apply(ProductAndSum, &[&inputs[0], &inputs[1]])?);
    gradcheck(run, &inputs, &GradcheckOptions::default()).unwrap();
    gradgradcheck(run, &inputs, &GradcheckOptions::default()).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn gradients_equal_those_of_the_composed_operators(rows in 1i64..5, columns in 1i64..7, used in 0usize..3) {
        let (a, b) = (leaf(&[rows, columns]), leaf(&[rows, columns]));
        let ours = apply(ProductAndSum, &[&a, &b]).unwrap();
        let theirs = [&a * &b, &a + &b];
        // Also where one output is not used: its gradient arrives as zeros.
        let loss = |o: &[Tensor]| match used {
            0 => o[0].sin().sum(None),
            1 => o[1].sin().sum(None),
            _ => (&o[0] * &o[1]).sum(None),
        };
        let options = GradOptions { allow_unused: true, ..GradOptions::default() };
        let ours = grad(&[&loss(&ours)], &[&a, &b], &options).unwrap();
        let theirs = grad(&[&loss(&theirs)], &[&a, &b], &options).unwrap();
        for (ours, theirs) in ours.iter().zip(&theirs) {
            prop_assert_eq!(ours.as_ref().unwrap(), theirs.as_ref().unwrap());
        }
    }
}

#[test]
fn outputs_are_plain_tensors_where_nothing_requires_a_gradient() {
    let a = Tensor::ones([2], F64);
    assert!(!apply(ProductAndSum, &[&a, &a]).unwrap()[0].requires_grad());
    let x = leaf(&[2]);
    let outputs = no_grad(|| apply(ProductAndSum, &[&x, &x]).unwrap());
    assert!(!outputs[0].requires_grad() && outputs[0].is_leaf());
}

/// Doubles its input in place.
struct DoubleInPlace;

impl Function for DoubleInPlace {
    const NAME: &'static str = "DoubleInPlace";

    fn forward(
        &mut self,
        context: &mut ForwardContext<'_>,
        inputs: &[&Tensor],
    ) -> FunctionResult<Vec<Tensor>> {
        let mut input = inputs[0].shallow_clone();
        let _ = input.f_mul_scalar_(2.0)?;
        context.mark_dirty(0);
        Ok(vec![input])
    }

    fn backward(
        &self,
        _: &BackwardContext,
        gradients: &[Option<Tensor>],
    ) -> FunctionResult<Vec<Option<Tensor>>> {
        Ok(vec![gradients[0].as_ref().map(|g| g * 2.0)])
    }
}

#[test]
fn an_in_place_function_rewrites_the_history_of_its_input() {
    let x = leaf(&[3]);
    let y = &x * 3.0;
    let z = apply(DoubleInPlace, &[&y]).unwrap().remove(0);
    assert_eq!(z.data_ptr(), y.data_ptr());
    backward(&[&y.sum(None)], &BackwardOptions::default()).unwrap();
    assert_eq!(x.grad(), Tensor::full([3], 6.0, F64));
}

#[test]
fn an_in_place_function_on_a_leaf_is_an_error() {
    let x = leaf(&[3]);
    let error = apply(DoubleInPlace, &[&x]).unwrap_err().to_string();
    assert!(
        error.contains("leaf Variable that requires grad"),
        "{error}"
    );
}

#[test]
fn a_saved_tensor_that_was_changed_in_place_is_an_error_of_backward() {
    let (a, b) = (leaf(&[2]), leaf(&[2]));
    let doubled = &b * 2.0;
    let outputs = apply(ProductAndSum, &[&a, &doubled]).unwrap();
    let _ = no_grad(|| doubled.shallow_clone().fill_(7.0));
    let error = backward(&[&outputs[0].sum(None)], &BackwardOptions::default())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("modified by an inplace operation"),
        "{error}"
    );
}

#[test]
fn a_second_backward_needs_retain_graph() {
    let a = leaf(&[2]);
    let loss = apply(ProductAndSum, &[&a, &a]).unwrap()[0].sum(None);
    let keep = BackwardOptions {
        retain_graph: Some(true),
        ..BackwardOptions::default()
    };
    backward(&[&loss], &keep).unwrap();
    backward(&[&loss], &BackwardOptions::default()).unwrap();
    assert_eq!(a.grad(), &a.detach() * 4.0);
    let error = backward(&[&loss], &BackwardOptions::default()).unwrap_err();
    assert!(error.to_string().contains("second time"), "{error}");
}

/// 2·x and exp(x) as views of tensors made in forward, as libtorch's `linear` of a 3-D input is on a GPU. The rows lie
/// one behind the other in one tensor if `joint`, and in the same elements if `overlapping`.
#[derive(Clone, Copy)]
struct Views {
    joint: bool,
    overlapping: bool,
}

const APART: Views = Views {
    joint: false,
    overlapping: false,
};

impl Function for Views {
    const NAME: &'static str = "Views";
    const TWICE_DIFFERENTIABLE: bool = true;

    fn forward(
        &mut self,
        context: &mut ForwardContext<'_>,
        inputs: &[&Tensor],
    ) -> FunctionResult<Vec<Tensor>> {
        let size = inputs[0].size();
        let (double, exp) = (inputs[0].f_mul_scalar(2.0)?, inputs[0].f_exp()?);
        let parts = match self.joint {
            true => Tensor::f_stack(&[double, exp], 0)?.f_unbind(0)?,
            false => vec![double.f_view(-1)?, exp.f_view(-1)?],
        };
        let double = parts[0].f_view(size.as_slice())?;
        let exp = parts[1].f_view(size.as_slice())?;
        if self.overlapping {
            return Ok(vec![double.f_view(-1)?, double]);
        }
        context.save_for_backward(&[&exp]);
        Ok(vec![double, exp])
    }

    fn backward(
        &self,
        context: &BackwardContext,
        gradients: &[Option<Tensor>],
    ) -> FunctionResult<Vec<Option<Tensor>>> {
        let [Some(double), Some(exp)] = gradients else {
            return Err("gradients are materialized".into());
        };
        let double = double.f_mul_scalar(2.0)?;
        let Some(saved) = context.saved().first() else {
            return Ok(vec![Some(double.f_view_as(exp)?)]);
        };
        Ok(vec![Some(double.f_add(&exp.f_mul(saved)?)?)])
    }
}

#[test]
fn an_output_that_is_a_view_of_a_tensor_made_in_forward_may_be_changed_in_place() {
    for joint in [false, true] {
        let (x, scale) = (leaf(&[2, 3]), leaf(&[2, 3]));
        let views = Views { joint, ..APART };
        let [mut double, exp] = <[Tensor; 2]>::try_from(apply(views, &[&x]).unwrap()).unwrap();
        // By an operator, and by a function that is recorded.
        if !joint {
            let _ = double.f_mul_(&scale).unwrap();
        }
        let double = apply(DoubleInPlace, &[&double]).unwrap().remove(0);
        let loss = match joint {
            // One version counts for the whole tensor, of which `exp` was saved.
            true => double.sum(None),
            false => (&double * &exp).sum(None),
        };
        let found = backward(&[&loss], &BackwardOptions::default());
        if joint {
            let error = found.unwrap_err().to_string();
            assert!(error.contains("modified by an inplace"), "{error}");
            continue;
        }
        found.unwrap();
        // The loss is 4·x·scale·exp(x).
        let (x_value, exp) = (x.detach(), x.detach().exp());
        let expected: Tensor = (&x_value + 1.0) * &exp * &scale.detach() * 4.0;
        assert!(x.grad().allclose(&expected, 1e-12, 1e-12, false));
        let expected: Tensor = &x_value * &exp * 4.0;
        assert!(scale.grad().allclose(&expected, 1e-12, 1e-12, false));
    }
}

#[test]
fn a_view_that_is_returned_without_a_gradient_may_be_changed_in_place_by_one_that_has_one() {
    // Frozen weights of a first layer, whose output an adapter adds to.
    let x = Tensor::ones([2, 3], F64);
    let double = apply(APART, &[&x]).unwrap().remove(0);
    assert!(!double.requires_grad());
    let added = leaf(&[2, 3]);
    let _ = double.shallow_clone().f_add_(&added).unwrap();
    backward(&[&(&double * 3.0).sum(None)], &BackwardOptions::default()).unwrap();
    assert_eq!(added.grad(), Tensor::full([2, 3], 3.0, F64));
}

#[test]
fn a_change_in_place_of_a_view_that_was_saved_is_an_error_of_backward() {
    let x = leaf(&[2, 3]);
    let exp = apply(APART, &[&x]).unwrap().remove(1);
    let _ = exp.shallow_clone().f_mul_scalar_(3.0).unwrap();
    let error = backward(&[&exp.sum(None)], &BackwardOptions::default())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("modified by an inplace operation"),
        "{error}"
    );
}

#[test]
fn a_view_that_was_saved_is_differentiated_twice() {
    for joint in [false, true] {
        let views = Views { joint, ..APART };
        let run = |inputs: &[Tensor]| Ok(apply(views, &[&inputs[0]])?);
        let inputs = [leaf(&[2, 3])];
        gradcheck(run, &inputs, &GradcheckOptions::default()).unwrap();
        gradgradcheck(run, &inputs, &GradcheckOptions::default()).unwrap();
    }
}

#[test]
fn outputs_of_the_same_elements_must_not_be_changed_in_place() {
    let views = Views {
        overlapping: true,
        ..APART
    };
    let x = leaf(&[2, 3]);
    let output = apply(views, &[&x]).unwrap().remove(1);
    // Not by `f_mul_scalar_`, which panics where its operator fails.
    let error = output.shallow_clone().f_mul_(&output).unwrap_err();
    assert!(error.to_string().contains("is a view"), "{error}");
}

/// sin, without double backward.
struct SinOnce;

impl Function for SinOnce {
    const NAME: &'static str = "SinOnce";

    fn forward(
        &mut self,
        context: &mut ForwardContext<'_>,
        inputs: &[&Tensor],
    ) -> FunctionResult<Vec<Tensor>> {
        context.save_for_backward(&[inputs[0]]);
        Ok(vec![inputs[0].f_sin()?])
    }

    fn backward(
        &self,
        context: &BackwardContext,
        gradients: &[Option<Tensor>],
    ) -> FunctionResult<Vec<Option<Tensor>>> {
        let cos = context.saved()[0].f_cos()?;
        Ok(vec![gradients[0].as_ref().map(|g| g * &cos)])
    }
}

#[test]
fn double_backward_through_a_function_without_one_is_an_error_that_names_it() {
    let x = leaf(&[2]);
    let y = apply(SinOnce, &[&x]).unwrap().remove(0);
    let options = GradOptions {
        create_graph: true,
        ..GradOptions::default()
    };
    let first = grad(&[&y.sum(None)], &[&x], &options)
        .unwrap()
        .remove(0)
        .unwrap();
    let error = backward(&[&first.sum(None)], &BackwardOptions::default()).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("SinOnce") && text.contains("does not offer double backward"),
        "{text}"
    );
}

/// The larger of each row and where it was.
struct MaxOfRows;

impl Function for MaxOfRows {
    const NAME: &'static str = "MaxOfRows";

    fn forward(
        &mut self,
        context: &mut ForwardContext<'_>,
        inputs: &[&Tensor],
    ) -> FunctionResult<Vec<Tensor>> {
        let (values, indices) = inputs[0].f_max_dim(1, true)?;
        context.save_for_backward(&[inputs[0], &indices]);
        context.mark_non_differentiable(1);
        context.set_materialize_grads(false);
        Ok(vec![values, indices])
    }

    fn backward(
        &self,
        context: &BackwardContext,
        gradients: &[Option<Tensor>],
    ) -> FunctionResult<Vec<Option<Tensor>>> {
        let [x, indices] = context.saved() else {
            return Err("two tensors were saved".into());
        };
        if gradients[1].is_some() {
            return Err("an index has no gradient".into());
        }
        let zeros = x.f_zeros_like()?;
        Ok(vec![match &gradients[0] {
            Some(gradient) => Some(zeros.f_scatter(1, indices, gradient)?),
            None => None,
        }])
    }
}

#[test]
fn a_tensor_without_a_storage_is_an_input_like_any_other() {
    let x = Tensor::ones([2, 2], (Kind::Float, Device::Cpu)).to_mkldnn();
    let outputs = no_grad(|| apply(Doubles, &[&x]).unwrap());
    assert!(outputs[0].is_mkldnn() && !outputs[0].requires_grad());
}

/// The double of its input, of whatever layout.
struct Doubles;

impl Function for Doubles {
    const NAME: &'static str = "Doubles";

    fn forward(
        &mut self,
        _: &mut ForwardContext<'_>,
        inputs: &[&Tensor],
    ) -> FunctionResult<Vec<Tensor>> {
        Ok(vec![inputs[0].f_add(inputs[0])?])
    }

    fn backward(
        &self,
        _: &BackwardContext,
        gradients: &[Option<Tensor>],
    ) -> FunctionResult<Vec<Option<Tensor>>> {
        Ok(gradients.iter().map(|_| None).collect())
    }
}

#[test]
fn an_output_marked_non_differentiable_has_no_gradient() {
    let x = leaf(&[3, 4]);
    let outputs = apply(MaxOfRows, &[&x]).unwrap();
    assert!(outputs[0].requires_grad() && !outputs[1].requires_grad());
    gradcheck(
        |inputs| Ok(apply(MaxOfRows, &[&inputs[0]])?),
        &[x],
        &GradcheckOptions::default(),
    )
    .unwrap();
}

/// Fails in one of the four ways there are.
struct Failing {
    how: &'static str,
}

#[derive(Debug, thiserror::Error, PartialEq)]
#[error("no weights for layer {layer}")]
struct NoWeights {
    layer: usize,
}

impl Function for Failing {
    const NAME: &'static str = "Failing";

    fn forward(
        &mut self,
        _: &mut ForwardContext<'_>,
        inputs: &[&Tensor],
    ) -> FunctionResult<Vec<Tensor>> {
        match self.how {
            "forward" => Err(NoWeights { layer: 3 }.into()),
            _ => Ok(vec![inputs[0].f_mul_scalar(2.0)?]),
        }
    }

    fn backward(
        &self,
        _: &BackwardContext,
        gradients: &[Option<Tensor>],
    ) -> FunctionResult<Vec<Option<Tensor>>> {
        match self.how {
            "error" => Err(NoWeights { layer: 5 }.into()),
            "panic" => panic!("layer {} is on fire", 6),
            "count" => Ok(vec![]),
            "shape" => Ok(vec![Some(Tensor::ones([17], F64))]),
            _ => Ok(vec![gradients[0].as_ref().map(Tensor::shallow_clone)]),
        }
    }
}

fn failing(how: &'static str) -> overdrive_autograd::Result<Tensor> {
    let x = leaf(&[2]);
    let y = apply(Failing { how }, &[&x])?.remove(0);
    backward(&[&y.sum(None)], &BackwardOptions::default())?;
    Ok(x.grad())
}

#[test]
fn apply_returns_the_error_of_forward_unchanged() {
    let Err(Error::Forward { function, source }) = failing("forward") else {
        panic!("an error of forward");
    };
    assert_eq!(function, "Failing");
    assert_eq!(source.downcast_ref(), Some(&NoWeights { layer: 3 }));
}

#[test]
fn backward_returns_the_error_of_a_function_unchanged() {
    let Err(Error::Sys(overdrive_sys::Error::Callback { source, .. })) = failing("error") else {
        panic!("an error of a callback");
    };
    assert_eq!(source.downcast_ref(), Some(&NoWeights { layer: 5 }));
}

#[test]
fn a_panic_in_backward_resumes_in_the_caller_and_leaves_the_engine_usable() {
    let payload = catch_unwind(AssertUnwindSafe(|| failing("panic"))).unwrap_err();
    assert_eq!(overdrive_core::panic_text(&*payload), "layer 6 is on fire");
    assert_eq!(failing("none").unwrap(), Tensor::ones([2], F64));
}

#[test]
fn a_failing_backward_that_tch_started_is_an_error_with_its_message() {
    let x = leaf(&[2]);
    let y = apply(Failing { how: "panic" }, &[&x]).unwrap().remove(0);
    let error = y.sum(None).f_backward().unwrap_err().to_string();
    assert!(error.contains("panicked: layer 6 is on fire"), "{error}");
}

#[test]
fn a_wrong_number_or_shape_of_gradients_is_an_error() {
    let count = failing("count").unwrap_err().to_string();
    assert!(
        count.contains("returned 0 gradients for 1 inputs"),
        "{count}"
    );
    let shape = failing("shape").unwrap_err().to_string();
    assert!(
        shape.contains("Failing") && shape.contains("invalid gradient"),
        "{shape}"
    );
}

/// Knows what was asked of it, and when it is freed.
struct Counting {
    asked: Arc<AtomicUsize>,
    alive: Arc<()>,
}

impl Function for Counting {
    const NAME: &'static str = "Counting";

    fn forward(
        &mut self,
        context: &mut ForwardContext<'_>,
        inputs: &[&Tensor],
    ) -> FunctionResult<Vec<Tensor>> {
        assert!(context.needs_input_grad(0) && !context.needs_input_grad(1));
        assert_eq!(Arc::strong_count(&self.alive), 2);
        Ok(vec![inputs[0].f_add(inputs[1])?])
    }

    fn backward(
        &self,
        context: &BackwardContext,
        gradients: &[Option<Tensor>],
    ) -> FunctionResult<Vec<Option<Tensor>>> {
        let asked =
            usize::from(context.needs_input_grad(0)) + 2 * usize::from(context.needs_input_grad(1));
        self.asked.store(asked, Ordering::Relaxed);
        Ok(vec![gradients[0].as_ref().map(Tensor::shallow_clone), None])
    }
}

#[test]
fn a_function_knows_which_gradients_are_needed_and_is_freed_with_its_graph() {
    let (asked, alive) = (Arc::new(AtomicUsize::new(0)), Arc::new(()));
    let function = Counting {
        asked: Arc::clone(&asked),
        alive: Arc::clone(&alive),
    };
    let x = leaf(&[2]);
    let y = apply(function, &[&x, &Tensor::ones([2], F64)])
        .unwrap()
        .remove(0);
    backward(&[&y.sum(None)], &BackwardOptions::default()).unwrap();
    assert_eq!(asked.load(Ordering::Relaxed), 1);
    assert_eq!(Arc::strong_count(&alive), 2);
    drop(y);
    assert_eq!(Arc::strong_count(&alive), 1);
}

#[test]
fn a_chain_of_a_hundred_thousand_functions_is_freed_without_deep_recursion() {
    let x = leaf(&[1]);
    let mut y = x.shallow_clone();
    for _ in 0..100_000 {
        y = apply(Failing { how: "none" }, &[&y]).unwrap().remove(0);
    }
    drop(y);
    assert!(!x.grad().defined());
}
