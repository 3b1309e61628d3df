//! Accumulated micro-batches compared with one large batch.

use overdrive_accumulation::{
    AccumulationConfig, GradientAccumulator, GradientSync, Window, count_tokens,
};
use overdrive_optim::{
    AdamW, AdamWConfig, ClipOptions, Optimizer, TchOptimizer, clip_grad_norm, decay_groups,
};
use overdrive_precision::{GradScaler, GradScalerConfig};
use proptest::prelude::*;
use tch::nn::{self, Module, OptimizerConfig};
use tch::{Device, Kind, Reduction, Tensor};

pub(crate) const FEATURES: i64 = 6;
pub(crate) const CLASSES: i64 = 7;

/// Two layers and a cross entropy over targets of which some are ignored.
pub(crate) struct Model {
    store: nn::VarStore,
    layers: nn::Sequential,
    kind: Kind,
}

impl Model {
    pub(crate) fn new() -> Self {
        Self::of_kind(Kind::Float)
    }

    pub(crate) fn of_kind(kind: Kind) -> Self {
        let store = nn::VarStore::new(Device::Cpu);
        let root = store.root();
        let layers = nn::seq()
            .add(nn::linear(&root / "up", FEATURES, 16, Default::default()))
            .add_fn(|x| x.tanh())
            .add(nn::linear(&root / "down", 16, CLASSES, Default::default()));
        let mut model = Self {
            store,
            layers,
            kind,
        };
        if kind == Kind::Double {
            model.store.double();
        }
        // The same numbers every time, without touching the process-wide seed.
        for (index, mut parameter) in model.parameters().into_iter().enumerate() {
            let numel = parameter.numel() as i64;
            let values = Tensor::arange(numel, (Kind::Double, Device::Cpu));
            let values = ((values + index as f64 * 3.0) * 1.7)
                .sin()
                .view_as(&parameter)
                * 0.4;
            tch::no_grad(|| parameter.copy_(&values));
        }
        model
    }

    /// By name, so that two models agree.
    pub(crate) fn parameters(&self) -> Vec<Tensor> {
        let mut named: Vec<_> = self.store.variables().into_iter().collect();
        named.sort_by(|a, b| a.0.cmp(&b.0));
        named.into_iter().map(|(_, tensor)| tensor).collect()
    }

    pub(crate) fn loss_sum(&self, batch: &Batch) -> Tensor {
        let logits = self.layers.forward(&batch.inputs.to_kind(self.kind));
        logits.cross_entropy_loss::<Tensor>(&batch.labels, None, Reduction::Sum, -100, 0.0)
    }

    pub(crate) fn gradients(&self) -> Vec<Tensor> {
        self.parameters().iter().map(|p| p.grad().copy()).collect()
    }

    pub(crate) fn adamw(&self) -> AdamW {
        let config = AdamWConfig {
            learning_rate: 0.01,
            ..Default::default()
        };
        AdamW::new(decay_groups(self.store.variables(), 0.1), config).unwrap()
    }
}

pub(crate) struct Batch {
    inputs: Tensor,
    labels: Tensor,
}

impl Batch {
    /// `tokens` rows in the loss and `ignored` rows that are not, different for each `seed`.
    pub(crate) fn new(seed: usize, tokens: usize, ignored: usize) -> Self {
        let rows = (tokens + ignored) as i64;
        let inputs = Tensor::arange(rows * FEATURES, (Kind::Float, Device::Cpu));
        let inputs = ((inputs + seed as f64 * 11.0) * 0.73)
            .cos()
            .view([rows, FEATURES])
            * 2.0;
        let labels: Vec<i64> = (0..tokens + ignored)
            .map(|row| {
                if row < tokens {
                    ((row * 5 + seed * 3) % 7) as i64
                } else {
                    -100
                }
            })
            .collect();
        Self {
            inputs,
            labels: Tensor::from_slice(&labels),
        }
    }

    pub(crate) fn tokens(&self) -> u64 {
        count_tokens(&self.labels, -100).unwrap()
    }

    pub(crate) fn joined(batches: &[Batch]) -> Self {
        let join = |pick: fn(&Batch) -> &Tensor| {
            Tensor::cat(&batches.iter().map(pick).collect::<Vec<_>>(), 0)
        };
        Self {
            inputs: join(|b| &b.inputs),
            labels: join(|b| &b.labels),
        }
    }
}

pub(crate) fn no_clipping(steps: usize) -> AccumulationConfig {
    AccumulationConfig {
        gradient_accumulation_steps: steps,
        max_grad_norm: None,
    }
}

/// Gradients of the mean loss of one big batch.
pub(crate) fn big_batch_gradients(batches: &[Batch], kind: Kind) -> (Vec<Tensor>, f64) {
    let model = Model::of_kind(kind);
    let big = Batch::joined(batches);
    let loss = model.loss_sum(&big) / big.tokens() as f64;
    loss.backward();
    (model.gradients(), loss.double_value(&[]))
}

