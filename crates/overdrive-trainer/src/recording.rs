//! Where the steps of a run are written down.

use overdrive_distributed::ProcessGroup;
use overdrive_profiling::{JsonLines, TensorBoard, Trackers};

use crate::{ReportTo, Result, RunFolder, TrainingArguments};

impl RunFolder {
    /// As [`trackers`](Self::trackers) on rank 0, and none on the others.
    ///
    /// # Errors
    /// As [`trackers`](Self::trackers).
    pub fn trackers_in(
        &self,
        group: &ProcessGroup,
        arguments: &TrainingArguments,
        resumed: u64,
    ) -> Result<Trackers> {
        match group.is_main() {
            true => self.trackers(arguments, resumed),
            false => Ok(Trackers::new()),
        }
    }

    /// `metrics.jsonl`, and what `report_to` names. A run that goes on after step `resumed` keeps the lines up
    /// to it; a new one (0) begins the file anew.
    ///
    /// # Errors
    /// When a file cannot be made.
    pub fn trackers(&self, arguments: &TrainingArguments, resumed: u64) -> Result<Trackers> {
        let mut trackers = Trackers::new().with(JsonLines::resume(self.metrics(), resumed)?);
        if arguments.reports_to(ReportTo::TensorBoard) {
            trackers = trackers.with(TensorBoard::create(self.tensorboard())?);
        }
        Ok(trackers)
    }
}
