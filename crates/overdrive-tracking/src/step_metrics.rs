//! The record of one optimizer step.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use overdrive_core::Error as CommonError;
use overdrive_profiling::{GpuSample, LoaderMetrics, MemoryUsage, PhaseSeconds, StepRecord};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use crate::{Error, Result};

/// The metrics of one optimizer step: one line of `metrics.jsonl`.
///
/// Absent optional fields are left out of the line. A number that is not finite (the loss of a run
/// that diverged) is written as `null`, because JSON has no NaN and other tools could not read the line.
/// `null` reads back as NaN, so infinity becomes NaN.
///
/// ```
/// use overdrive_tracking::StepMetrics;
///
/// let metrics = StepMetrics { step: 3, loss: 2.5, learning_rate: 1e-3, ..Default::default() };
/// let line = serde_json::to_string(&metrics)?;
/// assert!(line.starts_with(r#"{"step":3,"loss":2.5,"learning_rate":0.001,"#));
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// The number of optimizer steps, including this one: the first step is 1.
    pub step: u64,
    /// The mean training loss of the step, in language modelling in nats per token; NaN if the step had none.
    #[serde(deserialize_with = "null_is_nan")]
    pub loss: f64,
    /// The learning rate of the step (of the first parameter group).
    #[serde(deserialize_with = "null_is_nan")]
    pub learning_rate: f64,
    /// The training tokens per second, of this step or smoothed, as the caller chooses.
    #[serde(deserialize_with = "null_is_nan")]
    pub tokens_per_second: f64,
    /// The peak bytes of live tensors on the training device since the run began.
    pub peak_memory_bytes: u64,
    /// The number of passes over the training data, as a fraction: 1.5 is the middle of the second one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<f64>,
    /// The global norm of the gradients before clipping.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "null_is_some_nan"
    )]
    pub grad_norm: Option<f64>,
    /// The scale of the gradient scaler, if one is used.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "null_is_some_nan"
    )]
    pub loss_scale: Option<f64>,
    /// The number of training tokens since the run began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens_seen: Option<u64>,
    /// The wall time in seconds from the beginning of the run to the end of the step; on a GPU, to the moment at which
    /// the GPU finished the step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub elapsed_seconds: Option<f64>,
    /// The model FLOPs utilization: the fraction of the device's peak that the model's own arithmetic used,
    /// 0 to 1. See [`ModelFlops`](overdrive_profiling::ModelFlops).
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "null_is_some_nan"
    )]
    pub mfu: Option<f64>,
    /// The mean validation loss in the unit of `loss`, if an evaluation followed the step.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "null_is_some_nan"
    )]
    pub eval_loss: Option<f64>,
    /// The validation loss in bits per byte of the original text, which is comparable across tokenizers.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "null_is_some_nan"
    )]
    pub eval_bits_per_byte: Option<f64>,
    /// The host time by phase. The host only launches the work of a GPU and runs ahead of it:
    /// [`time_by_phase`](Self::time_by_phase) is correct for every device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase_seconds: Option<PhaseSeconds>,
    /// The device time by phase, if the device has its own clock
    /// ([`Timing::Events`](overdrive_profiling::Timing::Events)).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_phase_seconds: Option<PhaseSeconds>,
    /// The training samples (sequences, images) a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub samples_per_second: Option<f64>,
    /// The optimizer steps a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steps_per_second: Option<f64>,
    /// The memory of the device and of the process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryUsage>,
    /// The state of the GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<GpuSample>,
    /// The data loading of the step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loader: Option<LoaderMetrics>,
    /// The fraction of the batches' positions that was padding, 0 to 1, if there was any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub padding: Option<f64>,
    /// Other values: `metrics.extra.insert("gpu_utilization".into(), 0.93.into())`.
    /// The numbers among them become TensorBoard scalars.
    #[serde(flatten)]
    pub extra: BTreeMap<String, Value>,
}

impl StepMetrics {
    /// Copies the measurements of a [`StepRecorder`](overdrive_profiling::StepRecorder): times, rates, memory, the GPU
    /// and the loader. Step, loss, learning rate and the other fields keep their values.
    pub fn apply(&mut self, record: &StepRecord) {
        self.tokens_per_second = record.tokens_per_second;
        self.samples_per_second = (record.work.samples > 0).then_some(record.samples_per_second);
        self.steps_per_second = Some(record.steps_per_second);
        self.mfu = record.mfu;
        self.phase_seconds = Some(record.phases);
        self.device_phase_seconds = record.device_phases;
        self.peak_memory_bytes = record.memory.peak_allocated_bytes.unwrap_or(0);
        self.memory = Some(record.memory);
        self.gpu = record.gpu;
        self.loader = record.loader;
    }

    /// Returns the time of the step by phase: that of the device if it has its own clock, else that of the host.
    pub fn time_by_phase(&self) -> Option<PhaseSeconds> {
        self.device_phase_seconds.or(self.phase_seconds)
    }

    /// Returns the record as one line of JSON, without the line break.
    ///
    /// # Errors
    /// [`Error::NotJson`] if JSON cannot represent an extra value.
    pub fn to_json_line(&self) -> Result<String> {
        serde_json::to_string(self).map_err(|source| Error::NotJson {
            step: self.step,
            source,
        })
    }

