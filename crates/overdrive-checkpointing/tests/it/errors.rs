//! Errors of recomputations, and their way through backward.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use overdrive_autograd::{BackwardOptions, backward};
use overdrive_checkpointing::{
    CheckpointOptions, DeterminismCheck, Error, RegionResult, SavePolicy, checkpoint_with,
};
use tch::{Device, Kind, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

/// Returns a closure that runs `first` the first time, and `later` afterwards.
fn changing(
    first: fn(&Tensor) -> RegionResult<Tensor>,
    later: fn(&Tensor) -> RegionResult<Tensor>,
) -> impl Fn(&[Tensor]) -> RegionResult<Tensor> + Send + 'static {
    let runs = AtomicUsize::new(0);
    move |inputs| match runs.fetch_add(1, Ordering::Relaxed) {
        0 => first(&inputs[0]),
        _ => later(&inputs[0]),
    }
}

fn leaf() -> Tensor {
    Tensor::ones([2, 3], F32).set_requires_grad(true)
}

/// Returns the error of a backward pass over the checkpointed closure: tch's message, and this crate's error.
fn error_of(
    options: &CheckpointOptions,
    first: fn(&Tensor) -> RegionResult<Tensor>,
    later: fn(&Tensor) -> RegionResult<Tensor>,
) -> (String, Error) {
    let run = || checkpoint_with(&[&leaf()], options, changing(first, later)).unwrap();
    let message = run().sum(Kind::Float).f_backward().unwrap_err().to_string();
    let loss = run().sum(Kind::Float);
    let error = backward(&[&loss], &BackwardOptions::default()).unwrap_err();
    let overdrive_autograd::Error::Sys(overdrive_sys::Error::Callback { source, .. }) = error
    else {
        panic!("{error:?}");
    };
    (message, *source.downcast::<Error>().unwrap())
}

#[test]
fn an_error_of_the_recomputation_is_the_error_of_backward() {
    let _generator = crate::generator();
    let (message, error) = error_of(
        &CheckpointOptions::default(),
        |x| Ok(x.f_exp()?),
        |_| Err("the weights went away".into()),
    );
    assert!(message.contains("the weights went away"), "{message}");
    assert!(matches!(error, Error::Recomputation { .. }), "{error:?}");
    assert_eq!(
        error.to_string(),
        "the recomputation of a checkpoint failed: the weights went away"
    );
}

#[test]
fn a_panic_of_the_recomputation_is_an_error_of_backward_with_its_text() {
    let _generator = crate::generator();
    let (message, error) = error_of(
        &CheckpointOptions::default(),
        |x| Ok(x.f_exp()?),
        |_| panic!("index 7 of {}", 3),
    );
    assert!(message.contains("index 7 of 3"), "{message}");
    assert!(matches!(error, Error::Panic { message } if message == "index 7 of 3"));
}

#[test]
fn a_panic_of_the_first_pass_is_not_caught_and_leaves_no_hooks() {
    let _generator = crate::generator();
    let x = leaf();
    let payload = catch_unwind(AssertUnwindSafe(|| {
        let _ = checkpoint_with(&[&x], &CheckpointOptions::default(), |inputs| {
            let _ = inputs[0].f_exp()?;
            if inputs.len() == 1 {
                panic!("first pass");
            }
            Ok(())
        });
    }))
    .unwrap_err();
    assert_eq!(*payload.downcast::<&str>().unwrap(), "first pass");
    // No hooks are left: this operator saves its result without them.
    x.exp().sum(Kind::Float).backward();
    assert_eq!(x.grad(), x.exp().detach());
}

#[test]
fn an_error_of_the_first_pass_is_returned_unchanged() {
    let _generator = crate::generator();
    let error = checkpoint_with(
        &[&leaf()],
        &CheckpointOptions::default(),
        |_| -> RegionResult<()> { Err("no such layer".into()) },
    )
    .unwrap_err();
    assert_eq!(error.to_string(), "no such layer");
}

