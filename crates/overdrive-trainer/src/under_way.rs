//! A run while it is under way: one method for each part of a step.

use std::time::Instant;

use overdrive_accumulation::{AccumulationConfig, GradientAccumulator, Window};
use overdrive_datasets::{Batch, DeviceLoader, LoaderStats};
use overdrive_distributed::DistributedDataParallel;
use overdrive_optim::{LrScheduler, Optimizer};
use overdrive_precision::{GradScaler, Precision};
use overdrive_profiling::{
    LoaderTotals, Phase, Profiler, StepMetrics, StepRecorder, StepWork, Tracker, Trackers,
    TrainingProgress,
};
use overdrive_transformer::CausalLm;

use crate::best_so_far::BestSoFar;
use crate::evaluate::loss_of;
use crate::joint_step::JointStep;
use crate::saving::TrainerState;
use crate::{
    Evaluation, Interrupt, Result, SaveStrategy, Saving, TrainingArguments, TrainingLoop,
    TrainingPlan, TrainingSummary,
};

/// What the steps of a run change.
pub(crate) struct UnderWay<'r> {
    arguments: &'r TrainingArguments,
    plan: &'r TrainingPlan,
    precision: Precision,
    ddp: &'r DistributedDataParallel,
    accumulator: GradientAccumulator<&'r DistributedDataParallel>,
    optimizer: &'r mut Box<dyn Optimizer>,
    scheduler: LrScheduler,
    scaler: Option<GradScaler>,
    recorder: StepRecorder,
    profiler: Option<Profiler<'static>>,
    trackers: &'r mut Trackers,
    progress: Option<TrainingProgress>,
    saving: Option<&'r mut Saving>,
    interrupt: Interrupt,
    best: BestSoFar,
    /// What had been done when this process began.
    before: TrainerState,
    began: Instant,
    summary: TrainingSummary,
}

/// What a step came to.
pub(crate) struct Stepped {
    /// On this process.
    own: JointStep,
    /// On all.
    joint: JointStep,
    learning_rate: f64,
    grad_norm: Option<f64>,
}

impl Stepped {
    /// Whether a signal has asked one of the processes to end.
    pub(crate) fn stop(&self) -> bool {
        self.joint.stop
    }
}

impl<'r> UnderWay<'r> {
    /// Makes what the steps need, and goes on after the snapshot if there is one.
    pub(crate) fn begin(
        parts: &'r mut TrainingLoop<'_>,
        model: &CausalLm,
        batches: &mut DeviceLoader<Batch>,
    ) -> Result<Self> {
        let TrainingLoop {
            arguments,
            plan,
            precision,
            optimizer,
            data_parallel,
            trackers,
            saving,
            shows_progress,
        } = parts;
        let (arguments, ddp) = (*arguments, &*data_parallel);
        let interrupt = Interrupt::install()?;
        let mut scheduler = arguments.new_scheduler(plan, optimizer)?;
        let mut scaler = arguments.new_scaler()?;
        let config = AccumulationConfig {
            gradient_accumulation_steps: micro_batches(arguments),
            max_grad_norm: (arguments.max_grad_norm > 0.0).then_some(arguments.max_grad_norm),
        };
        let accumulator = GradientAccumulator::with_sync(config, ddp)?;
        let recorder = arguments.new_recorder(model)?;
        let profiler = arguments.new_profiler()?;
        let progress = shows_progress.then(|| TrainingProgress::new(plan.total_steps));
        let mut best = BestSoFar::new(arguments)?;
        let restored = match &saving {
            Some(saving) => saving.restore(optimizer.as_mut(), &mut scheduler, scaler.as_mut())?,
            None => None,
        };
        let mut before = restored.unwrap_or_default();
        if before.global_step > 0 {
            match before.loader.take() {
                Some(state) => batches.load_state_dict(state)?,
                // A snapshot of a release whose loaders had no state: the batches are taken again.
                None => {
                    for _ in 0..before.global_step * before.gradient_accumulation_steps {
                        batches.next().transpose()?;
                    }
                }
            }
            best.go_on(before.early_stopping.take(), before.best_global_step);
        }
        let summary = TrainingSummary {
            resumed_step: before.global_step,
            ..TrainingSummary::default()
        };
        Ok(Self {
            arguments,
            plan,
            precision: *precision,
            ddp,
            accumulator,
            optimizer,
            scheduler,
            scaler,
            recorder,
            profiler,
            trackers,
            progress,
            saving: saving.as_mut(),
            interrupt,
            best,
            before,
            began: Instant::now(),
            summary,
        })
    }

