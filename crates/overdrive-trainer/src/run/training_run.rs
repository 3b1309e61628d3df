//! A run: everything of a training loop but the model, its loss and the data.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

use overdrive_accumulation::{AccumulatedStep, GradientAccumulator, Window};
use overdrive_datasets::{DeviceLoader, LoaderState};
use overdrive_distributed::{DistributedDataParallel, ProcessGroup};
use overdrive_optim::{EarlyStopping, Ema, LrScheduler, Optimizer, Stateful};
use overdrive_precision::{GradScaler, Precision};
use overdrive_profiling::Phase;
use overdrive_snapshot::{RunState, SnapshotManager};
use overdrive_tracking::StepMetrics;
use tch::{Device, Tensor};

use super::capture::Capture;
use super::log::{Done, RunLog};
use super::micro_batch::{MicroBatch, StepTotals};
use super::plan::TrainingPlan;
use super::snapshots::{load_best, loader_totals};
use super::summary::{Evaluation, RunSummary};
use crate::arguments::TrainingArguments;
use crate::{Error, Interrupt, ProgramError, Result, RunEnd, print_line};

/// A run of a training loop: what Accelerate's `Accelerator` is to a Python program, with the schedule, the
/// snapshots and the metrics of transformers' `Trainer`. The loop, the model, its loss and the data stay in the
/// program.
///
/// The run owns the process group, precision and loss scaler, gradient accumulation and clipping, optimizer,
/// learning-rate schedule, averaged weights, early stopping, snapshots, trackers and the flag of Ctrl-C. It is
/// built from [`TrainingArguments`], each part of which [`RunOptions`](crate::RunOptions) can replace, and restores itself from the
/// snapshot that `resume_from_checkpoint` names. All processes of the group drive it alike; each gets its share of the
/// batches, and losses, norms and the decision to stop are the same on all of them.
///
/// Losses and norms stay on the device until a line of the log is due, so that the host does not wait for a GPU.
///
/// ```
/// use overdrive_datasets::{DataLoader, DataLoaderOptions, DeviceLoader, InMemory};
/// use overdrive_distributed::ProcessGroup;
/// use overdrive_trainer::{IntervalStrategy, RunOptions, TrainingArguments, TrainingRun};
/// use tch::nn::{self, Module};
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arguments = TrainingArguments {
///     max_steps: 20,
///     learning_rate: 0.05,
///     per_device_train_batch_size: 4,
///     gradient_accumulation_steps: 2,
///     eval_strategy: IntervalStrategy::No,
///     ..TrainingArguments::default()
/// };
/// let store = nn::VarStore::new(Device::Cpu);
/// let model = nn::linear(store.root(), 1, 1, Default::default());
/// let numbers: Vec<f32> = (0..64).map(|number| number as f32 / 64.0).collect();
/// let options = DataLoaderOptions { batch_size: 4, shuffle: true, ..Default::default() };
/// let collate = |rows: Vec<f32>| Ok(Tensor::from_slice(&rows).view([-1, 1]));
/// let loader = DataLoader::with_collate(InMemory(numbers), collate, options)?;
/// let mut loader = DeviceLoader::new(loader, Device::Cpu);
///
/// let parameters = store.variables().into_iter().collect();
/// let options = RunOptions { silent: true, ..RunOptions::default() };
/// let group = ProcessGroup::single();
/// let mut run = TrainingRun::start(&arguments, &group, parameters, &mut loader, options)?;
/// while let Some(batches) = run.next_batches(&mut loader)? {
///     for batch in batches {
///         run.forward_backward(batch, |x: &Tensor| model.forward(x).f_mse_loss(&(x * 3.0), tch::Reduction::Mean))?;
///     }
///     run.step()?;
///     run.save_if_due()?;
/// }
/// let (summary, _) = run.finish()?;
/// assert!(summary.losses[19] < summary.losses[0]);
/// # Ok(())
/// # }
/// ```
pub struct TrainingRun {
    pub(super) arguments: TrainingArguments,
    pub(super) group: ProcessGroup,
    pub(super) precision: Precision,
    pub(super) device: Device,
    pub(super) plan: TrainingPlan,
    /// The trainable parameters; these handles share storage with the model.
    pub(super) parameters: Vec<(String, Tensor)>,
    pub(super) accumulator: GradientAccumulator<DistributedDataParallel>,
    /// The captured passes.
    pub(super) capture: Capture,
    pub(super) state: State,
    pub(super) snapshots: Option<SnapshotManager>,
    /// The files of each snapshot, the fingerprints of the inputs included.
    pub(super) files: Vec<(String, Vec<u8>)>,
    pub(super) log: RunLog,
    pub(super) interrupt: Interrupt,
    /// The totals of the current step on this process.
    pub(super) totals: StepTotals,
    /// The passes over each source of a mixture, read before a line of the log is due.
    pub(super) source_epochs: Vec<(String, f64)>,
    /// The last step, until it is logged.
    pub(super) stepped: Option<Stepped>,
    pub(super) has_ended: bool,
    /// If `true`, this process prints the lines of the run.
    pub(super) prints: bool,
}

/// The state that changes from step to step, besides the parameters.
pub(super) struct State {
    pub(super) optimizer: Box<dyn Optimizer>,
    pub(super) scheduler: LrScheduler,
    pub(super) ema: Option<Ema>,
    pub(super) best: EarlyStopping,
    /// The position in the data.
    pub(super) loader: LoaderState,
    /// The values that the program has registered.
    pub(super) registered: Vec<(String, Rc<RefCell<dyn Stateful>>)>,
}

/// A step whose log line is not written yet.
pub(super) struct Stepped {
    pub(super) metrics: StepMetrics,
    pub(super) accumulated: AccumulatedStep,
    /// The metric of its evaluation.
    metric: Option<f64>,
    improved: bool,
    stop: bool,
}

impl TrainingRun {
    /// Returns the number of optimizer steps so far, those before a restart included.
    pub fn steps(&self) -> u64 {
        self.log.done.steps
    }

    /// Returns the numbers of steps of the run.
    pub fn plan(&self) -> &TrainingPlan {
        &self.plan
    }

    /// Prints a line between those of the steps, on rank 0.
    pub fn print(&mut self, line: impl fmt::Display) {
        self.log.say(&line.to_string());
    }

    /// Loads the micro-batches of the next optimizer step: `gradient_accumulation_steps` of them, fewer in the last step of
    /// an epoch. Returns `None` after the last step, after a signal, and when early stopping ends the run.
    ///
    /// # Errors
    /// The error of a record that cannot be read, and those of [`save_if_due`](Self::save_if_due) if the program has not
    /// called it for the last step.
    pub fn next_batches<B: MicroBatch>(
        &mut self,
        loader: &mut DeviceLoader<B>,
    ) -> Result<Option<Vec<B>>> {
        self.save_if_due()?;
        if self.has_ended || self.steps() >= self.plan.total_steps {
            return Ok(None);
        }
        let (recorder, count) = (&mut self.log.recorder, self.plan.micro_batches);
        recorder.begin_step();
        let batches = recorder.phase(Phase::Data, || loader.next_batches(count))?;
        // Counters of the loader, which include the waiting time.
        recorder.loader(loader_totals(loader));
        self.state.loader = loader.state_dict();
        if self.plan.log_due(self.steps() + 1) {
            self.source_epochs = loader.source_epochs();
        }
        self.totals = StepTotals::of(&batches);
        let labels = batches.iter().filter_map(MicroBatch::label_count);
        let labels: Vec<u64> = labels.map(|count| count as u64).collect();
        // The label counts of the whole step, so that each token has the same weight in the mean loss of the step.
        let window = match labels.len() {
            0 => Window::of_means(batches.len()),
            counted if counted == batches.len() => Window::new(labels),
            _ => {
                return Err(Error::of_program(
                    "some micro-batches of a step have a `label_count` and others have none; return it for all or for none",
                ));
            }
        };
        self.accumulator.open(window)?;
        Ok(Some(batches))
    }

    /// Runs the forward pass of a micro-batch under the autocast of the run's precision, and counts its time.
    ///
    /// # Errors
    /// The error of `forward` ([`Error::Program`]), and an error if the device has no autocast.
    pub fn forward<T, E: Into<ProgramError>>(
        &self,
        forward: impl FnOnce() -> std::result::Result<T, E>,
    ) -> Result<T> {
        let _autocast = self.precision.autocast(self.device)?;
        let recorder = &self.log.recorder;
        recorder
            .phase(Phase::Forward, forward)
            .map_err(Error::of_program)
    }

    /// Runs the backward pass of the next micro-batch from its `loss`, a scalar: the sum over the labels that
    /// [`MicroBatch::label_count`] counts, or the mean where it counts none. The loss is scaled in fp16. Gradients
    /// accumulate over the micro-batches of the step, and the last backward reduces them over the processes.
    ///
    /// # Errors
    /// An error if the step has no further micro-batch, or backward fails.
    pub fn backward(&mut self, loss: &Tensor) -> Result<()> {
        let (recorder, accumulator) = (&self.log.recorder, &mut self.accumulator);
        Ok(recorder.phase(Phase::Backward, || accumulator.backward(loss))?)
    }

    /// Ends an optimizer step: clips the gradients, updates the parameters, and advances the schedule and the averages. A
    /// step that the loss scaler skips changes no weights, so neither schedule nor averages advance.
    ///
    /// # Errors
    /// An error if no micro-batch has run, the optimizer fails, or a process is lost.
    pub fn step(&mut self) -> Result<()> {
        let state = &mut self.state;
        // Read before the schedule moves on: it is the rate of this step.
        let learning_rate = state.scheduler.last_lr().first().copied();
        let (recorder, accumulator) = (&self.log.recorder, &mut self.accumulator);
        let step = || accumulator.step(&mut state.optimizer);
        let accumulated = recorder.phase(Phase::Optimizer, step)?;
        if accumulated.stepped {
            state.scheduler.step(&mut state.optimizer)?;
            state.ema.as_mut().map(Ema::update).transpose()?;
        }
        // One collective for all totals, including the stop request, so that all processes stop at the same step.
        self.totals.stop = self.interrupt.ends_run();
        let totals = self.totals.over(&self.group)?;
        let mut metrics = self.log.end_step(&totals)?;
        metrics.epoch = Some(state.loader.epochs());
        metrics.learning_rate = learning_rate.unwrap_or_default();
        // Values on the device are read when a line is due, so that the host does not wait for every step.
        if self.plan.log_due(metrics.step) {
            let scale = self.accumulator.scaler().map(GradScaler::get_scale);
            metrics.loss_scale = scale.transpose()?;
            for (source, epochs) in self.source_epochs.drain(..) {
                metrics
                    .extra
                    .insert(format!("epoch/{source}"), epochs.into());
            }
        }
        self.stepped = Some(Stepped {
            metrics,
            accumulated,
            metric: None,
            improved: false,
            stop: totals.stop,
        });
        Ok(())
    }

    /// Evaluates before the first step if `eval_on_start` is set; a run that resumes does not.
    ///
    /// # Errors
    /// The error of `evaluate`, and an error if a process is lost.
    pub fn evaluate_on_start<E: Into<ProgramError>>(
        &mut self,
        evaluate: impl FnOnce() -> std::result::Result<Evaluation, E>,
    ) -> Result<()> {
        if !self.arguments.eval_on_start || self.steps() > 0 {
            return Ok(());
        }
        let found = self.averaged(evaluate)?;
        let mut metrics = StepMetrics {
            // There is no training loss before the first step; NaN is written as null.
            loss: f64::NAN,
            ..StepMetrics::default()
        };
        found.apply_to(&mut metrics);
        // A signal has cut the evaluation short; the run ends after its first step.
        let stop = self.interrupt.ends_run();
        if !self.group.any(stop)? {
            self.log.log(&metrics);
        }
        Ok(())
    }

    /// Evaluates after this step if the plan says so, and records the result: it is logged, decides about early stopping,
    /// and is the metric of the snapshot. With `ema_decay` the model has its averaged weights meanwhile. `evaluate` returns
    /// the mean loss over the batches of all processes, and may end early on [`Interrupt::signal_received`].
    ///
    /// # Errors
    /// The error of `evaluate`, and an error if a process is lost or the evaluation lacks `metric_for_best_model`.
    pub fn evaluate_if_due<E: Into<ProgramError>>(
        &mut self,
        evaluate: impl FnOnce() -> std::result::Result<Evaluation, E>,
    ) -> Result<()> {
        // On a stop request the run only saves and ends: it may have just a few seconds.
        let due = |stepped: &Stepped| self.plan.eval_due(stepped.metrics.step) && !stepped.stop;
        if !self.stepped.as_ref().is_some_and(due) {
            return Ok(());
        }
        let found = self.averaged(evaluate)?;
        // A signal has cut the evaluation short.
        let stop = self.group.any(self.interrupt.ends_run())?;
        let Some(stepped) = self.stepped.as_mut() else {
            return Ok(());
        };
        stepped.stop = stop;
        if !stop {
            found.apply_to(&mut stepped.metrics);
            let value = self.arguments.best_model_metric(&found)?;
            self.log.summary.evaluation = Some(found);
            stepped.metric = Some(value);
            stepped.improved = self
                .state
                .best
                .observe(stepped.metrics.step, value)
                .improved;
        }
        Ok(())
    }

    /// Calls `evaluate` while the model has its averaged weights, if there are any.
    fn averaged<E: Into<ProgramError>>(
        &mut self,
        evaluate: impl FnOnce() -> std::result::Result<Evaluation, E>,
    ) -> Result<Evaluation> {
        // The guard puts the training weights back when the evaluation ends.
        let _averaged = self.state.ema.as_mut().map(Ema::apply).transpose()?;
        evaluate().map_err(Error::of_program)
    }

    /// Adds values to the metrics of this step, as `Accelerator.log` does: metrics.jsonl and the trackers get them. Call it
    /// between [`step`](Self::step) and [`save_if_due`](Self::save_if_due), which logs the step.
    pub fn log(&mut self, values: impl IntoIterator<Item = (String, f64)>) {
        if let Some(stepped) = &mut self.stepped {
            let values = values.into_iter();
            let values = values.map(|(name, value)| (name, value.into()));
            stepped.metrics.extra.extend(values);
        }
    }

    /// Logs the step, and saves a snapshot if the plan says so, or if the run ends here. The snapshot is written in the
    /// background; one that fails is a warning in the log. Each step is logged once, and a second call does nothing.
    ///
    /// # Errors
    /// An error if a process is lost, or the state cannot be taken.
    pub fn save_if_due(&mut self) -> Result<()> {
        let Some(stepped) = self.stepped.take() else {
            return Ok(());
        };
        let (step, stop, metric) = (stepped.metrics.step, stepped.stop, stepped.metric);
        self.log.summary.interrupted = stop;
        let ends = stop || self.state.best.should_stop();
        let save_due = self.plan.save_due(step, stepped.improved, ends);
        let read_due = ends || save_due || self.plan.eval_due(step) || self.plan.log_due(step);
        self.log.unread.push(stepped);
        if read_due {
            self.log.flush(&self.group)?;
        }
        if let Some(snapshots) = &mut self.snapshots {
            if read_due {
                // A run whose folder has been removed ends now, and not only after its last step.
                snapshots.check_in_place()?;
            }
            if save_due {
                let sharded = self.arguments.shards_optimizer();
                let (done, scaler) = (&mut self.log.done, self.accumulator.scaler_mut());
                let registered =
                    self.state
                        .registered(done, scaler, &self.parameters, &self.files, sharded);
                snapshots.save_state(step, metric, registered)?;
            }
            self.log.warn_about(snapshots)?;
        }
        if ends {
            self.has_ended = true;
            self.log.say(match stop {
                true => "interrupted: the run ends after this step",
                false => "no improvement within `early_stopping_patience`: the run ends",
            });
        }
        Ok(())
    }

    /// Ends the run: waits until the snapshots are written, loads the best weights into the model if
    /// `load_best_model_at_end` is set, and closes the trackers. Returns the summary, and the averaged weights if
    /// `ema_decay` is set. After a signal it prints how to resume.
    ///
    /// # Errors
    /// An error if a process is lost, or the best snapshot cannot be read.
    pub fn finish(mut self) -> Result<(RunSummary, Option<Ema>)> {
        self.save_if_due()?;
        // A loop that ends before the last step of the plan leaves steps whose losses no line has read.
        self.log.flush(&self.group)?;
        let root = self
            .snapshots
            .as_ref()
            .map(|snapshots| snapshots.folder().to_owned());
        if let Some(mut snapshots) = self.snapshots.take() {
            snapshots.settle()?;
            self.log.warn_about(&mut snapshots)?;
            snapshots.check_in_place()?;
            // No process leaves before all have written. After a signal during the last save, the resumed run does the
            // rest of the work.
            let stop = self.group.any(self.interrupt.ends_run())?;
            if self.group.all(self.log.summary.is_saved())? {
                self.log.summary.interrupted |= stop;
            }
            if self.arguments.load_best_model_at_end && !self.log.summary.interrupted {
                let (parameters, ema) = (&self.parameters, self.state.ema.as_mut());
                let best = load_best(&self.arguments, &snapshots, &self.group, parameters, ema)?;
                self.log.summary.best = best;
            }
        }
        let end = self.log.summary.end();
        if root.is_none() && self.log.summary.interrupted {
            let step = self.steps();
            let what = format!(
                "the run after step {step}, which is in no snapshot: the run has no folder"
            );
            self.log.finish(&self.state.optimizer)?;
            return Err(Error::Interrupted { what });
        }
        if end == RunEnd::NotSaved {
            self.log
                .say("the last step is in no snapshot (`save_strategy: no`, or saving failed)");
        }
        let summary = self.log.finish(&self.state.optimizer)?;
        if summary.interrupted && self.prints {
            print_line(summary.to_string().trim_end());
        }
        if let (RunEnd::Saved, true, Some(root)) = (end, self.prints, root) {
            let root = root.display();
            print_line(format_args!(
                "resume it with `--out {root} --resume-from-checkpoint true`"
            ));
        }
        Ok((summary, self.state.ema))
    }
}

impl State {
    /// Registers the entries of a snapshot.
    pub(super) fn registered<'s>(
        &'s mut self,
        done: &'s mut Done,
        scaler: Option<&'s mut GradScaler>,
        parameters: &[(String, Tensor)],
        files: &[(String, Vec<u8>)],
        sharded: bool,
    ) -> RunState<'s> {
        let registered = RunState::new()
            .tensors("model", shared(parameters))
            .register("lr_scheduler", &mut self.scheduler)
            .register_optional("scaler", scaler)
            .register("early_stopping", &mut self.best)
            .value("progress", done)
            .value("loader", &mut self.loader)
            .random_states();
        // A run must not drop its average by accident.
        let mut registered = match &mut self.ema {
            Some(ema) => registered.register("ema", ema),
            None => registered,
        };
        for (name, value) in &self.registered {
            registered = registered.shared(name, Rc::clone(value));
        }
        // Registered under one name in either case, so that a snapshot shows which one was used.
        let registered = match sharded {
            // Each process has the states of its own parameters.
            true => registered.register_per_rank("optimizer", &mut self.optimizer),
            false => registered.register("optimizer", &mut self.optimizer),
        };
        let files = files.iter().cloned();
        files.fold(registered, |state, (name, bytes)| state.file(name, bytes))
    }
}

impl fmt::Debug for TrainingRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrainingRun")
            .field("plan", &self.plan)
            .field("done", &self.log.done)
            .finish_non_exhaustive()
    }
}

/// Returns handles that share storage with `parameters`.
pub(crate) fn shared(parameters: &[(String, Tensor)]) -> Vec<(String, Tensor)> {
    let handles = parameters.iter();
    handles
        .map(|(name, tensor)| (name.clone(), tensor.shallow_clone()))
        .collect()
}
