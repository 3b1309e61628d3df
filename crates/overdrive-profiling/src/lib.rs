//! Measurements of the time and the memory of a training step: timers, traces, FLOPs, memory, the GPU.
//!
//! For any training loop in Rust, with or without the rest of Overdrive: what `torch.profiler` and nanoGPT's MFU
//! estimate are to a Python user. [overdrive-tracking] writes the measurements to files and services.
//!
//! - [`StepRecorder`] records a step: the time of each [`Phase`] (on a GPU by events in the device's own
//!   stream, without waiting), tokens, samples and steps per second, MFU, memory, the GPU through NVML, the data
//!   loader ([`DataLoading`]), and the [`Bottleneck`] in a sentence; [`StepTimer`] is its clock alone;
//! - [`profile`] and [`Profiler`] run libtorch's own profiler, over a closure or by a [`Schedule`]; the
//!   [`Trace`] is a table of operators ([`KeyAverages`]) and a file for Chrome and Perfetto; [`emit_nvtx`] marks
//!   operators for Nsight Systems;
//! - [`ModelFlops`] and [`PeakFlops`] turn tokens per second into MFU;
//! - [`free_memory`] returns the memory that is available to a run;
//! - [`Targets`] compares the share of data loading and the GPU utilization of a run with targets;
//! - [`HostReads`] counts the operators with which the host waits for the device, [`OperatorCounts`] their launches
//!   and bytes;
//! - [`Machine`] names the machine that the numbers come from.
//!
//! ```
//! use overdrive_profiling::{Phase, StepRecorder, StepRecorderConfig, StepWork};
//!
//! let mut recorder = StepRecorder::new(StepRecorderConfig::default())?;
//! for _ in 0..3 {
//!     recorder.begin_step();
//!     let batch = recorder.phase(Phase::Data, || [1.0_f64; 64]);
//!     recorder.phase(Phase::Forward, || batch.iter().sum::<f64>());
//!     recorder.end_step(StepWork { tokens: 2048, samples: 8 });
//! }
//! for record in recorder.finish()? {
//!     println!("{record}");
//! }
//! println!("{}", recorder.bottleneck().expect("three steps were measured"));
//! # Ok::<(), overdrive_profiling::Error>(())
//! ```
//!
//! | feature | default | adds |
//! |---|---|---|
//! | `nvml` | no | [`GpuMonitor`] reads NVIDIA's management library; without it, `open` returns an error |
//!
//! [overdrive-tracking]: ../overdrive_tracking/index.html

#![deny(missing_docs)]
#![forbid(unsafe_code)]

mod bottleneck;
mod data_loading;
mod device_timeline;
mod error;
mod free_memory;
mod gpu_monitor;
mod host_reads;
mod machine;
mod memory_usage;
mod model_flops;
mod operator_counts;
mod peak_flops;
mod phase;
mod profiler;
mod schedule;
mod step_record;
mod step_recorder;
mod step_timer;
mod targets;
mod trace;

pub use bottleneck::{Bottleneck, BottleneckThresholds, StepProfile};
pub use data_loading::{DataLoading, LoaderMetrics, LoaderTotals};
#[doc(hidden)]
pub use device_timeline::{DeviceClock, DevicePhases, StandInClock, serve_cpu_with};
pub use error::{Error, Result};
pub use free_memory::free_memory;
pub use gpu_monitor::{GpuMonitor, GpuProcess, GpuSample, NoGpuMonitor};
pub use host_reads::HostReads;
pub use machine::Machine;
pub use memory_usage::MemoryUsage;
pub use model_flops::ModelFlops;
pub use operator_counts::OperatorCounts;
pub use overdrive_sys::profiler::NvtxRanges;
pub use peak_flops::{PeakFlops, PeakSource};
pub use phase::{Phase, PhaseSeconds};
pub use profiler::{Profiler, ProfilerConfig, emit_nvtx, profile, record_function};
pub use schedule::{Schedule, ScheduledAction};
pub use step_record::StepRecord;
pub use step_recorder::{StepRecorder, StepRecorderConfig, StepWork, Timing};
pub use step_timer::{PhaseGuard, StepTimer};
pub use targets::{TargetResult, Targets};
pub use trace::{GroupBy, KeyAverages, OperatorStats, SortBy, Trace, TraceEvent};
