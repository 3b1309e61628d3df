//! The trackers of a run folder.

use overdrive_distributed::ProcessGroup;
use overdrive_tracking::{JsonLines, TensorBoard, Trackers};
#[cfg(feature = "mlflow")]
use overdrive_tracking::{MlFlow, MlFlowOptions};
#[cfg(feature = "wandb")]
use overdrive_tracking::{Wandb, WandbOptions};

use super::folder::RunFolder;
#[cfg(feature = "mlflow")]
use super::folder::ignore_missing;
use crate::Result;
use crate::arguments::{ReportTo, TrainingArguments};

impl RunFolder {
    /// Opens `metrics.jsonl` and the destinations of `report_to` on rank 0; the other ranks track nothing. A
    /// run that resumes from `resumed_step` keeps the lines up to it; a new run (0) truncates the file.
    ///
    /// The options of MLflow and W&B are those of their environment variables (`MlFlowOptions::from_env` and
    /// `WandbOptions::from_env` of overdrive-tracking); the name of the run is that of the folder, and the configuration in
    /// the folder is logged with it.
    ///
    /// # Errors
    /// An error if a file cannot be created, or the address of the MLflow server is missing, and
    /// [`overdrive_snapshot::Error::Locked`] if another run writes there.
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
        #[cfg(feature = "mlflow")]
        if arguments.reports_to(ReportTo::MlFlow) {
            trackers = trackers.with(self.mlflow(resumed_step)?);
        }
        #[cfg(feature = "wandb")]
        if arguments.reports_to(ReportTo::Wandb) {
            trackers = trackers.with(self.offline_wandb(resumed_step)?);
        }
        Ok(trackers)
    }

    #[cfg(feature = "mlflow")]
    fn mlflow(&self, resumed_step: u64) -> Result<MlFlow> {
        if resumed_step == 0 {
            // A run that starts again from its beginning, since it has no snapshot, is a new one.
            ignore_missing(std::fs::remove_file(self.mlflow_run_id()))
                .map_err(overdrive_core::Error::io("remove", self.mlflow_run_id()))?;
        }
        Ok(MlFlow::start(MlFlowOptions {
            run_name: self.name(),
            run_id_file: Some(self.mlflow_run_id()),
            config: self.configuration()?,
            ..MlFlowOptions::from_env()
        })?)
    }

    #[cfg(feature = "wandb")]
    fn offline_wandb(&self, resumed_step: u64) -> Result<Wandb> {
        let from_env = WandbOptions::from_env();
        let options = WandbOptions {
            name: from_env.name.or_else(|| self.name()),
            config: self.configuration()?,
            ..from_env
        };
        Ok(match resumed_step {
            0 => Wandb::create(self.root(), options)?,
            step => Wandb::resume(self.root(), step, options)?,
        })
    }

    /// Returns the name of the folder.
    #[cfg(any(feature = "mlflow", feature = "wandb"))]
    fn name(&self) -> Option<String> {
        // The path may be `.`, which has no name.
        let path = self.root().canonicalize().ok()?;
        Some(path.file_name()?.to_string_lossy().into_owned())
    }

    /// Returns the configuration that the folder holds, which is that of the program: of training or of fine-tuning.
    #[cfg(any(feature = "mlflow", feature = "wandb"))]
    fn configuration(&self) -> Result<serde_json::Map<String, serde_json::Value>> {
        let path = self.arguments();
        let text = overdrive_core::text::read_optional(&path)?;
        let text = text.as_deref().unwrap_or("{}");
        Ok(serde_json::from_str(text).map_err(overdrive_core::Error::parse("JSON", path))?)
    }
}
