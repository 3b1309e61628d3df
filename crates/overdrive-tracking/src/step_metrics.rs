//! The record of one optimizer step.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use overdrive_core::Error as CommonError;
use overdrive_profiling::{GpuSample, LoaderMetrics, MemoryUsage, PhaseSeconds, StepRecord};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use crate::{Error, Result};

/// What is known about one optimizer step: one line of `metrics.jsonl`.
///
/// Absent optional fields are left out of the line. A number that is not finite (the loss of a run
/// that blew up) is written as `null`, because JSON has no NaN and a line that other tools refuse
/// would be worse; `null` reads back as NaN, so infinity does not survive the file.
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
    /// Optimizer steps done, this one included: the first step is 1.
    pub step: u64,
    /// Mean training loss of the step, in nats a token; NaN where the step had none.
    #[serde(deserialize_with = "null_is_nan")]
    pub loss: f64,
    /// The learning rate that this step used (of the first parameter group).
    #[serde(deserialize_with = "null_is_nan")]
    pub learning_rate: f64,
    /// Training tokens a second, of this step or smoothed as the caller chooses.
    #[serde(deserialize_with = "null_is_nan")]
    pub tokens_per_second: f64,
    /// The most bytes of tensors that were alive at once since the run began, on the training device.
    pub peak_memory_bytes: u64,
    /// Passes over the training data, as a fraction: 1.5 is the middle of the second one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<f64>,
    /// Global norm of the gradients before clipping.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "null_is_some_nan"
    )]
    pub grad_norm: Option<f64>,
    /// The gradient scaler's factor, where one is used.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "null_is_some_nan"
    )]
    pub loss_scale: Option<f64>,
    /// Training tokens since the run began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens_seen: Option<u64>,
    /// Seconds of wall time since the run began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub elapsed_seconds: Option<f64>,
    /// Model FLOPs utilisation: the part of the device's peak that the model's own arithmetic used,
    /// 0 to 1. See [`ModelFlops`](overdrive_profiling::ModelFlops).
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "null_is_some_nan"
    )]
    pub mfu: Option<f64>,
    /// Mean validation loss in nats a token, where this step was followed by an evaluation.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "null_is_some_nan"
    )]
    pub eval_loss: Option<f64>,
    /// Validation loss in bits a byte of the original text, which compares across tokenizers.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "null_is_some_nan"
    )]
    pub eval_bits_per_byte: Option<f64>,
    /// Wall time by phase.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase_seconds: Option<PhaseSeconds>,
    /// Device time by phase, where the device has its own clock
    /// ([`StepTimer::with_events`](overdrive_profiling::StepTimer::with_events)): of the step before, or one before
    /// that, because nothing waits for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_phase_seconds: Option<PhaseSeconds>,
    /// Training samples (sequences, images) a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub samples_per_second: Option<f64>,
    /// Optimizer steps a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steps_per_second: Option<f64>,
    /// Memory of the device and of the process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryUsage>,
    /// What the GPU says of itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<GpuSample>,
    /// What the data loader did for the step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loader: Option<LoaderMetrics>,
    /// The part of the batches' places that was padding, 0 to 1, where there was any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub padding: Option<f64>,
    /// Anything else worth a column: `metrics.extra.insert("gpu_utilization".into(), 0.93.into())`.
    /// Numbers among them become TensorBoard scalars.
    #[serde(flatten)]
    pub extra: BTreeMap<String, Value>,
}

impl StepMetrics {
    /// Copies what a [`StepRecorder`](overdrive_profiling::StepRecorder) measured: times, rates, memory, the GPU and
    /// the loader. Step, loss, learning rate and the other fields keep their values.
    pub fn apply(&mut self, record: &StepRecord) {
        self.tokens_per_second = record.tokens_per_second;
        self.samples_per_second = (record.work.samples > 0).then_some(record.samples_per_second);
        self.steps_per_second = Some(record.steps_per_second);
        self.mfu = record.mfu;
        self.phase_seconds = Some(record.phases);
        self.device_phase_seconds = record.device_phases.map(|phases| phases.seconds);
        self.peak_memory_bytes = record.memory.peak_allocated_bytes.unwrap_or(0);
        self.memory = Some(record.memory);
        self.gpu = record.gpu;
        self.loader = record.loader;
    }

    /// The record as one line of JSON, without the line break.
    ///
    /// # Errors
    /// [`Error::NotJson`] where an extra value has no JSON form.
    pub fn to_json_line(&self) -> Result<String> {
        serde_json::to_string(self).map_err(|source| Error::NotJson {
            step: self.step,
            source,
        })
    }

    /// The finite numbers of the record by their TensorBoard tag, named as Hugging Face's trainer
    /// names them: `train/loss`, `train/learning_rate`, …, `eval/loss`. Not-finite numbers are left
    /// out: TensorBoard's charts cannot show them.
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
    /// The last line, where it is cut off: what a machine that lost power leaves behind. It is in
    /// none of the records.
    pub truncated: Option<String>,
}

/// Reads a metrics file back. Empty lines are passed over; a last line without its line break that
/// is not a whole record is handed back as [`MetricsFile::truncated`] instead of failing.
///
/// # Errors
/// [`overdrive_core::Error::Io`] where the file cannot be read, [`Error::InvalidRecord`] with the line number where any
/// other line is no record.
pub fn read_metrics(path: impl AsRef<Path>) -> Result<MetricsFile> {
    let path = path.as_ref();
    let bytes = fs::read(path).map_err(CommonError::io("read", path))?;
    let mut file = MetricsFile::default();
    let ends_whole = bytes.last().is_none_or(|&byte| byte == b'\n');
    let mut lines = bytes.split(|&byte| byte == b'\n').enumerate().peekable();
    while let Some((index, line)) = lines.next() {
        if line.trim_ascii().is_empty() {
            continue;
        }
        match serde_json::from_slice(line) {
            Ok(record) => file.records.push(record),
            Err(_) if lines.peek().is_none() && !ends_whole => {
                file.truncated = Some(String::from_utf8_lossy(line).into_owned());
            }
            Err(source) => {
                return Err(Error::InvalidRecord {
                    path: path.to_owned(),
                    line: index + 1,
                    source,
                });
            }
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
    // An absent key is `None` by `default`; a key that is there holds a number or stood for one.
    null_is_nan(deserializer).map(Some)
}
