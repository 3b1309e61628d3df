//! The snapshots of a run folder.

use overdrive_core::check_option;
use overdrive_datasets::{DeviceLoader, OnDevice};
use overdrive_distributed::ProcessGroup;
use overdrive_optim::Ema;
use overdrive_profiling::LoaderTotals;
use overdrive_snapshot::{Scope, Snapshot, SnapshotManager, SnapshotOptions};
use tch::Tensor;

use serde::{Deserialize, Serialize};

use super::fingerprints::Fingerprints;
use super::folder::RunFolder;
use super::plan::TrainingPlan;
use super::training_run::shared;
use crate::Result;
use crate::arguments::{ResumeFromCheckpoint, TrainingArguments};

impl RunFolder {
    /// Opens the snapshots of the folder, `checkpoint-<step>`. Each process of `group` calls it.
    ///
    /// # Errors
    /// [`overdrive_snapshot::Error::Locked`] if another run writes there.
    pub fn snapshots(
        &self,
        group: &ProcessGroup,
        arguments: &TrainingArguments,
    ) -> Result<SnapshotManager> {
        // A rank that returned an error here would leave the others waiting: the manager fails on all of them.
        let lock = group.is_main().then(|| self.lock().ok()).flatten();
        let options = SnapshotOptions {
            lock,
            ..arguments.snapshot_options()
        };
        let ranks = Box::new(group.clone());
        Ok(SnapshotManager::with_ranks(self.root(), options, ranks)?)
    }
}

impl TrainingArguments {
    /// Returns the snapshot that `resume_from_checkpoint` selects; `None` for a new run, and if there is no
    /// snapshot yet. Each process of the run calls it, with the fingerprints of its inputs.
    ///
    /// # Errors
    /// An error if the named snapshot is damaged, if there are snapshots and all of them are, or if a file cannot be
    /// read; [`Error::InputsDiffer`](crate::Error::InputsDiffer) if the snapshot was saved with other inputs and
    /// `resume_with_changes` is not set.
    pub fn snapshot_to_resume(
        &self,
        snapshots: &SnapshotManager,
        fingerprints: &Fingerprints,
    ) -> Result<Option<Snapshot>> {
        let found = match &self.resume_from_checkpoint {
            None | Some(ResumeFromCheckpoint::Latest(false)) => None,
            Some(ResumeFromCheckpoint::Latest(true)) => snapshots.latest()?,
            Some(ResumeFromCheckpoint::Folder(folder)) => Some(snapshots.open_snapshot(folder)?),
        };
        if let Some(snapshot) = &found
            && let Some(warning) = fingerprints.check(snapshot, self)?
            && snapshots.is_main()
        {
            tracing::warn!("{warning}");
        }
        Ok(found)
    }

    /// Returns the plan of a run over the data of `loader`. With a snapshot, the loader goes to its position, stored
    /// under the name `loader`, and the plan is that of the rest of the run.
    ///
    /// # Errors
    /// An error if the loader has no batches, or the snapshot has no such entry or is one of other data.
    pub(super) fn plan_from<B: OnDevice>(
        &self,
        loader: &mut DeviceLoader<B>,
        snapshot: Option<&Snapshot>,
    ) -> Result<TrainingPlan> {
        let batches = loader.batches_per_epoch();
        let expected = "a loader with at least one batch; its data has no records, or with `drop_last` fewer than a batch";
        check_option(batches > 0, "loader", "without batches", expected)?;
        let plan = self.plan(batches as u64)?;
        let Some(snapshot) = snapshot else {
            return Ok(plan);
        };
        loader.load_state_dict(snapshot.document("loader", Scope::Run, 0)?)?;
        Ok(plan.resumed(snapshot.step(), loader.state_dict()))
    }
}

/// The snapshot with the best metric.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BestModel {
    /// The step of the snapshot.
    pub step: u64,
    /// The value of `metric_for_best_model` at this step.
    pub metric: f64,
    /// The name of that metric, without the prefix `eval_`.
    pub name: String,
}

impl std::fmt::Display for BestModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "eval_{} {:.3} at step {}",
            self.name, self.metric, self.step
        )
    }
}

/// Loads the weights of the best snapshot into `parameters`, which were registered under the name `model`,
/// and on rank 0 its averages into `ema`, registered under that name. Returns its step and its metric; `None` if no
/// snapshot has a metric. Each process of `group` calls it.
///
/// # Errors
/// An error if the snapshot is damaged or of another model, or a process is lost.
pub(crate) fn load_best(
    arguments: &TrainingArguments,
    snapshots: &SnapshotManager,
    group: &ProcessGroup,
    parameters: &[(String, Tensor)],
    ema: Option<&mut Ema>,
) -> Result<Option<BestModel>> {
    // Handles: the copy writes through to the model's own parameters.
    let targets = shared(parameters);
    // Only rank 0 reads the file; the broadcast gives the others the same weights.
    let found = group.on_main("load the best snapshot", || -> Result<_> {
        let Some(best) = snapshots.best()? else {
            return Ok(None);
        };
        let Some(metric) = best.metric() else {
            return Ok(None);
        };
        best.copy_into("model", Scope::Run, 0, targets)?;
        if let Some(ema) = ema {
            ema.load_state_dict(&best.state("ema", Scope::Run, 0)?)?;
        }
        Ok(Some(BestModel {
            step: best.step(),
            metric,
            name: arguments.best_metric().to_owned(),
        }))
    })?;
    // All parameters are broadcast: they are replicated even if optimizer states are sharded.
    for (_, parameter) in parameters {
        group.broadcast(parameter, 0)?;
    }
    Ok(found)
}

/// Returns the counters of a loader, for [`overdrive_profiling::StepRecorder::loader`].
pub(crate) fn loader_totals<B: OnDevice>(loader: &DeviceLoader<B>) -> LoaderTotals {
    let stats = loader.stats();
    LoaderTotals {
        batches: stats.batches,
        wait: stats.wait,
        longest_wait: stats.longest_wait,
        ready: stats.ready,
        failed_records: stats.failed_records,
    }
}
