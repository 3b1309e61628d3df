//! Comparisons find results that are wrong.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::Result;
use overdrive_gpu_check::context::Context;
use overdrive_gpu_check::finding::{Check, Outcome};
use overdrive_gpu_check::line::Line;
use overdrive_gpu_check::parity::{Run, distance, leaf};
use tch::{Device, Kind, Tensor};

/// Runs a comparison of an operation of two matrices in f32 and bf16.
fn checks(operation: impl Fn(&Run, &[Tensor]) -> Result<Vec<Tensor>>) -> Vec<Check> {
    let found = Rc::new(RefCell::new(Vec::new()));
    let sink = Rc::clone(&found);
    let deadline = Instant::now() + Duration::from_secs(600);
    let mut context = Context::new(Device::Cpu, 0, deadline, move |line| {
        if let Line::Done { check, .. } = line {
            sink.borrow_mut().push(check.clone());
        }
    });
    let inputs = [leaf(&[9, 20]), leaf(&[20, 7])];
    let kinds = [Kind::Float, Kind::BFloat16];
    context
        .parity("a product", &kinds, 1.0, &inputs, operation)
        .unwrap();
    drop(context);
    found.take()
}

fn product(x: &[Tensor]) -> Result<Tensor> {
    Ok(x[0].f_matmul(&x[1])?)
}

fn outcomes(checks: &[Check]) -> Vec<Outcome> {
    checks.iter().map(|check| check.outcome).collect()
}

#[test]
fn an_operation_that_is_right_passes_with_its_error() {
    let checks = checks(|_, x| Ok(vec![product(x)?]));
    assert_eq!(outcomes(&checks), [Outcome::Passed; 2], "{checks:?}");
    let names: Vec<&str> = checks[1].figures.iter().map(|f| f.name.as_str()).collect();
    assert_eq!(names, ["output error", "gradient error", "tolerance"]);
    // bf16 rounds: an error of 0 would mean that nothing was compared.
    let error = checks[1].figures[0].value.unwrap();
    assert!(error > 1e-5 && error < 1e-2, "{error}");
}

#[test]
fn a_result_of_the_device_that_is_wrong_by_a_twentieth_fails() {
    let checks = checks(|run, x| {
        let factor = if run.is_reference { 1.0 } else { 1.05 };
        Ok(vec![product(x)? * factor])
    });
    assert_eq!(outcomes(&checks), [Outcome::Failed; 2], "{checks:?}");
    let error = checks[0].figures[0].value.unwrap();
    assert!((error - 0.05).abs() < 1e-3, "{error}");
}

#[test]
fn a_gradient_that_is_wrong_fails_though_the_output_is_right() {
    let checks = checks(|run, x| {
        let y = product(x)?;
        // The value of y with half of its gradient.
        let half = (&y + y.f_detach()?) / 2;
        Ok(vec![if run.is_reference { y } else { half }])
    });
    assert_eq!(outcomes(&checks), [Outcome::Failed; 2], "{checks:?}");
    let [output, gradient] = [0, 1].map(|index| checks[0].figures[index].value.unwrap());
    assert!(
        output < 1e-5 && (gradient - 0.5).abs() < 1e-3,
        "{output} {gradient}"
    );
}

#[test]
fn a_nan_and_another_shape_fail() {
    let nan = checks(|run, x| {
        let factor = if run.is_reference { 1.0 } else { f64::NAN };
        Ok(vec![product(x)? * factor])
    });
    assert_eq!(outcomes(&nan), [Outcome::Failed; 2], "{nan:?}");
    assert_eq!(nan[0].figures[0].value, None);
    let shape = checks(|run, x| {
        let y = product(x)?;
        Ok(vec![if run.is_reference {
            y
        } else {
            y.f_narrow(0, 0, 8)?
        }])
    });
    assert_eq!(outcomes(&shape), [Outcome::Failed; 2], "{shape:?}");
}

#[test]
fn a_distance_is_relative_and_equal_infinities_are_equal() {
    let of = |values: &[f64]| Tensor::from_slice(values);
    let far = distance(&of(&[3.0, 4.5]), &of(&[3.0, 4.0])).unwrap();
    assert!((far - 0.1).abs() < 1e-12, "{far}");
    let infinite = f64::NEG_INFINITY;
    let far = distance(&of(&[1.0, infinite]), &of(&[1.0, infinite])).unwrap();
    assert_eq!(far, 0.0);
    let far = distance(&of(&[1.0, 2.0]), &of(&[1.0, infinite])).unwrap();
    assert!(!far.is_finite(), "{far}");
    assert!(distance(&of(&[1.0]), &of(&[1.0, 2.0])).is_err());
}
