//! `grad` and `backward` with their options, hooks, guards, and the errors that gradcheck must find.

use std::panic::catch_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use overdrive_autograd::{
    BackwardOptions, EnableGradGuard, Error, GradOptions, GradcheckOptions, InferenceModeGuard,
    NoGradGuard, backward, grad, gradcheck, is_grad_enabled, is_inference,
    is_inference_mode_enabled, register_hook, register_post_accumulate_grad_hook,
};
use tch::Tensor;

fn leaf(values: &[f64]) -> Tensor {
    Tensor::from_slice(values).set_requires_grad(true)
}

#[test]
fn grad_returns_gradients_without_accumulating_them() {
    let (x, unused) = (leaf(&[1.0, 2.0]), leaf(&[1.0]));
    let y = x.square().sum(None);
    let keep = GradOptions {
        retain_graph: Some(true),
        ..GradOptions::default()
    };
    let g = grad(&[&y], &[&x], &keep).unwrap().remove(0).unwrap();
    assert_eq!(g, Tensor::from_slice(&[2.0, 4.0]));
    assert!(!x.grad().defined());

    let error = grad(&[&y], &[&x, &unused], &keep).unwrap_err().to_string();
    assert!(error.contains("not have been used in the graph"), "{error}");
    let allowed = GradOptions {
        allow_unused: true,
        ..keep
    };
    assert!(grad(&[&y], &[&x, &unused], &allowed).unwrap()[1].is_none());
    let zeros = GradOptions {
        materialize_grads: true,
        ..keep
    };
    let found = grad(&[&y], &[&x, &unused], &zeros).unwrap();
    assert_eq!(found[1].as_ref().unwrap(), &Tensor::from_slice(&[0.0]));
}

#[test]
fn create_graph_gives_third_derivatives() {
    let x = leaf(&[2.0]);
    let graph = GradOptions {
        create_graph: true,
        ..GradOptions::default()
    };
    let mut y = x.pow_tensor_scalar(4);
    for expected in [32.0, 48.0, 48.0] {
        y = grad(&[&y], &[&x], &graph).unwrap().remove(0).unwrap();
        assert_eq!(y.double_value(&[0]), expected);
    }
}

#[test]
fn backward_takes_gradients_of_outputs_and_a_choice_of_inputs() {
    let (x, w) = (leaf(&[1.0, 2.0]), leaf(&[3.0, 4.0]));
    let y = &x * &w;
    let error = backward(&[&y], &BackwardOptions::default())
        .unwrap_err()
        .to_string();
    assert!(error.contains("scalar outputs"), "{error}");
    let seed = Tensor::from_slice(&[1.0, 10.0]);
    let options = BackwardOptions {
        gradients: &[Some(&seed)],
        inputs: &[&w],
        ..BackwardOptions::default()
    };
    backward(&[&y], &options).unwrap();
    assert_eq!(w.grad(), Tensor::from_slice(&[1.0, 20.0]));
    assert!(!x.grad().defined());
}

#[test]
fn hooks_change_gradients_in_the_order_of_their_registration() {
    let x = leaf(&[1.0]);
    let doubled = register_hook(&x, |g| Ok(Some(g * 2.0))).unwrap();
    let plus_one = register_hook(&x, |g| Ok(Some(g + 1.0))).unwrap();
    (&x * 5.0).sum(None).backward();
    assert_eq!(x.grad().double_value(&[0]), 11.0);
    doubled.remove().unwrap();
    drop(plus_one); // a dropped handle leaves its hook
    let _ = x.grad().zero_();
    (&x * 5.0).sum(None).backward();
    assert_eq!(x.grad().double_value(&[0]), 6.0);
}

#[test]
fn a_hook_on_a_tensor_inside_the_graph_sees_its_gradient() {
    let x = leaf(&[2.0]);
    let y = x.square();
    let seen = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&seen);
    register_hook(&y, move |g| {
        assert_eq!(g.double_value(&[0]), 3.0);
        counter.fetch_add(1, Ordering::Relaxed);
        Ok(None)
    })
    .unwrap();
    (&y * 3.0).sum(None).backward();
    assert_eq!(seen.load(Ordering::Relaxed), 1);
    assert_eq!(x.grad().double_value(&[0]), 12.0);
}

