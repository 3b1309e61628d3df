use std::collections::VecDeque;
use std::fmt;

use overdrive_accumulation::BatchPlan;
use overdrive_distributed::ProcessGroup;
use overdrive_optim::Optimizer;
use overdrive_precision::Precision;
use overdrive_profiling::{ModelFlops, NvtxRanges, Profiler, StepRecord, StepRecorder, emit_nvtx};
use overdrive_snapshot::SnapshotManager;
use overdrive_tracking::{StepMetrics, Tracker, Trackers, TrainingProgress};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::duration::DurationEstimate;
use super::micro_batch::StepTotals;
use super::plan::TrainingPlan;
use super::summary::RunSummary;
use super::training_run::Stepped;
use crate::Result;
use crate::arguments::TrainingArguments;

/// The progress of a run over all its processes and restarts.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Done {
    /// The number of optimizer steps.
    pub steps: u64,
    /// The number of tokens without padding.
    pub tokens: u64,
    /// The wall time in seconds, up to the last step that was flushed.
    pub seconds: f64,
    /// The division of the last step's examples into micro-batches and processes.
    #[serde(default)]
    pub batch: Option<BatchPlan>,
}

/// The log of a run: measures its steps and reports them on the terminal, to trackers, as a trace and in a summary.
pub(super) struct RunLog {
    pub(super) recorder: StepRecorder,
    profiler: Option<Profiler<'static>>,
    /// The marks for Nsight Systems, until the log is dropped.
    _nvtx: Option<NvtxRanges>,
    trackers: Trackers,
    progress: TrainingProgress,
    batch: BatchPlan,
    /// The progress before this process.
    before: Done,
    pub(super) done: Done,
    duration: DurationEstimate,
    /// The steps whose losses and norms have not been read from the device yet.
    pub(super) unread: Vec<Stepped>,
    /// The measurements of the first unread steps, which the device is known to have finished.
    finished: VecDeque<StepRecord>,
    /// The losses, counts and times so far.
    pub(super) summary: RunSummary,
}

impl RunLog {
    /// Starts the log of a run. Its lines are printed if `prints` is set.
    pub(super) fn begin(
        arguments: &TrainingArguments,
        plan: &TrainingPlan,
        precision: Precision,
        device: Device,
        devices: usize,
        model: Option<ModelFlops>,
        prints: bool,
    ) -> Result<Self> {
        let progress = match prints {
            true => TrainingProgress::new(plan.total_steps).with_logging_steps(plan.logging_steps),
            false => TrainingProgress::silent(),
        };
        Ok(Self {
            recorder: arguments.new_recorder(model, precision, device, devices)?,
            profiler: arguments.new_profiler()?,
            _nvtx: arguments.emit_nvtx.then(|| emit_nvtx(false)).transpose()?,
            trackers: Trackers::new(),
            progress,
            batch: arguments.batch_plan(devices)?,
            before: Done::default(),
            done: Done::default(),
            duration: DurationEstimate::new(plan),
            unread: Vec::new(),
            finished: VecDeque::new(),
            summary: RunSummary::default(),
        })
    }

    /// Continues from the loaded progress, which the run had before this process, and prints the relevant differences.
    pub(super) fn resume(&mut self) {
        if let Some(before) = self.done.batch {
            let now = self.batch;
            let (saved, resumed) = (before.world_size(), now.world_size());
            if saved != resumed {
                self.say(&format!(
                    "            {saved} processes saved it and {resumed} resume it: the optimizer states are \
                     divided anew, and the random states are new"
                ));
            }
            if before.effective_batch() != now.effective_batch() {
                self.say(&format!(
                    "            warning: another effective batch: {now}, before {before}; steps and schedule \
                     continue by their number, the data at the same example"
                ));
            }
        }
        self.before = self.done.clone();
        self.summary.resumed_step = self.done.steps;
    }

    /// Also sends the metrics of each step to `trackers`.
    pub(super) fn track(&mut self, trackers: Trackers) {
        self.trackers = std::mem::take(&mut self.trackers).with(trackers);
    }

    /// Prints a line between the lines of the steps.
    pub(super) fn say(&mut self, line: &str) {
        self.progress.println(line);
    }