    /// The steps that are left. A run that patience has ended does not begin again.
    pub(crate) fn steps(&self) -> std::ops::RangeInclusive<u64> {
        let last = match self.patience_is_used_up() {
            true => 0,
            false => self.plan.total_steps,
        };
        self.before.global_step + 1..=last
    }

    pub(crate) fn eval_due(&self, step: u64) -> bool {
        self.plan.eval_due(step)
    }

    pub(crate) fn patience_is_used_up(&self) -> bool {
        self.best.patience_is_used_up()
    }

    /// Begins a step: its micro-batches.
    pub(crate) fn window(&mut self, batches: &mut DeviceLoader<Batch>) -> Result<Vec<Batch>> {
        self.recorder.begin_step();
        let count = micro_batches(self.arguments);
        let window = self.recorder.phase(Phase::Data, || {
            batches.take(count).collect::<std::result::Result<_, _>>()
        })?;
        Ok(window)
    }

    /// Forward and backward over the window, the optimizer's step, and what all processes know of it.
    pub(crate) fn optimize(&mut self, model: &CausalLm, window: &[Batch]) -> Result<Stepped> {
        let device = model.device();
        let labels = window.iter().map(|batch| batch.label_count as u64);
        self.accumulator.open(Window::new(labels))?;
        for batch in window {
            let loss = self.recorder.phase(Phase::Forward, || {
                self.precision.autocast(device, || loss_of(model, batch))
            })??;
            self.recorder.phase(Phase::Backward, || {
                let scaler = self.scaler.as_mut();
                self.accumulator
                    .backward(&loss.sum, batch.label_count as u64, scaler)
            })?;
        }
        let learning_rate = self.scheduler.last_lr().first().copied().unwrap_or(0.0);
        let outcome = self.recorder.phase(Phase::Optimizer, || {
            self.accumulator
                .step(&mut *self.optimizer, self.scaler.as_mut())
        })?;
        if outcome.stepped {
            self.scheduler.step(&mut *self.optimizer)?;
        }
        let grad_norm = outcome.grad_norm()?;
        let own = JointStep {
            loss: outcome.loss()?,
            labels: outcome.tokens,
            tokens: window.iter().map(|batch| batch.tokens as u64).sum(),
            places: window
                .iter()
                .map(|batch| batch.padded_tokens() as u64)
                .sum(),
            samples: window.iter().map(|batch| batch.sequences as u64).sum(),
            stop: self.interrupt.requested(),
        };
        Ok(Stepped {
            own,
            joint: own.over(self.ddp.group())?,
            learning_rate,
            grad_norm,
        })
    }

    /// Ends the step's clock; its metrics.
    pub(crate) fn measure(
        &mut self,
        step: u64,
        stepped: &Stepped,
        loader: LoaderStats,
    ) -> Result<StepMetrics> {
        let Stepped { own, joint, .. } = stepped;
        self.recorder.loader(totals_of(loader));
        let record = self.recorder.end_step(StepWork {
            tokens: own.tokens,
            samples: own.samples,
        })?;
        let summary = &mut self.summary;
        summary.losses.push(joint.loss);
        summary.tokens += joint.tokens;
        summary.places += joint.places;
        summary.step_seconds += record.seconds;
        summary.interrupted = joint.stop;
        if let Some(profiler) = &mut self.profiler {
            profiler.step()?;
        }
        let elapsed = self.before.elapsed_seconds + self.began.elapsed().as_secs_f64();
        let mut metrics = StepMetrics {
            step,
            loss: joint.loss,
            learning_rate: stepped.learning_rate,
            grad_norm: stepped.grad_norm,
            epoch: Some(step as f64 / self.plan.steps_per_epoch as f64),
            loss_scale: self
                .scaler
                .as_ref()
                .map(|scaler| scaler.get_scale())
                .transpose()?,
            tokens_seen: Some(self.before.tokens_seen + summary.tokens),
            elapsed_seconds: Some(elapsed),
            ..StepMetrics::default()
        };
        record.apply_to(&mut metrics);
        joint.apply_to(&mut metrics, own);
        Ok(metrics)
    }