#[test]
fn a_hook_that_fails_is_an_error_of_backward() {
    let x = leaf(&[1.0]);
    register_hook(&x, |_| Err("the gradient is too large".into())).unwrap();
    let error = backward(&[&x.sum(None)], &BackwardOptions::default()).unwrap_err();
    assert!(
        error.to_string().contains("the gradient is too large"),
        "{error}"
    );
}

#[test]
fn a_hook_needs_a_tensor_with_a_gradient() {
    let plain = Tensor::from_slice(&[1.0]);
    let error = register_hook(&plain, |_| Ok(None)).unwrap_err().to_string();
    assert!(error.contains("requires grad"), "{error}");
    let inner = leaf(&[1.0]) * 2.0;
    let error = register_post_accumulate_grad_hook(&inner, |_| Ok(()))
        .unwrap_err()
        .to_string();
    assert!(error.contains("needs a leaf"), "{error}");
}

#[test]
fn post_accumulate_hooks_see_the_finished_gradient_and_may_free_it() {
    let x = leaf(&[1.0, 1.0]);
    let first = register_post_accumulate_grad_hook(&x, |leaf| {
        assert_eq!(leaf.grad(), Tensor::from_slice(&[7.0, 7.0]));
        let mut values = leaf.detach();
        let _ = values.f_sub_(&(leaf.grad() * 0.1))?;
        Ok(())
    })
    .unwrap();
    register_post_accumulate_grad_hook(&x, |leaf| Ok(overdrive_sys::grad::clear(leaf)?)).unwrap();
    // Two paths to the leaf: the hooks run once, after both.
    (&x * 3.0 + &x * 4.0).sum(None).backward();
    assert!((x.double_value(&[0]) - 0.3).abs() < 1e-12);
    assert!(!x.grad().defined());
    first.remove().unwrap();
    x.sum(None).backward();
    assert!((x.double_value(&[0]) - 0.3).abs() < 1e-12);
}

#[test]
fn guards_nest_and_end_with_a_panic() {
    {
        let _no = NoGradGuard::new();
        {
            let _yes = EnableGradGuard::new();
            assert!(is_grad_enabled());
        }
        assert!(!is_grad_enabled());
    }
    let _ = catch_unwind(|| {
        let _no = NoGradGuard::new();
        panic!("inside");
    });
    assert!(is_grad_enabled());
}

#[test]
fn tensors_of_inference_mode_cannot_be_saved_for_backward() {
    let made = {
        let _inference = InferenceModeGuard::new().unwrap();
        assert!(is_inference_mode_enabled());
        {
            let _normal = InferenceModeGuard::normal_mode().unwrap();
            assert!(!is_inference(&Tensor::from_slice(&[1.0])));
        }
        Tensor::from_slice(&[1.0])
    };
    assert!(!is_inference_mode_enabled() && is_inference(&made));
    let error = leaf(&[1.0]).f_mul(&made).unwrap_err().to_string();
    assert!(
        error.contains("Inference tensors cannot be saved"),
        "{error}"
    );
}

#[test]
fn gradcheck_finds_a_wrong_gradient_and_names_the_element() {
    let x = leaf(&[0.5, 0.7]);
    // detach() hides one path: backward sees x, the values are x².
    let wrong = |inputs: &[Tensor]| Ok(vec![&inputs[0] * inputs[0].detach()]);
    let error = gradcheck(wrong, &[x], &GradcheckOptions::default()).unwrap_err();
    let Error::GradientMismatch {
        output: 0,
        input: 0,
        row: 0,
        column: 0,
        analytical,
        numerical,
        ..
    } = error
    else {
        panic!("{error}");
    };
    assert!((analytical - 0.5).abs() < 1e-6 && (numerical - 1.0).abs() < 1e-6);
}

#[test]
fn gradcheck_without_something_to_check_is_an_error() {
    let single = Tensor::from_slice(&[0.5f32]).set_requires_grad(true);
    let same = |inputs: &[Tensor]| Ok(vec![inputs[0].shallow_clone()]);
    let error = gradcheck(same, &[single], &GradcheckOptions::default()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`inputs[0]` is Float; it must be Double: finite differences need float64"
    );
    let plain = Tensor::from_slice(&[0.5]);
    let error = gradcheck(same, &[plain], &GradcheckOptions::default()).unwrap_err();
    assert!(error.to_string().contains("set_requires_grad"), "{error}");
}
