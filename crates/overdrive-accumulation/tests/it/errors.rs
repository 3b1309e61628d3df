//! Calls in the wrong order or with arguments that do not fit.

use overdrive_accumulation::{AccumulationConfig, Error, GradientAccumulator, Window};
use overdrive_precision::{GradScaler, GradScalerConfig};
use tch::{Device, Kind, Tensor};

use super::big_batch::{Batch, Model, no_clipping};

#[test]
fn a_disabled_scaler_changes_nothing() {
    let config = GradScalerConfig {
        enabled: false,
        ..Default::default()
    };
    let gradients = [None, Some(GradScaler::new(config).unwrap())].map(|scaler| {
        let model = Model::new();
        let mut optimizer = model.adamw();
        let accumulator = GradientAccumulator::new(no_clipping(1)).unwrap();
        let mut accumulator = accumulator.with_scaler(scaler);
        let batch = Batch::new(0, 3, 0);
        accumulator.open(Window::new([3])).unwrap();
        accumulator.backward(&model.loss_sum(&batch)).unwrap();
        let gradients = model.gradients();
        assert!(accumulator.step(&mut optimizer).unwrap().stepped);
        gradients
    });
    assert_eq!(gradients[0], gradients[1]);
}

#[test]
fn the_default_clips_nothing() {
    assert_eq!(AccumulationConfig::default().max_grad_norm, None);
    assert_eq!(
        serde_json::from_str::<AccumulationConfig>("{}").unwrap(),
        AccumulationConfig::default()
    );
    let model = Model::new();
    let mut optimizer = model.adamw();
    let mut accumulator = GradientAccumulator::new(AccumulationConfig::default()).unwrap();
    let batch = Batch::new(0, 3, 0);
    accumulator
        .backward_counted(&(model.loss_sum(&batch) * 1e6), 3)
        .unwrap();
    assert!(
        accumulator
            .step(&mut optimizer)
            .unwrap()
            .grad_norm
            .is_none()
    );
}

#[test]
fn misuse_is_an_error_that_names_the_remedy() {
    let model = Model::new();
    let mut optimizer = model.adamw();
    let mut accumulator = GradientAccumulator::new(no_clipping(2)).unwrap();
    assert!(matches!(
        accumulator.step(&mut optimizer),
        Err(Error::NothingAccumulated)
    ));

    let batch = Batch::new(0, 3, 0);
    let per_token = Tensor::ones([3], (Kind::Float, Device::Cpu));
    let error = accumulator
        .backward_counted(&per_token, 3)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("`loss` has shape [3]; it must be one element: the sum"),
        "{error}"
    );
    let constant = tch::no_grad(|| model.loss_sum(&batch));
    assert!(matches!(
        accumulator.backward_counted(&constant, 3),
        Err(Error::NoGradient)
    ));

    let error = accumulator
        .backward(&model.loss_sum(&batch))
        .unwrap_err()
        .to_string();
    assert!(error.contains("call open before the first"), "{error}");

    accumulator.open(Window::new([3, 5])).unwrap();
    accumulator.backward(&model.loss_sum(&batch)).unwrap();
    let error = accumulator.open(Window::new([1])).unwrap_err().to_string();
    assert!(
        error.contains("has 1 micro-batches that were not stepped"),
        "{error}"
    );
    let error = accumulator
        .backward_counted(&model.loss_sum(&batch), 3)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("the open window has announced the counts"),
        "{error}"
    );
    let error = accumulator.step(&mut optimizer).unwrap_err().to_string();
    assert!(
        error.contains("announced 2 micro-batches, of which 1 have run"),
        "{error}"
    );
    accumulator.abandon(&mut optimizer).unwrap();
    assert!(model.parameters().iter().all(|p| !p.grad().defined()));

    accumulator.open(Window::new([3])).unwrap();
    accumulator.backward(&model.loss_sum(&batch)).unwrap();
    let error = accumulator
        .backward(&model.loss_sum(&batch))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("all 1 micro-batches that the window announced have run"),
        "{error}"
    );

    let error = GradientAccumulator::new(no_clipping(0))
        .unwrap_err()
        .to_string();
    assert_eq!(
        error,
        "`gradient_accumulation_steps` is 0; it must be at least 1"
    );
    let negative = AccumulationConfig {
        max_grad_norm: Some(-1.0),
        ..Default::default()
    };
    let error = GradientAccumulator::new(negative).unwrap_err().to_string();
    assert_eq!(
        error,
        "`max_grad_norm` is -1; it must be positive, or none to disable clipping"
    );
}
