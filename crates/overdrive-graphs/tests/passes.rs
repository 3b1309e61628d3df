//! Captured passes: the gradients of launched ones on any device, and nothing left of a capture. A target of its own: while
//! a graph is captured, no other test may use the GPU or draw random numbers.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::{Mutex, MutexGuard, PoisonError};

use overdrive_graphs::{BackwardGraphs, Error, MicroBatchKey};
use tch::{Device, Kind, Tensor};

/// Held by each test: one draws random numbers, another compares random states.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The parameters of a model.
fn leaves(device: Device) -> Vec<Tensor> {
    let leaf = |size: &[i64], from: f64| {
        let numbers = Tensor::arange(size.iter().product::<i64>(), (Kind::Float, Device::Cpu));
        let numbers: Tensor = ((numbers + from) * 0.37).sin();
        numbers.view(size).to_device(device).set_requires_grad(true)
    };
    vec![leaf(&[4, 3], 0.0), leaf(&[3], 5.0), leaf(&[2], 9.0)]
}

/// A loss with dropout that does not depend on the last of the parameters.
fn dropped_loss(parameters: &[Tensor], x: &Tensor) -> Result<Tensor, tch::TchError> {
    let y = x.f_matmul(&parameters[0])?.f_add(&parameters[1])?;
    y.f_dropout(0.5, true)?.f_square()?.f_sum(Kind::Float)
}

/// Accumulates three passes with the factors 0.5, 0.25 and 1, drops the gradients, and runs a fourth. Returns the losses
/// and the gradients of both steps; those of graphs if `captured`.
fn accumulated(device: Device, captured: bool) -> (Vec<Tensor>, Vec<Tensor>) {
    let parameters = leaves(device);
    let handles = || parameters.iter().map(Tensor::shallow_clone).collect();
    let mut graphs = BackwardGraphs::new(handles()).unwrap();
    overdrive_sys::random::seed(device, 7).unwrap();
    let (mut losses, mut gradients) = (Vec::new(), Vec::new());
    for (number, factor) in [0.5, 0.25, 1.0, 0.125].into_iter().enumerate() {
        // The third has another shape.
        let rows = if number == 2 { 5 } else { 2 };
        let x = Tensor::arange(rows * 4, (Kind::Float, Device::Cpu)).view([rows, 4]);
        let x = (x + number as f64).cos().to_device(device);
        let mut loss = |x: &Tensor| dropped_loss(&parameters, x);
        // The first is run without a graph, so that the next one finds gradients that are not in a buffer.
        if captured && number > 0 {
            let inputs = [x.shallow_clone()];
            let key = MicroBatchKey::new::<Tensor>(&inputs, &[]);
            if !graphs.contains(&key) {
                graphs.capture(key.clone(), x, &inputs, &mut loss).unwrap();
            }
            losses.push(graphs.replay(&key, &inputs, factor, loss).unwrap());
        } else {
            let found = loss(&x).unwrap();
            (&found * factor).backward();
            losses.push(found.detach());
        }
        if number >= 2 {
            let defined = parameters.iter().map(Tensor::grad);
            gradients.extend(
                defined
                    .filter(Tensor::defined)
                    .map(|gradient| gradient.copy()),
            );
            let clear = |parameter: &Tensor| overdrive_sys::grad::clear(parameter).unwrap();
            parameters.iter().for_each(clear);
        }
    }
    assert_eq!(graphs.len(), if captured { 2 } else { 0 });
    (losses, gradients)
}

#[test]
fn replayed_passes_add_the_gradients_of_launched_ones() {
    let _alone = alone();
    for device in [Device::Cpu, Device::cuda_if_available()] {
        let (losses, gradients) = accumulated(device, false);
        let (replayed, replayed_gradients) = accumulated(device, true);
        // Two of the three parameters have gradients, in each of the two steps.
        assert_eq!((gradients.len(), replayed_gradients.len()), (4, 4));
        let (ours, theirs) = (
            replayed.iter().chain(&replayed_gradients),
            losses.iter().chain(&gradients),
        );
        for (ours, theirs) in ours.zip(theirs) {
            // The same kernels on the same numbers, dropout included.
            assert_eq!(ours, theirs, "{device:?}");
        }
    }
}

#[test]
fn a_failed_capture_returns_the_batch_and_changes_nothing() {
    let _alone = alone();
    let parameters = leaves(Device::Cpu);
    parameters[0].sum(Kind::Float).backward();
    let handles = parameters.iter().map(Tensor::shallow_clone).collect();
    let mut graphs = BackwardGraphs::new(handles).unwrap();
    let state = || overdrive_sys::random::state(Device::Cpu).unwrap();
    let before = state();
    let batch = || Tensor::ones([2, 4], (Kind::Float, Device::Cpu));
    let key = MicroBatchKey::new::<Tensor>(&[batch()], &[]);
    let fails = |x: &Tensor| {
        dropped_loss(&parameters, x)?.f_backward()?;
        x.f_view([3]) // 8 elements
    };
    let (error, returned) = graphs
        .capture(key.clone(), batch(), &[batch()], fails)
        .unwrap_err();
    assert!(matches!(error, Error::Work { .. }), "{error:?}");
    assert_eq!(returned, batch());
    assert_eq!(state(), before);
    assert_eq!(
        parameters[0].grad(),
        Tensor::ones([4, 3], (Kind::Float, Device::Cpu))
    );
    assert!(!parameters[1].grad().defined() && !graphs.contains(&key));

    let whole = |x: &Tensor| x.f_matmul(&parameters[0]);
    let (error, _) = graphs
        .capture(key.clone(), batch(), &[batch()], whole)
        .unwrap_err();
    let expected =
        "`loss` has shape [2, 3]; it must be one element: the sum over the tokens (Reduction::Sum)";
    assert_eq!(error.to_string(), expected);
    let error = graphs.replay(&key, &[batch()], 1.0, whole).unwrap_err();
    assert!(
        error.to_string().contains("capture the pass before"),
        "{error}"
    );
    assert!(BackwardGraphs::new(Vec::new()).is_err());

    // A row would be broadcast.
    let sum = |x: &Tensor| dropped_loss(&parameters, x);
    graphs
        .capture(key.clone(), batch(), &[batch()], sum)
        .unwrap();
    let row = batch().narrow(0, 0, 1);
    let error = graphs.replay(&key, &[row], 1.0, sum).unwrap_err();
    assert!(error.to_string().contains("those of the key"), "{error}");
}

#[test]
fn passes_are_captured_anew_after_a_parameter_has_moved() {
    let _alone = alone();
    let mut parameters = leaves(Device::Cpu);
    let handles = parameters.iter().map(Tensor::shallow_clone).collect();
    let mut graphs = BackwardGraphs::new(handles).unwrap();
    let batch = Tensor::ones([2, 4], (Kind::Float, Device::Cpu));
    let inputs = [batch.shallow_clone()];
    let key = MicroBatchKey::new::<Tensor>(&inputs, &[]);
    let loss = |x: &Tensor| {
        x.f_sum(Kind::Float)?
            .f_mul(&parameters[0].f_sum(Kind::Float)?)
    };
    graphs.capture(key.clone(), batch, &inputs, loss).unwrap();
    assert!(graphs.contains(&key));
    let other = MicroBatchKey::new::<Tensor>(&inputs, &[3]);
    assert!(!graphs.contains(&other), "another count of labels");
    let elsewhere = parameters[0].detach().copy();
    parameters[0].set_data(&elsewhere);
    assert!(!graphs.contains(&key));
    assert!(graphs.is_empty());
}