#[test]
fn another_shape_is_an_error_that_names_the_operator() {
    let _generator = crate::generator();
    let (message, error) = error_of(
        &CheckpointOptions::default(),
        |x| Ok(x.f_sin()?.f_exp()?),
        |x| Ok(x.f_sin()?.f_narrow(1, 0, 2)?.f_exp()?),
    );
    assert!(message.contains("saved by aten::exp"), "{message}");
    assert!(
        matches!(&error, Error::Mismatch { index: 1, first, now, .. }
            if first == "[2, 3] Float on Cpu" && now == "[2, 2] Float on Cpu"),
        "{error}"
    );
}

#[test]
fn another_dtype_is_an_error_that_names_the_operator() {
    let _generator = crate::generator();
    let (_, error) = error_of(
        &CheckpointOptions::default(),
        |x| Ok(x.f_exp()?),
        |x| Ok(x.f_to_kind(Kind::Double)?.f_exp()?),
    );
    assert!(
        error.to_string().contains("now [2, 3] Double on Cpu"),
        "{error}"
    );
    assert!(error.to_string().contains("saved by aten::exp"), "{error}");
}

#[test]
fn fewer_or_more_saved_tensors_are_an_error() {
    let _generator = crate::generator();
    let all = CheckpointOptions {
        early_stop: false,
        ..CheckpointOptions::default()
    };
    let (_, error) = error_of(&all, |x| Ok(x.f_exp()?.f_sin()?), |x| Ok(x.f_exp()?));
    assert!(
        matches!(&error, Error::Count { first: 2, now, .. } if now == "1"),
        "{error}"
    );
    let (_, error) = error_of(&all, |x| Ok(x.f_exp()?), |x| Ok(x.f_exp()?.f_sin()?));
    assert!(
        error
            .to_string()
            .contains("saved more than 1 tensors, the last by aten::sin"),
        "{error}"
    );
    // An early stop comes before the extra tensor is saved.
    let x = leaf();
    let y = checkpoint_with(
        &[&x],
        &CheckpointOptions::default(),
        changing(|x| Ok(x.f_exp()?), |x| Ok(x.f_exp()?.f_sin()?)),
    )
    .unwrap();
    y.sum(Kind::Float).f_backward().unwrap();
}

#[test]
fn without_the_check_backward_runs_with_the_other_shape() {
    let _generator = crate::generator();
    let options = CheckpointOptions {
        determinism_check: DeterminismCheck::None,
        ..CheckpointOptions::default()
    };
    let x = leaf();
    let region = changing(|x| Ok(x.f_exp()?), |x| Ok(x.f_mul_scalar(2.0)?.f_exp()?));
    let y = checkpoint_with(&[&x], &options, region).unwrap();
    y.sum(Kind::Float).f_backward().unwrap();
    assert_eq!(x.grad(), (&x * 2.0).exp().detach());
}

#[test]
fn debug_lists_the_operators_of_both_passes() {
    let _generator = crate::generator();
    let options = CheckpointOptions {
        debug: true,
        ..CheckpointOptions::default()
    };
    let (_, error) = error_of(
        &options,
        |x| Ok(x.f_cos()?.f_exp()?),
        |x| Ok(x.f_cos()?.f_to_kind(Kind::Double)?.f_exp()?),
    );
    let text = error.to_string();
    assert!(
        text.contains("aten::cos -> [2, 3] | aten::cos -> [2, 3]\n"),
        "{text}"
    );
    let marked = "aten::exp -> [2, 3] | aten::_to_copy -> [2, 3]  <- the first difference";
    assert!(text.contains(marked), "{text}");
}

#[test]
fn a_saved_tensor_that_the_closure_changes_in_place_is_an_error() {
    let _generator = crate::generator();
    let change = |x: &Tensor| {
        let y = x.f_exp()?;
        let mut shared = y.f_detach()?;
        let _ = shared.f_zero_()?;
        Ok(y.f_mul_scalar(2.0)?.f_sin()?)
    };
    let (message, error) = error_of(&CheckpointOptions::default(), change, change);
    assert!(message.contains("changed in place"), "{message}");
    assert!(
        matches!(&error, Error::ChangedInPlace { shape } if *shape == [2, 3]),
        "{error}"
    );
}

