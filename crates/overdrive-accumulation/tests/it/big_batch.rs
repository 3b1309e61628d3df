//! Accumulated micro-batches against the one big batch.

use overdrive_accumulation::{
    AccumulationConfig, Error, GradientAccumulator, GradientSync, SyncError, Window, count_tokens,
};
use overdrive_optim::{
    AdamW, AdamWConfig, ClipOptions, Optimizer, TchOptimizer, clip_grad_norm, decay_groups,
};
use overdrive_precision::{GradScaler, GradScalerConfig};
use proptest::prelude::*;
use tch::nn::{self, Module, OptimizerConfig};
use tch::{Device, Kind, Reduction, Tensor};

const FEATURES: i64 = 6;
const CLASSES: i64 = 7;

/// Two layers and a cross entropy over targets of which some are ignored.
struct Model {
    store: nn::VarStore,
    layers: nn::Sequential,
    kind: Kind,
}

impl Model {
    fn new() -> Self {
        Self::of_kind(Kind::Float)
    }

    fn of_kind(kind: Kind) -> Self {
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
    fn parameters(&self) -> Vec<Tensor> {
        let mut named: Vec<_> = self.store.variables().into_iter().collect();
        named.sort_by(|a, b| a.0.cmp(&b.0));
        named.into_iter().map(|(_, tensor)| tensor).collect()
    }

    fn loss_sum(&self, batch: &Batch) -> Tensor {
        let logits = self.layers.forward(&batch.inputs.to_kind(self.kind));
        logits.cross_entropy_loss::<Tensor>(&batch.labels, None, Reduction::Sum, -100, 0.0)
    }

    fn gradients(&self) -> Vec<Tensor> {
        self.parameters().iter().map(|p| p.grad().copy()).collect()
    }

    fn adamw(&self) -> AdamW {
        let config = AdamWConfig {
            learning_rate: 0.01,
            ..Default::default()
        };
        AdamW::new(decay_groups(self.store.variables(), 0.1), config).unwrap()
    }
}

struct Batch {
    inputs: Tensor,
    labels: Tensor,
}

impl Batch {
    /// `tokens` rows in the loss and `ignored` rows that are not, different for each `seed`.
    fn new(seed: usize, tokens: usize, ignored: usize) -> Self {
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

    fn tokens(&self) -> u64 {
        count_tokens(&self.labels, -100).unwrap()
    }

    fn joined(batches: &[Batch]) -> Self {
        let join = |pick: fn(&Batch) -> &Tensor| {
            Tensor::cat(&batches.iter().map(pick).collect::<Vec<_>>(), 0)
        };
        Self {
            inputs: join(|b| &b.inputs),
            labels: join(|b| &b.labels),
        }
    }
}

fn no_clipping(steps: usize) -> AccumulationConfig {
    AccumulationConfig {
        gradient_accumulation_steps: steps,
        max_grad_norm: None,
    }
}

/// Gradients of the mean loss of one big batch.
fn big_batch_gradients(batches: &[Batch], kind: Kind) -> (Vec<Tensor>, f64) {
    let model = Model::of_kind(kind);
    let big = Batch::joined(batches);
    let loss = model.loss_sum(&big) / big.tokens() as f64;
    loss.backward();
    (model.gradients(), loss.double_value(&[]))
}

/// Largest difference relative to the largest value of all tensors.
fn difference(a: &[Tensor], b: &[Tensor]) -> f64 {
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
struct Recorder {
    inner: TchOptimizer,
    seen: Vec<Tensor>,
    parameters: Vec<Tensor>,
}

impl Recorder {
    fn new(model: &Model) -> Self {
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

/// Gradients that the accumulator would step with, and its report of the loss.
fn accumulated(batches: &[Batch], announced: bool, steps: usize, kind: Kind) -> (Vec<Tensor>, f64) {
    let model = Model::of_kind(kind);
    let mut optimizer = Recorder::new(&model);
    let mut accumulator = GradientAccumulator::new(no_clipping(steps)).unwrap();
    if announced {
        accumulator
            .open(Window::new(batches.iter().map(Batch::tokens)))
            .unwrap();
    }
    for batch in batches {
        accumulator
            .backward(&model.loss_sum(batch), batch.tokens(), None)
            .unwrap();
    }
    let step = accumulator.step(&mut optimizer, None).unwrap();
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
        let mut scaler = GradScaler::new(scaled_config).unwrap();
        // A bound that clips some steps and lets others pass.
        let max_norm = 1.1;
        let config = AccumulationConfig {
            gradient_accumulation_steps: 3,
            max_grad_norm: Some(max_norm),
        };
        let mut accumulator = GradientAccumulator::new(config).unwrap();
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
                let loss_sum = micro.loss_sum(batch);
                accumulator
                    .backward(&loss_sum, batch.tokens(), Some(&mut scaler))
                    .unwrap();
            }
            let report = accumulator.step(&mut optimizer, Some(&mut scaler)).unwrap();
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
            scaler.get_scale().unwrap(),
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
        let mut scaler = GradScaler::new(GradScalerConfig {
            init_scale: 1024.0,
            ..Default::default()
        })
        .unwrap();
        let config = AccumulationConfig {
            gradient_accumulation_steps: 2,
            max_grad_norm,
        };
        let mut accumulator = GradientAccumulator::new(config).unwrap();
        let before: Vec<Tensor> = model.parameters().iter().map(Tensor::copy).collect();
        for broken in [true, false] {
            for seed in 0..2 {
                let batch = Batch::new(seed, 4, 0);
                let mut loss_sum = model.loss_sum(&batch);
                if broken && seed == 0 {
                    loss_sum *= f64::INFINITY;
                }
                accumulator
                    .backward(&loss_sum, 4, Some(&mut scaler))
                    .unwrap();
            }
            let report = accumulator.step(&mut optimizer, Some(&mut scaler)).unwrap();
            assert_eq!(report.stepped, !broken);
            assert_eq!(scaler.get_scale().unwrap(), 512.0);
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
        .backward(&model.loss_sum(&batch), 0, None)
        .unwrap();
    let report = accumulator.step(&mut optimizer, None).unwrap();
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

/// Two processes played one after the other: the second averages with what the first left.
struct Pair {
    tokens_of_both: u64,
    of_first: Option<Vec<Tensor>>,
    lasts: Vec<bool>,
}

impl GradientSync for Pair {
    fn world_size(&self) -> u64 {
        2
    }
    fn sum_count(&mut self, _count: u64) -> Result<u64, SyncError> {
        Ok(self.tokens_of_both)
    }
    fn before_backward(&mut self, _loss: &Tensor, last: bool) -> Result<(), SyncError> {
        self.lasts.push(last);
        Ok(())
    }
    fn synchronize(&mut self, parameters: &[Tensor]) -> Result<(), SyncError> {
        let Some(of_first) = &self.of_first else {
            self.of_first = Some(parameters.iter().map(|p| p.grad().copy()).collect());
            return Ok(());
        };
        for (parameter, first) in parameters.iter().zip(of_first) {
            let mean = (parameter.grad() + first) / 2.0;
            parameter.grad().copy_(&mean);
        }
        Ok(())
    }
}

#[test]
fn two_processes_with_uneven_tokens_equal_the_big_batch() {
    for announced in [true, false] {
        let of_process = [
            [Batch::new(0, 2, 1), Batch::new(1, 5, 0)],
            [Batch::new(2, 8, 0), Batch::new(3, 1, 3)],
        ];
        let all: Vec<Batch> = (0..4)
            .map(|i| Batch::new(i, [2, 5, 8, 1][i], [1, 0, 0, 3][i]))
            .collect();
        let (expected, _) = big_batch_gradients(&all, Kind::Float);
        let mut pair = Some(Pair {
            tokens_of_both: 16,
            of_first: None,
            lasts: Vec::new(),
        });
        let mut gradients = Vec::new();
        for batches in &of_process {
            let model = Model::new();
            let mut optimizer = Recorder::new(&model);
            // The order of the optimizer's parameters is that of the store; fix it for the pair.
            let mut accumulator =
                GradientAccumulator::with_sync(no_clipping(2), pair.take().unwrap()).unwrap();
            if announced {
                accumulator
                    .open(Window::new(batches.iter().map(Batch::tokens)))
                    .unwrap();
            }
            for batch in batches {
                accumulator
                    .backward(&model.loss_sum(batch), batch.tokens(), None)
                    .unwrap();
            }
            let report = accumulator.step(&mut optimizer, None).unwrap();
            assert_eq!(report.total_tokens, 16);
            gradients = std::mem::take(&mut optimizer.seen);
            let sync = accumulator.sync_mut();
            let of_first = sync.of_first.take();
            let lasts = std::mem::take(&mut sync.lasts);
            assert_eq!(lasts, [false, true]);
            pair = Some(Pair {
                tokens_of_both: 16,
                of_first,
                lasts: Vec::new(),
            });
        }
        let relative = difference(&gradients, &expected);
        assert!(relative <= 1e-6, "{relative:e}");
    }
}

#[test]
fn a_failing_hook_is_an_error_with_its_cause() {
    struct Broken;
    impl GradientSync for Broken {
        fn world_size(&self) -> u64 {
            2
        }
        fn sum_count(&mut self, _count: u64) -> Result<u64, SyncError> {
            Err("rank 1 is gone".into())
        }
        fn synchronize(&mut self, _parameters: &[Tensor]) -> Result<(), SyncError> {
            Ok(())
        }
    }
    let mut accumulator = GradientAccumulator::with_sync(no_clipping(1), Broken).unwrap();
    let error = accumulator.open(Window::new([4])).unwrap_err();
    assert_eq!(
        error.to_string(),
        "synchronizing over processes failed: rank 1 is gone"
    );
}

#[test]
fn sync_gradients_tells_the_last_micro_batch() {
    let model = Model::new();
    let mut optimizer = model.adamw();
    let mut accumulator = GradientAccumulator::new(no_clipping(3)).unwrap();
    let backward = |accumulator: &mut GradientAccumulator| {
        let batch = Batch::new(0, 2, 0);
        accumulator
            .backward(&model.loss_sum(&batch), 2, None)
            .unwrap();
    };
    let mut flags = Vec::new();
    for _ in 0..3 {
        flags.push((accumulator.sync_gradients(), accumulator.is_complete()));
        backward(&mut accumulator);
    }
    assert_eq!(flags, [(false, false), (false, false), (true, false)]);
    assert!(accumulator.is_complete());
    accumulator.step(&mut optimizer, None).unwrap();

    // The data ends after one more.
    assert!(!accumulator.sync_gradients());
    accumulator.mark_last();
    assert!(accumulator.sync_gradients());
    backward(&mut accumulator);
    assert!(accumulator.is_complete());
    assert_eq!(accumulator.pending(), 1);
    accumulator.step(&mut optimizer, None).unwrap();
    assert_eq!(accumulator.pending(), 0);

    // An announced window rules over the configuration.
    accumulator.open(Window::new([2])).unwrap();
    assert!(accumulator.sync_gradients());
}

#[test]
fn a_scaler_must_be_given_to_all_calls_of_a_window_or_none() {
    let model = Model::new();
    let mut optimizer = model.adamw();
    let mut scaler = GradScaler::new(GradScalerConfig::default()).unwrap();
    let mut accumulator = GradientAccumulator::new(no_clipping(2)).unwrap();
    let batch = Batch::new(0, 3, 0);
    accumulator
        .backward(&model.loss_sum(&batch), 3, Some(&mut scaler))
        .unwrap();
    let error = accumulator
        .backward(&model.loss_sum(&batch), 3, None)
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with(
            "backward was called without a gradient scaler, but the window's earlier ones had one;"
        ),
        "{error}"
    );
    let error = accumulator
        .step(&mut optimizer, None)
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("step was called without a gradient scaler"),
        "{error}"
    );
    accumulator.step(&mut optimizer, Some(&mut scaler)).unwrap();

    // A disabled one is none.
    let config = GradScalerConfig {
        enabled: false,
        ..Default::default()
    };
    let mut disabled = GradScaler::new(config).unwrap();
    accumulator
        .backward(&model.loss_sum(&batch), 3, Some(&mut disabled))
        .unwrap();
    assert!(accumulator.step(&mut optimizer, None).unwrap().stepped);
}

#[test]
fn misuse_is_refused_with_the_way_out() {
    let model = Model::new();
    let mut optimizer = model.adamw();
    let mut accumulator = GradientAccumulator::new(no_clipping(2)).unwrap();
    assert!(matches!(
        accumulator.step(&mut optimizer, None),
        Err(Error::NothingAccumulated)
    ));

    let batch = Batch::new(0, 3, 0);
    let per_token = Tensor::ones([3], (Kind::Float, Device::Cpu));
    let error = accumulator
        .backward(&per_token, 3, None)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("shape [3], expected one number: the sum"),
        "{error}"
    );

    accumulator.open(Window::new([3, 5])).unwrap();
    accumulator
        .backward(&model.loss_sum(&batch), 3, None)
        .unwrap();
    let error = accumulator.open(Window::new([1])).unwrap_err().to_string();
    assert!(error.contains("under way with 1 micro-batches"), "{error}");
    let error = accumulator
        .backward(&model.loss_sum(&batch), 3, None)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("micro-batch 1 of the window has 3 tokens, but the window announced 5"),
        "{error}"
    );
    let error = accumulator
        .step(&mut optimizer, None)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("announced 2 micro-batches and 1 have come"),
        "{error}"
    );
    accumulator.abandon(&mut optimizer).unwrap();
    assert!(model.parameters().iter().all(|p| !p.grad().defined()));

    accumulator.open(Window::new([3])).unwrap();
    accumulator
        .backward(&model.loss_sum(&batch), 3, None)
        .unwrap();
    let error = accumulator
        .backward(&model.loss_sum(&batch), 3, None)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("announced 1 micro-batches and all have come"),
        "{error}"
    );

    let error = GradientAccumulator::new(no_clipping(0))
        .unwrap_err()
        .to_string();
    assert_eq!(
        error,
        "gradient_accumulation_steps is 0, expected at least 1 micro-batch a step"
    );
    let negative = AccumulationConfig {
        max_grad_norm: Some(-1.0),
        ..Default::default()
    };
    let error = GradientAccumulator::new(negative).unwrap_err().to_string();
    assert_eq!(
        error,
        "max_grad_norm is -1, expected a number above 0, or none to clip nothing"
    );
}
