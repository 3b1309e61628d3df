//! The loop of a training run.

use std::fmt;

use overdrive_datasets::{Batch, DeviceLoader};
use overdrive_distributed::DistributedDataParallel;
use overdrive_optim::Optimizer;
use overdrive_precision::Precision;
use overdrive_profiling::Trackers;
use overdrive_transformer::CausalLm;

use crate::parallel::naming_the_lost;
use crate::under_way::UnderWay;
use crate::{Evaluation, Result, Saving, TrainingArguments, TrainingPlan, TrainingSummary};

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
    /// What averages their gradients over the processes ([`TrainingArguments::data_parallel`]).
    pub data_parallel: DistributedDataParallel,
    /// Where the metrics of each step go; nowhere on other ranks than 0.
    pub trackers: Trackers,
    /// Its snapshots, if it has any.
    pub saving: Option<Saving>,
    /// Whether steps are shown on the terminal.
    pub shows_progress: bool,
}

impl TrainingLoop<'_> {
    /// Trains `model` on `batches`: micro-batches are accumulated with their labels as weights, the
    /// gradients clipped, the optimizer and its schedule stepped; metrics go to the trackers, snapshots to
    /// the run's folder. An interrupt ends the loop after the step, with a snapshot.
    ///
    /// A snapshot that cannot be written is told of on the terminal, and training goes on.
    ///
    /// Of several processes each runs this with its part of the batches. Losses, norms, the loss scale and
    /// the decision to stop are the same on all; a signal to one ends all of them after the same step. A
    /// process that is lost ends the others within `ddp_timeout`, with an error that names it.
    ///
    /// Dropout applies in training and not in `evaluate`.
    ///
    /// # Errors
    /// The first of a batch, a step, an evaluation or a tracker.
    pub fn run(
        self,
        model: &mut CausalLm,
        batches: &mut DeviceLoader<Batch>,
        evaluate: &mut dyn FnMut(&CausalLm) -> Result<Evaluation>,
    ) -> Result<TrainingSummary> {
        let group = self.data_parallel.group().clone();
        self.train(model, batches, evaluate)
            .map_err(|error| naming_the_lost(&group, error))
    }

    fn train(
        mut self,
        model: &mut CausalLm,
        batches: &mut DeviceLoader<Batch>,
        evaluate: &mut dyn FnMut(&CausalLm) -> Result<Evaluation>,
    ) -> Result<TrainingSummary> {
        let mut run = UnderWay::begin(&mut self, model, batches)?;
        model.set_training(true)?;
        for step in run.steps() {
            let window = run.window(batches)?;
            let stepped = run.optimize(model, &window)?;
            let mut metrics = run.measure(step, &stepped, batches.stats())?;
            let mut value = None;
            if run.eval_due(step) {
                model.set_training(false)?;
                let found = evaluate(model)?;
                model.set_training(true)?;
                value = run.observe(step, found, &mut metrics);
            }
            run.log(&metrics)?;
            run.save(&metrics, value, batches, stepped.stop())?;
            if stepped.stop() || run.patience_is_used_up() {
                break;
            }
        }
        run.finish(model)
    }
}

impl fmt::Debug for TrainingLoop<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrainingLoop")
            .field("plan", &self.plan)
            .field("precision", &self.precision)
            .finish_non_exhaustive()
    }
}
