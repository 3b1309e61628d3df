//! The loop of a training run.

use std::time::Instant;

use overdrive_accumulation::{AccumulationConfig, GradientAccumulator, Window};
use overdrive_datasets::LoaderStats;
use overdrive_optim::Optimizer;
use overdrive_precision::Precision;
use overdrive_profiling::{
    Bottleneck, DataLoading, LoaderTotals, Phase, StepMetrics, StepWork, Tracker, Trackers,
    TrainingProgress,
};
use overdrive_transformer::CausalLm;

use crate::{Interrupt, Result, TrainBatch, TrainBatches, TrainingArguments, TrainingPlan};

/// What an evaluation found.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Evaluation {
    /// The mean loss in nats a token.
    pub loss: f64,
    /// The same in bits a byte of text, where the bytes are known.
    pub bits_per_byte: Option<f64>,
}

/// What a run is made of beside its model and its data.
pub struct TrainingLoop<'a> {
    /// The configuration.
    pub arguments: &'a TrainingArguments,
    /// What it comes to in steps.
    pub plan: TrainingPlan,
    /// What the forward pass computes in.
    pub precision: Precision,
    /// What changes the parameters.
    pub optimizer: Box<dyn Optimizer>,
    /// Where the metrics of each step go.
    pub trackers: Trackers,
    /// Whether steps are shown on the terminal.
    pub shows_progress: bool,
}

/// What a run came to.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct TrainingSummary {
    /// The loss of each step, in nats a token.
    pub losses: Vec<f64>,
    /// The last evaluation.
    pub evaluation: Option<Evaluation>,
    /// Tokens worked through, padding not counted.
    pub tokens: u64,
    /// The same with padding.
    pub places: u64,
    /// Seconds of all steps, evaluations not counted.
    pub step_seconds: f64,
    /// Bytes of the optimizer's state.
    pub optimizer_bytes: u64,
    /// What held the steps up.
    pub bottleneck: Option<Bottleneck>,
    /// How long the steps waited for their batches.
    pub data_loading: Option<DataLoading>,
    /// Whether a signal ended it early.
    pub interrupted: bool,
}

impl TrainingSummary {
    /// Tokens a second over all steps.
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.step_seconds.max(f64::MIN_POSITIVE)
    }

    /// The part of all places that was padding, 0 to 1.
    pub fn padding(&self) -> f64 {
        padding(self.tokens, self.places)
    }
}

