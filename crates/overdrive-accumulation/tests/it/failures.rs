//! Windows that fail halfway.

use overdrive_accumulation::{
    AccumulationConfig, DeviceAccumulator, DeviceLoss, Error, GradientAccumulator, Window,
};
use overdrive_optim::{Optimizer, OptimizerId, Sgd, SgdConfig, decay_groups};
use overdrive_precision::{GradScaler, GradScalerConfig};
use tch::{Kind, Tensor};

use super::big_batch::{Batch, Model, no_clipping};

/// An optimizer whose next step may fail before it changes anything, and whose next `zero_grad` may fail too.
struct Flaky {
    inner: Sgd,
    fails_to_step: bool,
    fails_to_zero: bool,
}

impl Flaky {
    fn new(model: &Model) -> Self {
        let named = model.parameters().into_iter().enumerate();
        let named = named.map(|(number, tensor)| (number.to_string(), tensor));
        Self {
            inner: Sgd::new(decay_groups(named, 0.0), SgdConfig::default()).unwrap(),
            fails_to_step: false,
            fails_to_zero: false,
        }
    }
}

fn fail_once(fails: &mut bool) -> overdrive_optim::Result<()> {
    match std::mem::take(fails) {
        true => Err(tch::TchError::Torch("out of memory".to_owned()).into()),
        false => Ok(()),
    }
}

impl Optimizer for Flaky {
    fn id(&self) -> OptimizerId {
        self.inner.id()
    }
    fn parameters(&self) -> Vec<Tensor> {
        self.inner.parameters()
    }
    fn step(&mut self) -> overdrive_optim::Result<()> {
        fail_once(&mut self.fails_to_step)?;
        self.inner.step()
    }
    fn zero_grad(&mut self) -> overdrive_optim::Result<()> {
        fail_once(&mut self.fails_to_zero)?;
        self.inner.zero_grad()
    }
    fn learning_rates(&self) -> Vec<f64> {
        self.inner.learning_rates()
    }
    fn set_learning_rates(&mut self, rates: &[f64]) -> overdrive_optim::Result<()> {
        self.inner.set_learning_rates(rates)
    }
}

fn values(model: &Model) -> Vec<Vec<f32>> {
    let flat = |tensor: &Tensor| Vec::try_from(tensor.flatten(0, -1)).unwrap();
    model.parameters().iter().map(flat).collect()
}

fn accumulator(max_grad_norm: Option<f64>) -> GradientAccumulator {
    let config = AccumulationConfig {
        gradient_accumulation_steps: 1,
        max_grad_norm,
    };
    let scaler = GradScaler::new(GradScalerConfig::default()).unwrap();
    let accumulator = GradientAccumulator::new(config).unwrap();
    accumulator.with_scaler(Some(scaler))
}

fn window(
    accumulator: &mut GradientAccumulator,
    model: &Model,
    optimizer: &mut Flaky,
) -> Result<(), Error> {
    accumulator.open(Window::new([3]))?;
    accumulator.backward(&model.loss_sum(&Batch::new(0, 3, 0)))?;
    accumulator.step(optimizer).map(drop)
}

#[test]
fn the_window_after_an_abandoned_step_is_as_the_first_one() {
    for max_grad_norm in [None, Some(1e9)] {
        let model = Model::new();
        let mut optimizer = Flaky::new(&model);
        let mut fresh = accumulator(max_grad_norm);
        window(&mut fresh, &model, &mut optimizer).unwrap();
        let expected = values(&model);

        let model = Model::new();
        let start = values(&model);
        let mut optimizer = Flaky::new(&model);
        let mut accumulator = accumulator(max_grad_norm);
        optimizer.fails_to_step = true;
        let error = window(&mut accumulator, &model, &mut optimizer).unwrap_err();
        assert!(matches!(error, Error::Precision(_)), "{error}");
        accumulator.abandon(&mut optimizer).unwrap();
        assert_eq!(values(&model), start);
        window(&mut accumulator, &model, &mut optimizer).unwrap();
        assert_eq!(values(&model), expected);
    }
}

#[test]
fn a_failed_step_cannot_be_repeated_or_continued() {
    let model = Model::new();
    let loss = || model.loss_sum(&Batch::new(0, 3, 0));
    let mut optimizer = Flaky::new(&model);
    let mut accumulator = GradientAccumulator::new(no_clipping(1)).unwrap();
    accumulator.backward_counted(&loss(), 3).unwrap();
    // After the update: a repetition would apply it twice.
    optimizer.fails_to_zero = true;
    accumulator.step(&mut optimizer).unwrap_err();
    let updated = values(&model);
    let refused = [
        accumulator.step(&mut optimizer).map(drop),
        accumulator.open(Window::new([3])),
        accumulator.backward_counted(&loss(), 3),
    ];
    assert!(refused.iter().all(|r| matches!(r, Err(Error::Failed))));
    assert_eq!(values(&model), updated);

    // Also if abandoning fails at first.
    optimizer.fails_to_zero = true;
    accumulator.abandon(&mut optimizer).unwrap_err();
    assert!(matches!(
        accumulator.open(Window::new([3])),
        Err(Error::Failed)
    ));
    accumulator.abandon(&mut optimizer).unwrap();
    accumulator.backward_counted(&loss(), 3).unwrap();
    accumulator.step(&mut optimizer).unwrap();
}

#[test]
fn a_failed_backward_ends_its_window() {
    let model = Model::new();
    let mut optimizer = Flaky::new(&model);
    let mut accumulator = GradientAccumulator::new(no_clipping(2)).unwrap();
    let loss = model.loss_sum(&Batch::new(0, 3, 0));
    accumulator.backward_counted(&loss, 3).unwrap();
    // The graph is freed.
    accumulator.backward_counted(&loss, 3).unwrap_err();
    let error = accumulator.step(&mut optimizer).unwrap_err().to_string();
    assert!(
        error.contains("call abandon before the next window"),
        "{error}"
    );
    accumulator.abandon(&mut optimizer).unwrap();
    assert_eq!(accumulator.pending(), 0);
}

#[test]
fn counts_whose_sum_is_too_large_are_refused() {
    let model = Model::new();
    let mut accumulator = GradientAccumulator::new(no_clipping(2)).unwrap();
    let error = accumulator.open(Window::new([u64::MAX, 1])).unwrap_err();
    let expected = "`the sum of the counts` is larger; it must be at most 18446744073709551615";
    assert!(error.to_string().starts_with(expected), "{error}");

    let loss = || model.loss_sum(&Batch::new(0, 3, 0));
    accumulator.backward_counted(&loss(), u64::MAX).unwrap();
    let gradients = model.gradients();
    let error = accumulator.backward_counted(&loss(), 1).unwrap_err();
    assert!(error.to_string().starts_with(expected), "{error}");
    assert_eq!(model.gradients(), gradients);
}

#[test]
fn a_device_accumulator_abandons_losses_and_gradients() {
    let model = Model::new();
    let mut optimizer = Flaky::new(&model);
    let mut accumulator = DeviceAccumulator::new(no_clipping(1)).unwrap();
    let loss = DeviceLoss {
        sum: model.loss_sum(&Batch::new(0, 3, 0)),
        count: Tensor::from(3i64).to_kind(Kind::Float),
    };
    accumulator.backward(&loss).unwrap();
    accumulator.abandon(&mut optimizer).unwrap();
    assert!(model.parameters().iter().all(|p| !p.grad().defined()));
    assert!(matches!(
        accumulator.step(&mut optimizer),
        Err(Error::NothingAccumulated)
    ));
}