    /// Returns the finite numbers of the record by their TensorBoard tag, with the names of Hugging Face's
    /// trainer: `train/loss`, `train/learning_rate`, …, `eval/loss`. TensorBoard's charts cannot show
    /// other numbers.
    pub fn scalars(&self) -> Vec<(String, f64)> {
        let mut scalars = Vec::new();
        let mut add = |tag: &str, value: Option<f64>| {
            if let Some(value) = value.filter(|value| value.is_finite()) {
                scalars.push((tag.to_owned(), value));
            }
        };
        add("train/loss", Some(self.loss));
        add("train/learning_rate", Some(self.learning_rate));
        add("train/tokens_per_second", Some(self.tokens_per_second));
        add(
            "train/peak_memory_bytes",
            Some(self.peak_memory_bytes as f64),
        );
        add("train/epoch", self.epoch);
        add("train/grad_norm", self.grad_norm);
        add("train/loss_scale", self.loss_scale);
        add(
            "train/tokens_seen",
            self.tokens_seen.map(|tokens| tokens as f64),
        );
        add("train/elapsed_seconds", self.elapsed_seconds);
        add("train/mfu", self.mfu);
        add("eval/loss", self.eval_loss);
        add("eval/bits_per_byte", self.eval_bits_per_byte);
        add("train/samples_per_second", self.samples_per_second);
        add("train/steps_per_second", self.steps_per_second);
        for (group, seconds) in [
            ("time", self.phase_seconds),
            ("device_time", self.device_phase_seconds),
        ] {
            for (phase, seconds) in seconds.iter().flat_map(PhaseSeconds::shown) {
                add(&format!("{group}/{}_seconds", phase.name()), Some(seconds));
            }
        }
        let memory = self.memory.unwrap_or_default();
        for (name, bytes) in [
            ("allocated", memory.allocated_bytes),
            ("peak_allocated", memory.peak_allocated_bytes),
            ("reserved", memory.reserved_bytes),
            ("resident", memory.resident_bytes),
            ("peak_resident", memory.peak_resident_bytes),
        ] {
            add(
                &format!("memory/{name}_bytes"),
                bytes.map(|bytes| bytes as f64),
            );
        }
        let gpu = self.gpu.unwrap_or_default();
        add("gpu/utilization", gpu.utilization);
        add("gpu/memory_utilization", gpu.memory_utilization);
        let used = gpu.memory_used_bytes.map(|bytes| bytes as f64);
        add("gpu/memory_used_bytes", used);
        add("gpu/temperature_celsius", gpu.temperature_celsius);
        add("gpu/power_watts", gpu.power_watts);
        add("train/padding", self.padding);
        add(
            "data/wait_seconds",
            self.loader.map(|loader| loader.wait_seconds),
        );
        add(
            "data/queue_depth",
            self.loader.map(|loader| loader.queue_depth),
        );
        // Hugging Face's rule: `eval_` names belong to the evaluation, all others to training.
        for (name, value) in &self.extra {
            let tag = match name.strip_prefix("eval_") {
                Some(rest) => format!("eval/{rest}"),
                None => format!("train/{name}"),
            };
            add(&tag, value.as_f64());
        }
        scalars
    }
}

/// The records of a metrics file.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct MetricsFile {
    /// The records, in the order of the file.
    pub records: Vec<StepMetrics>,
    /// The last line, if it is truncated, for example by a power failure. It is not in
    /// the records.
    pub truncated: Option<String>,
    /// The numbers, counted from 1, of the other lines that are no records: notes of other programs, and lines that a
    /// power failure damaged. [`JsonLines::resume`](crate::JsonLines::resume) keeps them.
    pub skipped_lines: Vec<usize>,
}

/// Reads a metrics file. Empty lines are ignored. A last line without a line break that is not a complete record is
/// returned as [`MetricsFile::truncated`]; other lines that are no records are skipped, and their numbers are in
/// [`MetricsFile::skipped_lines`].
///
/// # Errors
/// [`overdrive_core::Error::Io`] if the file cannot be read.
pub fn read_metrics(path: impl AsRef<Path>) -> Result<MetricsFile> {
    let path = path.as_ref();
    let bytes = fs::read(path).map_err(CommonError::io("read", path))?;
    let mut file = MetricsFile::default();
    let is_complete = bytes.last().is_none_or(|&byte| byte == b'\n');
    // By bytes and not as one string: a truncated line may end within a UTF-8 character.
    let mut lines = bytes.split(|&byte| byte == b'\n').enumerate().peekable();
    while let Some((index, line)) = lines.next() {
        if line.trim_ascii().is_empty() {
            continue;
        }
        match serde_json::from_slice(line) {
            Ok(record) => file.records.push(record),
            Err(_) if lines.peek().is_none() && !is_complete => {
                file.truncated = Some(String::from_utf8_lossy(line).into_owned());
            }
            Err(_) => file.skipped_lines.push(index + 1),
        }
    }
    Ok(file)
}

fn null_is_nan<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

fn null_is_some_nan<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> std::result::Result<Option<f64>, D::Error> {
    // An absent key is `None` by `default`; a key that exists has a number, or `null` for NaN.
    null_is_nan(deserializer).map(Some)
}
