//! Where the time and the memory of a training step go: metrics, TensorBoard, reports.
//!
//! For any training loop in Rust, with or without the rest of Overdrive. What Lightning's loggers,
//! Hugging Face's `TensorBoardCallback` and nanoGPT's MFU estimate are to a Python user:
//!
//! - [`StepRecorder`] records a step: the time of each [`Phase`] (on a GPU by marks in the device's own
//!   work, without waiting), tokens, samples and steps a second, MFU, memory, the GPU through NVML, and
//!   what holds the step up in a sentence ([`Bottleneck`]), what it waited for ([`DataLoading`]);
//!   [`StepTimer`] is its clock alone;
//! - [`profile`] and [`Profiler`] run libtorch's own profiler, over a closure or by a [`Schedule`]; the
//!   [`Trace`] is a table of operators ([`KeyAverages`]) and a file for Chrome and Perfetto;
//! - [`StepMetrics`] is the record of a step, [`read_metrics`] reads a file of them back;
//! - [`Tracker`]s take the records: [`JsonLines`], [`TensorBoard`], [`TerminalTable`], several at once
//!   with [`Trackers`], or your own;
//! - [`Throughput`], [`ModelFlops`] and [`PeakFlops`] turn tokens and seconds into tokens a second and
//!   MFU;
//! - [`MemoryPlan`] estimates what a run will take before it runs, and what would make it fit;
//! - [`TrainingProgress`] shows the run at the terminal and in logs;
//! - [`Report`] makes a page of it, [`Machine`] names where the numbers come from.
//!
//! ```
//! use std::time::Duration;
//! use overdrive_profiling::{
//!     JsonLines, Machine, Phase, Report, StepMetrics, StepTimer, TensorBoard, Throughput, Tracker,
//!     Trackers, TrainingProgress, read_metrics,
//! };
//!
//! let folder = tempfile::tempdir()?;
//! let metrics_file = folder.path().join("metrics.jsonl");
//! let mut trackers = Trackers::new()
//!     .with(JsonLines::create(&metrics_file)?)
//!     .with(TensorBoard::create(folder.path().join("tensorboard"))?);
//! let mut progress = TrainingProgress::new(3);
//! let mut throughput = Throughput::new(20);
//! let timer = StepTimer::new();
//!
//! for step in 1..=3 {
//!     timer.begin_step();
//!     let loss = timer.phase(Phase::Forward, || 8.3 / step as f64);
//!     timer.phase(Phase::Backward, || { /* the gradients */ });
//!     let phases = timer.end_step();
//!     throughput.record(2048, Duration::from_secs_f64(phases.total()));
//!     let metrics = StepMetrics {
//!         step,
//!         loss,
//!         learning_rate: 1e-3,
//!         tokens_per_second: throughput.tokens_per_second(),
//!         phase_seconds: Some(phases),
//!         ..Default::default()
//!     };
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

#![deny(missing_docs)]
#![forbid(unsafe_code)]

mod bottleneck;
mod data_loading;
mod device_timeline;
mod error;
mod gpu_monitor;
mod gpu_table;
mod json_lines;
mod machine;
mod memory_estimate;
mod memory_usage;
mod model_flops;
mod peak_flops;
mod phase;
mod profiler;
mod progress;
mod report;
mod schedule;
mod step_metrics;
mod step_recorder;
mod step_timer;
mod tensor_board;
mod terminal_table;
mod throughput;
mod trace;
mod tracker;
mod units;

pub use bottleneck::{Bottleneck, BottleneckThresholds, StepProfile};
pub use data_loading::{DataLoading, LoaderMetrics, LoaderTotals};
pub use device_timeline::DevicePhases;
pub use error::{Error, Result};
pub use gpu_monitor::{GpuMonitor, GpuSample, NoGpuMonitor};
pub use json_lines::JsonLines;
pub use machine::Machine;
pub use memory_estimate::{
    Change, DecoderShape, MemoryAdvice, MemoryAttention, MemoryEstimate, MemoryPlan,
    MemoryPrecision, Moment, OptimizerMemory, Recomputation,
};
pub use memory_usage::MemoryUsage;
pub use model_flops::ModelFlops;
pub use peak_flops::{PeakFlops, PeakSource};
pub use phase::{Phase, PhaseSeconds};
pub use profiler::{Profiler, ProfilerConfig, profile, record_function};
pub use progress::TrainingProgress;
pub use report::{Report, Sample};
pub use schedule::{Schedule, ScheduledAction};
pub use step_metrics::{MetricsFile, StepMetrics, read_metrics};
pub use step_recorder::{StepRecord, StepRecorder, StepRecorderConfig, StepWork, Timing};
pub use step_timer::{PhaseGuard, StepTimer};
pub use tensor_board::TensorBoard;
pub use terminal_table::TerminalTable;
pub use throughput::Throughput;
pub use trace::{GroupBy, KeyAverages, OperatorStats, SortBy, Trace, TraceEvent};
pub use tracker::{Tracker, Trackers};