impl TrainingLoop<'_> {
    /// Trains `model` on `batches`: micro-batches are accumulated with their labels as weights, the
    /// gradients clipped, the optimizer and its schedule stepped; metrics go to the trackers. An
    /// interrupt ends the loop after the step, with an evaluation.
    ///
    /// Dropout applies in training and not in `evaluate`.
    ///
    /// # Errors
    /// The first of a batch, a step, an evaluation or a tracker.
    pub fn run<B: TrainBatch>(
        mut self,
        model: &mut CausalLm,
        mut batches: &mut dyn TrainBatches<B>,
        evaluate: &mut dyn FnMut(&CausalLm) -> Result<Evaluation>,
    ) -> Result<TrainingSummary> {
        let arguments = self.arguments;
        let device = model.device();
        let interrupt = Interrupt::install()?;
        let mut scheduler = arguments.new_scheduler(&self.plan, &mut self.optimizer)?;
        let mut scaler = arguments.new_scaler()?;
        let micro_batches =
            usize::try_from(arguments.gradient_accumulation_steps).unwrap_or(usize::MAX);
        let mut accumulator = GradientAccumulator::new(AccumulationConfig {
            gradient_accumulation_steps: micro_batches,
            max_grad_norm: (arguments.max_grad_norm > 0.0).then_some(arguments.max_grad_norm),
        })?;
        let mut recorder = arguments.new_recorder(model)?;
        let mut profiler = arguments.new_profiler()?;
        let mut progress = self
            .shows_progress
            .then(|| TrainingProgress::new(self.plan.total_steps));
        let mut summary = TrainingSummary::default();
        let began = Instant::now();
        model.set_training(true)?;

        for step in 1..=self.plan.total_steps {
            recorder.begin_step();
            let window: Vec<B> = recorder.phase(Phase::Data, || {
                // By reference to the reference: a trait object cannot be taken from.
                (&mut batches)
                    .take(micro_batches)
                    .collect::<std::result::Result<_, _>>()
            })?;
            accumulator.open(Window::new(window.iter().map(TrainBatch::label_count)))?;
            for batch in &window {
                let loss = recorder.phase(Phase::Forward, || {
                    self.precision.autocast(device, || batch.loss(model))
                })??;
                recorder.phase(Phase::Backward, || {
                    accumulator.backward(&loss.sum, batch.label_count(), scaler.as_mut())
                })?;
            }
            let learning_rate = scheduler.last_lr().first().copied().unwrap_or(0.0);
            let outcome = recorder.phase(Phase::Optimizer, || {
                accumulator.step(&mut self.optimizer, scaler.as_mut())
            })?;
            if outcome.stepped {
                scheduler.step(&mut self.optimizer)?;
            }
            let (loss, grad_norm) = (outcome.loss()?, outcome.grad_norm()?);
            let tokens = window.iter().map(TrainBatch::tokens).sum();
            let places = window.iter().map(TrainBatch::places).sum();
            if let Some(stats) = batches.loader_stats() {
                recorder.loader(totals_of(stats));
            }
            let record = recorder.end_step(StepWork {
                tokens,
                samples: window.iter().map(TrainBatch::samples).sum(),
            })?;
            summary.losses.push(loss);
            summary.tokens += tokens;
            summary.places += places;
            summary.step_seconds += record.seconds;
            if let Some(profiler) = &mut profiler {
                profiler.step()?;
            }

            let mut metrics = StepMetrics {
                step,
                loss,
                learning_rate,
                grad_norm,
                epoch: Some(step as f64 / self.plan.steps_per_epoch as f64),
                loss_scale: scaler
                    .as_ref()
                    .map(|scaler| scaler.get_scale())
                    .transpose()?,
                tokens_seen: Some(recorder.tokens_seen()),
                elapsed_seconds: Some(began.elapsed().as_secs_f64()),
                ..StepMetrics::default()
            };
            record.apply_to(&mut metrics);
            if places > tokens {
                metrics.padding = Some(padding(tokens, places));
            }
            let stop = interrupt.requested();
            if self.plan.eval_due(step) || (stop && self.plan.eval_steps.is_some()) {
                model.set_training(false)?;
                let found = evaluate(model)?;
                model.set_training(true)?;
                metrics.eval_loss = Some(found.loss);
                metrics.eval_bits_per_byte = found.bits_per_byte;
                summary.evaluation = Some(found);
            }
            self.trackers.log(&metrics)?;
            if let Some(progress) = &mut progress {
                progress.update(&metrics);
            }
            if stop {
                if let Some(progress) = &mut progress {
                    progress.println("interrupted: the model is saved as it is now");
                }
                summary.interrupted = true;
                break;
            }
        }
        model.set_training(false)?;
        self.trackers.finish()?;
        if let Some(mut progress) = progress {
            progress.finish();
        }
        if let Some(profiler) = profiler {
            profiler.finish()?;
        }
        summary.bottleneck = recorder.bottleneck();
        summary.data_loading = recorder.data_loading();
        summary.optimizer_bytes = state_bytes(self.optimizer.as_ref());
        Ok(summary)
    }
}

impl std::fmt::Debug for TrainingLoop<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TrainingLoop")
            .field("plan", &self.plan)
            .field("precision", &self.precision)
            .finish_non_exhaustive()
    }
}

fn padding(tokens: u64, places: u64) -> f64 {
    1.0 - tokens as f64 / places.max(1) as f64
}

fn totals_of(stats: LoaderStats) -> LoaderTotals {
    LoaderTotals {
        batches: stats.batches,
        wait: stats.wait,
        longest_wait: stats.longest_wait,
        ready: stats.ready,
        failed_records: stats.failed_records,
    }
}

/// Bytes of what the optimizer keeps, wherever it is; 0 where it does not tell.
fn state_bytes(optimizer: &dyn Optimizer) -> u64 {
    optimizer.state_dict().map_or(0, |state| {
        let tensors = state.tensors.values();
        tensors
            .map(|tensor| (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64)
            .sum()
    })
}