/// Largest difference relative to the largest value of all tensors.
pub(crate) fn difference(a: &[Tensor], b: &[Tensor]) -> f64 {
    assert_eq!(a.len(), b.len());
    let largest_of = |t: &Tensor| t.abs().max().double_value(&[]);
    let difference = a
        .iter()
        .zip(b)
        .map(|(a, b)| largest_of(&(a - b)))
        .fold(0.0, f64::max);
    difference / b.iter().map(largest_of).fold(0.0, f64::max)
}

/// Keeps the gradients that a step would apply.
pub(crate) struct Recorder {
    inner: TchOptimizer,
    pub(crate) seen: Vec<Tensor>,
    parameters: Vec<Tensor>,
}

impl Recorder {
    pub(crate) fn new(model: &Model) -> Self {
        let sgd = nn::Sgd::default().build(&model.store, 0.0).unwrap();
        Self {
            inner: TchOptimizer::new(sgd, 0.0).unwrap(),
            seen: Vec::new(),
            parameters: model.parameters(),
        }
    }
}

impl Optimizer for Recorder {
    fn id(&self) -> overdrive_optim::OptimizerId {
        self.inner.id()
    }
    fn parameters(&self) -> Vec<Tensor> {
        self.inner.parameters()
    }
    fn step(&mut self) -> overdrive_optim::Result<()> {
        self.seen = self.parameters.iter().map(|p| p.grad().copy()).collect();
        Ok(())
    }
    fn zero_grad(&mut self) -> overdrive_optim::Result<()> {
        self.inner.zero_grad()
    }
    fn learning_rates(&self) -> Vec<f64> {
        self.inner.learning_rates()
    }
    fn set_learning_rates(&mut self, rates: &[f64]) -> overdrive_optim::Result<()> {
        self.inner.set_learning_rates(rates)
    }
}

/// Runs backward of a micro-batch whose window was announced, or was not.
pub(crate) fn backward<S: GradientSync>(
    accumulator: &mut GradientAccumulator<S>,
    announced: bool,
    loss_sum: &Tensor,
    batch: &Batch,
) {
    match announced {
        true => accumulator.backward(loss_sum),
        false => accumulator.backward_counted(loss_sum, batch.tokens()),
    }
    .unwrap();
}

