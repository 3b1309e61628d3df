//! The trackers of a run folder.

use overdrive_distributed::ProcessGroup;
use overdrive_tracking::{JsonLines, TensorBoard, Trackers};

use super::folder::RunFolder;
use crate::Result;
use crate::arguments::{ReportTo, TrainingArguments};

impl RunFolder {
    /// Opens `metrics.jsonl` and the destinations of `report_to` on rank 0; the other ranks track nothing. A
    /// run that resumes from `resumed_step` keeps the lines up to it; a new run (0) truncates the file.
    ///
    /// # Errors
    /// An error if a file cannot be created, and [`overdrive_snapshot::Error::Locked`] if another run writes there.
    pub fn trackers(
        &self,
        group: &ProcessGroup,
        arguments: &TrainingArguments,
        resumed_step: u64,
    ) -> Result<Trackers> {
        // Metrics are sums over all processes, so one file is enough.
        if !group.is_main() {
            return Ok(Trackers::new());
        }
        self.lock()?;
        if resumed_step > 0
            && let Err(error) = self.keep_abandoned_metrics()
        {
            tracing::warn!("the metrics of the abandoned branch are not kept: {error}");
        }
        // Written regardless of `report_to`, because a resumed run continues this file.
        let mut trackers = Trackers::new().with(JsonLines::resume(self.metrics(), resumed_step)?);
        if arguments.reports_to(ReportTo::TensorBoard) {
            trackers = trackers.with(TensorBoard::create(self.tensorboard())?);
        }
        Ok(trackers)
    }
}