    /// Notes an evaluation after `step`; the number of it that snapshots are compared by.
    pub(crate) fn observe(
        &mut self,
        step: u64,
        found: Evaluation,
        metrics: &mut StepMetrics,
    ) -> Option<f64> {
        metrics.eval_loss = Some(found.loss);
        metrics.eval_bits_per_byte = found.bits_per_byte;
        self.summary.evaluation = Some(found);
        self.best.observe(step, &found)
    }

    /// Metrics to the trackers and to the terminal.
    pub(crate) fn log(&mut self, metrics: &StepMetrics) -> Result<()> {
        self.trackers.log(metrics)?;
        if let Some(progress) = &mut self.progress {
            progress.update(metrics);
        }
        Ok(())
    }

    /// A snapshot, if one is due; tells of those that could not be written, and why the run ends.
    pub(crate) fn save(
        &mut self,
        metrics: &StepMetrics,
        value: Option<f64>,
        batches: &DeviceLoader<Batch>,
        stop: bool,
    ) -> Result<()> {
        let (step, strategy) = (metrics.step, self.arguments.save_strategy);
        let improved = value.is_some() && self.best.step() == Some(step);
        let ends = stop || self.patience_is_used_up();
        let due = self.plan.save_due(step)
            || (improved && strategy == SaveStrategy::Best)
            || (ends && strategy != SaveStrategy::No);
        let mut told = Vec::new();
        if let Some(saving) = &mut self.saving {
            if due {
                let state = TrainerState {
                    global_step: step,
                    max_steps: self.plan.total_steps,
                    gradient_accumulation_steps: self.arguments.gradient_accumulation_steps,
                    tokens_seen: metrics.tokens_seen.unwrap_or_default(),
                    elapsed_seconds: metrics.elapsed_seconds.unwrap_or_default(),
                    best_global_step: self.best.step(),
                    early_stopping: Some(self.best.early_stopping().clone()),
                    lr_scheduler: Some(self.scheduler.state_dict()),
                    scaler: match &self.scaler {
                        Some(scaler) => scaler.state_dict()?,
                        None => None,
                    },
                    loader: Some(batches.state_dict()),
                };
                saving.save(self.optimizer.as_ref(), &state, value)?;
            }
            told.extend(saving.troubles()?);
        }
        if self.patience_is_used_up() {
            told.push(format!(
                "no improvement in {} evaluations: the run ends early",
                self.arguments.early_stopping_patience.unwrap_or_default()
            ));
        }
        if stop {
            told.push("interrupted: the model is saved as it is now".to_owned());
        }
        self.tell(&told);
        Ok(())
    }

    /// Waits for the snapshots, loads the best one where that is asked for, and closes everything.
    pub(crate) fn finish(mut self, model: &mut CausalLm) -> Result<TrainingSummary> {
        if let Some(saving) = &mut self.saving {
            let told = saving.finish()?;
            // Nobody leaves before all have written.
            self.ddp.group().barrier()?;
            if self.arguments.load_best_model_at_end && !self.summary.interrupted {
                self.summary.best_step = saving.load_best(self.ddp.group())?;
            }
            self.tell(&told);
        }
        model.set_training(false)?;
        self.trackers.finish()?;
        if let Some(progress) = &mut self.progress {
            progress.finish();
        }
        if let Some(profiler) = self.profiler {
            profiler.finish()?;
        }
        let mut summary = self.summary;
        summary.bottleneck = self.recorder.bottleneck();
        summary.data_loading = self.recorder.data_loading();
        summary.optimizer_bytes = state_bytes(self.optimizer.as_ref());
        Ok(summary)
    }

    /// Lines between those of the steps; to the log where no steps are shown.
    fn tell(&mut self, lines: &[String]) {
        match &mut self.progress {
            Some(progress) => lines.iter().for_each(|line| progress.println(line)),
            None => lines.iter().for_each(|line| tracing::warn!("{line}")),
        }
    }
}

/// Micro-batches of a step.
fn micro_batches(arguments: &TrainingArguments) -> usize {
    usize::try_from(arguments.gradient_accumulation_steps).unwrap_or(usize::MAX)
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