/// Gradients that the accumulator would step with, and its report of the loss.
pub(crate) fn accumulated(
    batches: &[Batch],
    announced: bool,
    steps: usize,
    kind: Kind,
) -> (Vec<Tensor>, f64) {
    let model = Model::of_kind(kind);
    let mut optimizer = Recorder::new(&model);
    let mut accumulator = GradientAccumulator::new(no_clipping(steps)).unwrap();
    if announced {
        accumulator
            .open(Window::new(batches.iter().map(Batch::tokens)))
            .unwrap();
    }
    for batch in batches {
        backward(&mut accumulator, announced, &model.loss_sum(batch), batch);
    }
    let step = accumulator.step(&mut optimizer).unwrap();
    assert!(step.stepped);
    assert_eq!(step.micro_batches, batches.len());
    assert_eq!(step.tokens, batches.iter().map(Batch::tokens).sum::<u64>());
    assert!(model.parameters().iter().all(|p| !p.grad().defined()));
    (std::mem::take(&mut optimizer.seen), step.loss().unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn gradients_equal_the_big_batch_for_any_split(
        // Tokens and ignored targets of each micro-batch; fewer micro-batches than
        // gradient_accumulation_steps is the short last window.
        sizes in prop::collection::vec((0usize..9, 0usize..4), 1..7),
        announced in any::<bool>(),
    ) {
        prop_assume!(sizes.iter().any(|(tokens, _)| *tokens > 0));
        prop_assume!(sizes.iter().all(|(tokens, ignored)| tokens + ignored > 0));
        let batches: Vec<Batch> = sizes
            .iter()
            .enumerate()
            .map(|(seed, &(tokens, ignored))| Batch::new(seed, tokens, ignored))
            .collect();
        // In float64 nothing but rounding in the last places is left; float32 is what models train
        // in, and rounds its sums in another order.
        for (kind, tolerance) in [(Kind::Double, 1e-13), (Kind::Float, 1e-6)] {
            let (expected, expected_loss) = big_batch_gradients(&batches, kind);
            let (gradients, loss) = accumulated(&batches, announced, 6, kind);
            let relative = difference(&gradients, &expected);
            prop_assert!(relative <= tolerance, "{kind:?}: relative difference {relative:e}");
            prop_assert!((loss - expected_loss).abs() <= tolerance * expected_loss);
        }
    }
}

#[test]
fn averaging_averages_would_have_been_another_gradient() {
    // Guards the proof above: on uneven micro-batches the old way is far off.
    let batches = [Batch::new(0, 1, 0), Batch::new(1, 8, 0)];
    let (expected, _) = big_batch_gradients(&batches, Kind::Float);
    let model = Model::new();
    for batch in &batches {
        (model.loss_sum(batch) / batch.tokens() as f64 / 2.0).backward();
    }
    assert!(difference(&model.gradients(), &expected) > 0.1);
}

#[test]
fn scaling_and_clipping_compose_to_the_big_batchs_training() {
    let scaled_config = GradScalerConfig {
        init_scale: 1024.0,
        growth_interval: 3,
        ..Default::default()
    };
    for announced in [true, false] {
        let (plain, micro) = (Model::new(), Model::new());
        let (mut plain_optimizer, mut optimizer) = (plain.adamw(), micro.adamw());
        let scaler = GradScaler::new(scaled_config).unwrap();
        // A bound that clips some steps and lets others pass.
        let max_norm = 1.1;
        let config = AccumulationConfig {
            gradient_accumulation_steps: 3,
            max_grad_norm: Some(max_norm),
        };
        let mut accumulator = GradientAccumulator::new(config)
            .unwrap()
            .with_scaler(Some(scaler));
        let mut clipped = 0;
        for step in 0..12 {
            let batches = [
                Batch::new(step, 3 + step % 4, 1),
                Batch::new(step + 100, 7, 0),
                Batch::new(step + 200, 1, 2),
            ];
            let big = Batch::joined(&batches);
            (plain.loss_sum(&big) / big.tokens() as f64).backward();
            let norm =
                clip_grad_norm(&plain.parameters(), max_norm, ClipOptions::default()).unwrap();
            plain_optimizer.step().unwrap();
            plain_optimizer.zero_grad().unwrap();

            if announced {
                accumulator
                    .open(Window::new(batches.iter().map(Batch::tokens)))
                    .unwrap();
            }
            for batch in &batches {
                backward(&mut accumulator, announced, &micro.loss_sum(batch), batch);
            }
            let report = accumulator.step(&mut optimizer).unwrap();
            assert!(report.stepped);
            let (norm, reported) = (norm.double_value(&[]), report.grad_norm().unwrap().unwrap());
            assert!((norm - reported).abs() <= 1e-5 * norm, "{norm} {reported}");
            clipped += usize::from(norm > max_norm);
        }
        assert!(
            (1..12).contains(&clipped),
            "{clipped} of 12 steps were clipped"
        );
        let worst = difference(&micro.parameters(), &plain.parameters());
        println!("announced {announced}: parameters after 12 steps differ by {worst:.1e}");
        assert!(worst <= 2e-6, "{worst:e}");
        assert_eq!(
            accumulator.scaler().unwrap().get_scale().unwrap(),
            1024.0 * 16.0,
            "four growths in twelve steps"
        );
    }
}

#[test]
fn a_step_with_an_infinity_is_skipped_and_the_next_one_is_not() {
    for max_grad_norm in [None, Some(1.0)] {
        let model = Model::new();
        let mut optimizer = model.adamw();
        let scaler = GradScaler::new(GradScalerConfig {
            init_scale: 1024.0,
            ..Default::default()
        })
        .unwrap();
        let config = AccumulationConfig {
            gradient_accumulation_steps: 2,
            max_grad_norm,
        };
        let mut accumulator = GradientAccumulator::new(config)
            .unwrap()
            .with_scaler(Some(scaler));
        let before: Vec<Tensor> = model.parameters().iter().map(Tensor::copy).collect();
        for broken in [true, false] {
            for seed in 0..2 {
                let batch = Batch::new(seed, 4, 0);
                let mut loss_sum = model.loss_sum(&batch);
                if broken && seed == 0 {
                    loss_sum *= f64::INFINITY;
                }
                accumulator.backward_counted(&loss_sum, 4).unwrap();
            }
            let report = accumulator.step(&mut optimizer).unwrap();
            assert_eq!(report.stepped, !broken);
            let scale = accumulator.scaler().unwrap().get_scale().unwrap();
            assert_eq!(scale, 512.0);
            let unchanged = before
                .iter()
                .zip(model.parameters())
                .all(|(a, b)| a.equal(&b));
            assert_eq!(unchanged, broken);
        }
    }
}

#[test]
fn a_window_without_tokens_steps_nothing() {
    let model = Model::new();
    let mut optimizer = model.adamw();
    let mut accumulator = GradientAccumulator::new(no_clipping(1)).unwrap();
    let before: Vec<Tensor> = model.parameters().iter().map(Tensor::copy).collect();
    let batch = Batch::new(0, 0, 5);
    accumulator
        .backward_counted(&model.loss_sum(&batch), 0)
        .unwrap();
    let report = accumulator.step(&mut optimizer).unwrap();
    assert!(!report.stepped);
    assert_eq!(report.loss().unwrap(), 0.0);
    // No decay either.
    assert!(
        before
            .iter()
            .zip(model.parameters())
            .all(|(a, b)| a.equal(&b))
    );
}