    /// Stops the clock of a step and returns the metrics that the host knows. Its times and rates follow when the device
    /// has finished it: the host is ahead of a GPU.
    pub(super) fn end_step(&mut self, totals: &StepTotals) -> Result<StepMetrics> {
        self.recorder.end_step(totals.work());
        self.summary.tokens += totals.tokens;
        self.summary.padded_tokens += totals.padded_tokens;
        let finished = self.recorder.take_finished()?;
        self.take_in(finished);
        if let Some(Err(error)) = self.profiler.as_mut().map(Profiler::step) {
            self.say(&format!(
                "warning: the trace was not written: {error}; training continues"
            ));
        }
        self.done.steps += 1;
        // The totals continue over restarts, the summary is that of this process.
        self.done.tokens = self.before.tokens + self.summary.tokens;
        self.done.batch = Some(self.batch);
        Ok(StepMetrics {
            step: self.done.steps,
            tokens_seen: Some(self.done.tokens),
            padding: totals.padding(),
            ..StepMetrics::default()
        })
    }

    /// Takes the measurements of steps that the device has finished.
    fn take_in(&mut self, finished: Vec<StepRecord>) {
        for record in finished {
            self.summary.step_seconds += record.seconds;
            let step = self.before.steps + record.step;
            if let Some(line) = self.duration.after_step(step, record.elapsed_seconds) {
                self.say(&line);
            }
            self.finished.push_back(record);
        }
    }

    /// Reads the losses and norms of the steps since the last call, in one copy from the device and one
    /// collective, and logs these steps with their times and rates. All processes call it after the same step.
    pub(super) fn flush(&mut self, group: &ProcessGroup) -> Result<()> {
        let steps = std::mem::take(&mut self.unread);
        let Some(device) = steps
            .first()
            .map(|step| step.accumulated.mean_loss.device())
        else {
            return Ok(());
        };
        let losses = steps.iter().map(|step| Some(&step.accumulated.mean_loss));
        let norms = steps.iter().map(|step| step.accumulated.grad_norm.as_ref());
        let values = losses.chain(norms).flatten();
        let values = values.map(|value| Ok(value.f_to_kind(Kind::Double)?.f_to_device(device)?));
        let values = values.collect::<Result<Vec<Tensor>>>()?;
        let values = Vec::<f64>::try_from(Tensor::f_stack(&values, 0)?)?;
        // The device has finished these steps, now that their losses are read: this waits for nothing.
        let finished = self.recorder.finish()?;
        self.take_in(finished);
        let (losses, norms) = values.split_at(steps.len());
        let own = steps.iter().zip(losses);
        let own: Vec<f64> = own
            .map(|(step, loss)| loss * step.accumulated.tokens as f64)
            .collect();
        let sums = group.sums_of(&own)?;
        let mut norms = norms.iter();
        for (step, sum) in steps.into_iter().zip(sums) {
            let mut metrics = step.metrics;
            if let Some(record) = self.finished.pop_front() {
                metrics.apply(&record);
                self.done.seconds = self.before.seconds + record.elapsed_seconds;
                metrics.elapsed_seconds = Some(self.done.seconds);
            }
            metrics.loss = sum / (step.accumulated.total_tokens as f64).max(1.0);
            if step.accumulated.grad_norm.is_some() {
                metrics.grad_norm = norms.next().copied();
            }
            self.summary.losses.push(metrics.loss);
            self.log(&metrics);
        }
        Ok(())
    }

    /// Prints the metrics of a step and sends them to the trackers. A tracker that fails, as on a full disk, does not
    /// end the run.
    pub(super) fn log(&mut self, metrics: &StepMetrics) {
        if let Some(line) = self.trackers.log_or_warn(metrics) {
            self.say(&line);
        }
        self.progress.update(metrics);
    }

    /// Records the snapshots that were finished since the last call, and warns about those that failed.
    pub(super) fn warn_about(&mut self, snapshots: &mut SnapshotManager) -> Result<()> {
        let ended = snapshots.outcomes()?;
        let saved = ended.iter().filter(|outcome| outcome.result.is_ok());
        self.summary.saved_step = saved.map(|one| one.step).max().max(self.summary.saved_step);
        for line in snapshots.warnings(&ended) {
            self.say(&line);
        }
        Ok(())
    }

    /// Closes the trackers and returns the summary of the run.
    pub(super) fn finish(mut self, optimizer: &dyn Optimizer) -> Result<RunSummary> {
        let trackers = self.trackers.finish();
        self.progress.finish();
        // The results of the run are not written yet, so neither failure may end the run here.
        if let Err(error) = trackers {
            self.say(&format!("warning: the metrics are incomplete: {error}"));
        }
        if let Some(Err(error)) = self.profiler.take().map(Profiler::finish) {
            self.say(&format!("warning: the trace was not written: {error}"));
        }
        self.summary.finish(&self.recorder, optimizer);
        Ok(self.summary)
    }
}

impl fmt::Debug for RunLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunLog")
            .field("summary", &self.summary)
            .finish_non_exhaustive()
    }
}
