//! The snapshots and metrics of a run folder.

use overdrive_datasets::{DeviceLoader, OnDevice};
use overdrive_distributed::ProcessGroup;
use overdrive_optim::Ema;
use overdrive_profiling::LoaderTotals;
use overdrive_snapshot::{Scope, Snapshot, SnapshotManager};
use overdrive_tracking::{JsonLines, TensorBoard, Trackers};
use tch::Tensor;

use crate::{ReportTo, Result, ResumeFromCheckpoint, RunFolder, TrainingArguments};

impl RunFolder {
    /// Opens the folder's snapshots, `checkpoint-<step>`. Each process of `group` calls it.
    ///
    /// # Errors
    /// [`overdrive_snapshot::Error::Locked`] while another run writes there.
    pub fn snapshots(
        &self,
        group: &ProcessGroup,
        arguments: &TrainingArguments,
    ) -> Result<SnapshotManager> {
        let (ranks, options) = (Box::new(group.clone()), arguments.snapshot_options());
        Ok(SnapshotManager::with_ranks(self.root(), options, ranks)?)
    }

    /// Opens `metrics.jsonl`, and what `report_to` names, on rank 0; the other ranks track nothing. A run
    /// that resumes after `resumed_step` keeps the lines up to it; a new one (0) begins the file anew.
    ///
    /// # Errors
    /// When a file cannot be made.
    pub fn trackers(
        &self,
        group: &ProcessGroup,
        arguments: &TrainingArguments,
        resumed_step: u64,
    ) -> Result<Trackers> {
        if !group.is_main() {
            return Ok(Trackers::new());
        }
        let mut trackers = Trackers::new().with(JsonLines::resume(self.metrics(), resumed_step)?);
        if arguments.reports_to(ReportTo::TensorBoard) {
            trackers = trackers.with(TensorBoard::create(self.tensorboard())?);
        }
        Ok(trackers)
    }
}

impl TrainingArguments {
    /// Finds the snapshot that `resume_from_checkpoint` means; `None` for a new run, and where there is no
    /// snapshot yet. Each process of the run calls it.
    ///
    /// # Errors
    /// When the snapshot that is named is damaged, or the folder cannot be read.
    pub fn snapshot_to_resume(&self, snapshots: &SnapshotManager) -> Result<Option<Snapshot>> {
        Ok(match &self.resume_from_checkpoint {
            None | Some(ResumeFromCheckpoint::Latest(false)) => None,
            Some(ResumeFromCheckpoint::Latest(true)) => snapshots.latest()?,
            Some(ResumeFromCheckpoint::Folder(folder)) => Some(Snapshot::open(folder)?),
        })
    }
}

/// Copies the weights of the best snapshot into `parameters`, which were registered under the name `model`,
/// and on rank 0 its averages into `ema`, registered under that name. Returns its step; `None` where no
/// snapshot has a metric. Each process of `group` calls it.
///
/// # Errors
/// When the snapshot is damaged or of another model, or a process is lost.
pub fn load_best(
    snapshots: &SnapshotManager,
    group: &ProcessGroup,
    parameters: &[(String, Tensor)],
    ema: Option<&mut Ema>,
) -> Result<Option<u64>> {
    let handles = parameters.iter();
    let targets = handles.map(|(name, tensor)| (name.clone(), tensor.shallow_clone()));
    let step = group.on_main("load the best snapshot", || -> Result<_> {
        let Some(best) = snapshots.best()? else {
            return Ok(None);
        };
        best.copy_into("model", Scope::Run, 0, targets)?;
        if let Some(ema) = ema {
            ema.load_state_dict(&best.state("ema", Scope::Run, 0)?)?;
        }
        Ok(Some(best.step()))
    })?;
    for (_, parameter) in parameters {
        group.broadcast(parameter, 0)?;
    }
    Ok(step)
}

/// Returns what a loader has done so far, for [`overdrive_profiling::StepRecorder::loader`].
pub fn loader_totals<B: OnDevice>(loader: &DeviceLoader<B>) -> LoaderTotals {
    let stats = loader.stats();
    LoaderTotals {
        batches: stats.batches,
        wait: stats.wait,
        longest_wait: stats.longest_wait,
        ready: stats.ready,
        failed_records: stats.failed_records,
    }
}