#[test]
fn an_input_changed_in_place_after_the_first_pass_is_an_error() {
    let _generator = crate::generator();
    let x = leaf();
    let mut hidden = &x * 1.0;
    let y = checkpoint_with(&[&hidden], &CheckpointOptions::default(), |inputs| {
        Ok(inputs[0].f_exp()?)
    })
    .unwrap();
    let _ = hidden.f_add_scalar_(1.0).unwrap();
    let error = y.sum(Kind::Float).f_backward().unwrap_err().to_string();
    assert!(
        error.contains("modified by an inplace operation"),
        "{error}"
    );
}

#[test]
fn a_kept_operator_that_is_called_more_often_is_an_error_that_names_it() {
    let _generator = crate::generator();
    let options = CheckpointOptions {
        early_stop: false,
        ..CheckpointOptions::keeping(SavePolicy::Operators(vec!["aten::cos".to_owned()]))
    };
    let (_, error) = error_of(
        &options,
        |x| Ok(x.f_cos()?.f_exp()?),
        |x| Ok(x.f_cos()?.f_cos()?.f_exp()?),
    );
    let text = error.to_string();
    assert!(
        text.contains("called aten::cos 2 times, the first pass 1 times"),
        "{text}"
    );
}

#[test]
fn the_name_of_an_operator_that_no_call_can_have_is_refused() {
    let x = leaf();
    for name in ["mm", "aten::mm.default", "aten::", "::mm"] {
        let options = CheckpointOptions::keeping(SavePolicy::Operators(vec![name.to_owned()]));
        let error = checkpoint_with(&[&x], &options, |inputs| Ok(inputs[0].f_exp()?)).unwrap_err();
        let start = format!("`policy.operators` is a list with `{name}`; it must be");
        assert!(error.to_string().starts_with(&start), "{error}");
    }
}

/// Returns a closure that counts the runs that reach its end.
fn counting(
    ends: &Arc<AtomicUsize>,
) -> impl Fn(&[Tensor]) -> RegionResult<Tensor> + Send + 'static {
    let ends = Arc::clone(ends);
    move |inputs| {
        // Panicking calls, as tch's modules make them.
        let y = inputs[0].exp().sin() + 1.0;
        ends.fetch_add(1, Ordering::Relaxed);
        Ok(y)
    }
}

#[test]
fn an_early_stop_ends_the_recomputation_at_the_last_needed_tensor() {
    let _generator = crate::generator();
    for (early_stop, expected) in [(true, 1), (false, 2)] {
        let x = leaf();
        let ends = Arc::new(AtomicUsize::new(0));
        let options = CheckpointOptions {
            early_stop,
            ..CheckpointOptions::default()
        };
        let y = checkpoint_with(&[&x], &options, counting(&ends)).unwrap();
        y.sum(Kind::Float).backward();
        assert_eq!(ends.load(Ordering::Relaxed), expected);
        assert_eq!(x.grad(), (x.exp().cos() * x.exp()).detach());
    }
}

#[test]
fn a_closure_is_dropped_when_backward_is_done_with_it() {
    let _generator = crate::generator();
    let x = leaf();
    let ends = Arc::new(AtomicUsize::new(0));
    let y = checkpoint_with(&[&x], &CheckpointOptions::default(), counting(&ends)).unwrap();
    assert_eq!(Arc::strong_count(&ends), 2);
    let loss = y.sum(Kind::Float);
    loss.backward();
    assert_eq!(
        Arc::strong_count(&ends),
        1,
        "the graph still holds it, though nothing was retained"
    );
    let y = checkpoint_with(&[&x], &CheckpointOptions::default(), counting(&ends)).unwrap();
    drop(y);
    assert_eq!(Arc::strong_count(&ends), 1);
}
