//! Destinations for the metrics of a run: JSON Lines, TensorBoard, MLflow, Weights & Biases, the terminal, a report.
//!
//! Works with any training loop in Rust, with or without the rest of Overdrive, like Lightning's loggers and Hugging
//! Face's callbacks in Python. [overdrive-profiling](overdrive_profiling) measures, and this crate
//! records:
//!
//! - [`StepMetrics`] is the record of a step; [`StepMetrics::apply`] copies the measurements of a step into it, and
//!   [`read_metrics`] reads a file of records back;
//! - [`Tracker`]s take the records: [`JsonLines`], [`TensorBoard`], [`TerminalTable`], several at once with
//!   [`Trackers`], or your own; with features `MlFlow`, which sends them to an MLflow server, and `Wandb`, which writes
//!   an offline run of Weights & Biases;
//! - [`TrainingProgress`] shows the run at the terminal and in logs;
//! - [`Report`] writes an HTML page about the run.
//!
//! ```
//! use overdrive_profiling::{Machine, Phase, StepRecorder, StepRecorderConfig, StepWork};
//! use overdrive_tracking::{
//!     JsonLines, Report, StepMetrics, TensorBoard, Tracker, Trackers, TrainingProgress, read_metrics,
//! };
//!
//! let folder = tempfile::tempdir()?;
//! let metrics_file = folder.path().join("metrics.jsonl");
//! let mut trackers = Trackers::new()
//!     .with(JsonLines::create(&metrics_file)?)
//!     .with(TensorBoard::create(folder.path().join("tensorboard"))?);
//! let mut progress = TrainingProgress::new(3);
//! let mut recorder = StepRecorder::new(StepRecorderConfig::default())?;
//!
//! for step in 1..=3 {
//!     recorder.begin_step();
//!     let loss = recorder.phase(Phase::Forward, || 8.3 / step as f64);
//!     recorder.phase(Phase::Backward, || { /* the gradients */ });
//!     recorder.end_step(StepWork { tokens: 2048, samples: 8 });
//!     let mut metrics = StepMetrics { step, loss, learning_rate: 1e-3, ..Default::default() };
//!     // On a CPU, a step is finished when it ends.
//!     for record in recorder.finish()? {
//!         metrics.apply(&record);
//!     }
//!     trackers.log(&metrics)?;
//!     progress.update(&metrics);
//! }
//! trackers.finish()?;
//! progress.finish();
//!
//! let report = Report {
//!     title: "Three steps".into(),
//!     metrics: read_metrics(&metrics_file)?.records,
//!     machine: Some(Machine::detect()),
//!     ..Default::default()
//! };
//! report.write_html(folder.path().join("report.html"))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | feature | default | adds |
//! |---|---|---|
//! | `mlflow` | no | the tracker `MlFlow`: HTTP and TLS |
//! | `wandb` | no | the tracker `Wandb` |

#![deny(missing_docs)]
#![forbid(unsafe_code)]

mod append_file;
mod error;
mod json_lines;
#[cfg(feature = "mlflow")]
mod mlflow;
mod progress;
mod report;
mod step_metrics;
mod tensor_board;
mod terminal_table;
mod tracker;
#[cfg(feature = "wandb")]
mod wandb;

pub use error::{Error, Result};
pub use json_lines::JsonLines;
#[cfg(feature = "mlflow")]
pub use mlflow::{MlFlow, MlFlowOptions};
pub use progress::TrainingProgress;
pub use report::{Report, Sample};
pub use step_metrics::{MetricsFile, StepMetrics, read_metrics};
pub use tensor_board::TensorBoard;
pub use terminal_table::TerminalTable;
pub use tracker::{Tracker, Trackers};
#[cfg(feature = "wandb")]
pub use wandb::{Wandb, WandbOptions};
