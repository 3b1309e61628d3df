//! The configuration of a training run.

use std::path::PathBuf;

use overdrive_datasets::PackingStrategy;
use overdrive_optim::{LrSchedulerType, ScheduleOptions};
use overdrive_transformer::AttentionImplementation;
use serde::{Deserialize, Deserializer, Serialize};

use crate::{
    DdpBackend, GradientCheckpointingArguments, ModelArguments, Preset, ResumeFromCheckpoint,
    SampleBy, SaveStrategy, SequenceMode,
};

/// The default of `length_column_name`, as in transformers.
pub(crate) const DEFAULT_LENGTH_COLUMN: &str = "length";

/// The configuration of a training run, under the keys of Hugging Face's `TrainingArguments`
/// (transformers 5) and with its defaults; the keys about model and data are Overdrive's own.
///
/// It is read from a file, flags and a preset by [`TrainArgs::resolve`](crate::TrainArgs::resolve) or
/// [`Layers`](crate::Layers), which also accept older and alternative names of some keys (`max_seq_length`,
/// `evaluation_strategy`), and return an error for keys of Hugging Face that Overdrive does not support.
/// Plain serde reads it too, with serde's own errors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainingArguments {
    /// The preset, whose values hold unless file or flags override them.
    pub preset: Preset,
    /// The folder of the run. Default: a new one under `runs/`.
    pub output_dir: Option<PathBuf>,
    /// If `true`, a run that `output_dir` holds is replaced. Default `false`.
    pub overwrite_output_dir: bool,
    /// The seed of all random numbers: weights, order of the data, samples. Default 42.
    pub seed: u64,

    /// The text to train on: files or folders of text, JSON Lines, JSON arrays, CSV, TSV, and with the
    /// feature `parquet` Parquet and Arrow. Default: the Rust source code that Cargo keeps.
    #[serde(deserialize_with = "one_or_many")]
    pub data: Vec<PathBuf>,
    /// The column or field of a record that holds its text (also `text_column`). Default `text`.
    pub dataset_text_field: String,
    /// The documents of a text file: the whole file, or each line. Default `document`.
    pub sample_by: SampleBy,
    /// If `true`, documents that are equal to an earlier one are removed before tokenization. Default `false`.
    pub remove_duplicates: bool,
    /// The path of a `tokenizer.json`. Default: a byte-level BPE of `vocab_size` tokens is trained on the data; a
    /// resumed run uses that of its snapshot.
    pub tokenizer: Option<PathBuf>,
    /// The vocabulary size of the tokenizer that is trained if none is given. Default 4096.
    pub vocab_size: u64,
    /// The number of tokens in a training sequence (also `max_seq_length`, `max_length`). Default 256.
    pub context_length: u64,
    /// The fraction of the documents that is held out for validation, above 0 and below 1. Default 0.05.
    pub validation_fraction: f64,
    /// The kind of a training sequence: a window of the concatenated documents, or a document. Default:
    /// windows, unless `packing`, `padding_free`, `group_by_length` or `pad_to_multiple_of` needs documents.
    pub sequences: Option<SequenceMode>,
    /// If `true`, as many documents as fit are packed into a row. Default `false`.
    pub packing: bool,
    /// The assignment of documents to rows: `bfd`, `bfd_split` or `wrapped`. Default `bfd`.
    pub packing_strategy: PackingStrategy,
    /// If `true`, the documents of a batch are concatenated instead of padded. Default `false`.
    pub padding_free: bool,
    /// The padded length of a batch is rounded up to a multiple of this. Default 1.
    pub pad_to_multiple_of: usize,
    /// If `true`, documents of similar lengths form a batch (`train_sampling_strategy: group_by_length` in
    /// transformers 5). Default `false`.
    pub group_by_length: bool,
    /// A column of numbers that replaces the token counts in `group_by_length`, if the records have it;
    /// without `group_by_length` it has no effect. Default `length`.
    pub length_column_name: String,
    /// The number of threads that prepare batches; with 0 each batch is prepared on request. The batches do
    /// not depend on it. Default 0; 1 in the presets.
    pub dataloader_num_workers: usize,
    /// The number of batches that each worker prepares ahead. Default: 2.
    pub dataloader_prefetch_factor: Option<usize>,
    /// If `true`, batches are copied to a GPU from page-locked memory, concurrently with computation. Default
    /// `true`.
    pub dataloader_pin_memory: bool,
    /// If `true`, the last batch of an epoch is dropped if it has fewer rows. Default `false`.
    pub dataloader_drop_last: bool,
    /// The shape of the model.
    pub model: ModelArguments,

    /// The number of optimizer steps; overrides `num_train_epochs` if it is above 0. Default -1.
    pub max_steps: i64,
    /// The number of epochs, if `max_steps` is not above 0. Default 3.
    pub num_train_epochs: f64,
    /// The number of sequences in a micro-batch, per device. Default 8.
    pub per_device_train_batch_size: u64,
    /// If `true`, `per_device_train_batch_size` is the largest micro-batch to try: the run takes the largest that fits
    /// into the free memory by the estimate, and at most half of it whenever memory runs out. The effective batch stays
    /// the same. Default `false`.
    pub auto_find_batch_size: bool,
    /// The number of sequences in an evaluation batch, per device. Default 8.
    pub per_device_eval_batch_size: u64,
    /// The number of micro-batches in an optimizer step; the last step of an epoch has the rest. Default 1.
    pub gradient_accumulation_steps: u64,

    /// The optimizer.
    pub optim: OptimizerName,
    /// The highest learning rate of the schedule. Default 5e-5.
    pub learning_rate: f64,
    /// The decoupled weight decay of matrices and embeddings (not of norms and biases). Default 0.
    pub weight_decay: f64,
    /// If `true`, embeddings and a head that shares their table decay, as in transformers. Default: `true`.
    pub decay_embeddings: bool,
    /// The β₁ of AdamW. Default 0.9.
    pub adam_beta1: f64,
    /// The β₂ of AdamW. Default 0.999.
    pub adam_beta2: f64,
    /// The ε of AdamW. Default 1e-8.
    pub adam_epsilon: f64,
    /// The decay of an exponential moving average of the weights, at least 0 and below 1. The average is
    /// evaluated, and saved as `model_ema`. Default: no average.
    pub ema_decay: Option<f64>,
    /// The global norm to which larger gradients are scaled down; 0 for no clipping. Default 1.
    pub max_grad_norm: f64,
    /// The learning-rate schedule. Default `linear`.
    pub lr_scheduler_type: LrSchedulerType,
    /// The options of the schedule.
    pub lr_scheduler_kwargs: ScheduleOptions,
    /// The warm-up as a fraction of all steps, 0 to 1. Default 0.
    pub warmup_ratio: f64,
    /// The number of warm-up steps; below 1 a fraction of all steps. Overrides `warmup_ratio` if above 0.
    /// Default 0.
    pub warmup_steps: f64,

    /// The attention kernel: `eager`, `sdpa` or `flash_attention_2`. Default `flash_attention_2`.
    #[serde(with = "crate::execution_arguments::attention_by_name")]
    pub attn_implementation: AttentionImplementation,
    /// If `true`, norms, rotary embeddings, gates and the loss use one fused kernel each (the equivalent of
    /// `use_liger_kernel`). Default `true`.
    pub fused_kernels: bool,
    /// If `true`, backward recomputes the activations of the blocks instead of storing them. Default `false`.
    pub gradient_checkpointing: bool,
    /// The options of `gradient_checkpointing`.
    pub gradient_checkpointing_kwargs: GradientCheckpointingArguments,

    /// If `true`, [`choose_precision`](Self::choose_precision) trains in the recommended precision of the device,
    /// unless `bf16`, `fp16` or `tf32` is set. Default `true`.
    pub auto_precision: bool,
    /// If `true`, autocast to bfloat16 is on. Default `false`.
    pub bf16: bool,
    /// If `true`, autocast to float16 with loss scaling is on. Default `false`.
    pub fp16: bool,
    /// If `true`, CUDA matmuls use TensorFloat-32. Default: libtorch's setting.
    pub tf32: Option<bool>,
    /// The backend between processes: `gloo` (CPUs) or `nccl` (GPUs). Default: `nccl` if there are GPUs, else `gloo`;
    /// several processes on GPUs without the feature `nccl` are refused.
    pub ddp_backend: Option<DdpBackend>,
    /// The size of a bucket of gradients in MiB. Default 25.
    pub ddp_bucket_cap_mb: Option<f64>,
    /// If `true`, each backward pass is searched for parameters that it does not reach. Default `false`.
    pub ddp_find_unused_parameters: Option<bool>,
    /// If `true`, every backward pass uses the same parameters as the first one, which saves the search for
    /// parameters that it does not reach. Default `false`.
    pub ddp_static_graph: Option<bool>,
    /// If `true`, the buffers of rank 0 are copied to all processes before each forward pass. Default `true`.
    pub ddp_broadcast_buffers: Option<bool>,
    /// The timeout of a collective in seconds. Default 1800.
    pub ddp_timeout: f64,
    /// The training state that is sharded over the processes, as in DeepSpeed: 0 for none, 1 for the optimizer
    /// states (ZeRO-1). Default 0.
    pub zero_stage: u8,
    /// If `true`, training runs on the CPU even if there is a GPU. Default `false`.
    pub use_cpu: bool,
    /// The number of threads inside one operator. Default: libtorch's choice.
    pub threads: Option<usize>,
    /// If `true`, libtorch's operators take numbers below 2⁻¹²⁶ for zero on a CPU, as Overdrive's kernels always do
    /// ([`set_flush_denormals`](overdrive_sys::denormals::set_flush_denormals)). Default `true`.
    pub flush_denormals: bool,

    /// The times of an evaluation on the validation data. Default `no`.
    pub eval_strategy: IntervalStrategy,
    /// The number of steps between evaluations; below 1 a fraction of all steps. Default: `logging_steps`.
    pub eval_steps: Option<f64>,
    /// If `true`, there is also an evaluation before the first step. Default `false`.
    pub eval_on_start: bool,
    /// The maximum number of batches in an evaluation. Default: all validation data.
    pub max_eval_batches: Option<u64>,
    /// The times of a snapshot, from which a run can be resumed: `no`, `steps`, `epoch`, or `best`, whenever
    /// `metric_for_best_model` improves. Default `steps`.
    pub save_strategy: SaveStrategy,
    /// The number of steps between snapshots; below 1 a fraction of all steps. There is always one after the
    /// last step. Default 500.
    pub save_steps: f64,
    /// The number of snapshots to keep; the newest and, with evaluations, the best are always kept. Default: all.
    pub save_total_limit: Option<usize>,
    /// The snapshot to resume from: `true` for the newest complete one in `output_dir` (a new run if there is
    /// none), or its folder. Default: a new run.
    pub resume_from_checkpoint: Option<ResumeFromCheckpoint>,
    /// If `true`, a run resumes although its data, its tokenizer or an argument that the snapshot depends on has
    /// changed. Default `false`: the differences are an error.
    pub resume_with_changes: bool,
    /// If `true`, the weights of the best snapshot are loaded at the end. Default `false`.
    pub load_best_model_at_end: bool,
    /// The metric that determines the best snapshot: `loss`, or `bits_per_byte` where the bytes of the text are known
    /// (not in fine-tuning), of the evaluations; also with the prefix `eval_`. Default `loss`.
    pub metric_for_best_model: Option<String>,
    /// If `true`, a greater value of that metric is better. Default `false`.
    pub greater_is_better: Option<bool>,
    /// The number of consecutive evaluations without improvement after which the run ends. Default: never.
    pub early_stopping_patience: Option<u32>,
    /// The minimum improvement that counts. Default 0.
    pub early_stopping_threshold: f64,
    /// The number of steps between log lines; below 1 a fraction of all steps. Default 500.
    pub logging_steps: f64,
    /// The destinations of metrics besides `metrics.jsonl`: `tensorboard`, `all` or `none`. Default `none`.
    #[serde(deserialize_with = "report_to")]
    pub report_to: Vec<ReportTo>,
    /// The path of a Chrome trace (chrome://tracing, Perfetto) of the sixth to eighth step, recorded by
    /// libtorch's profiler. Default: no trace.
    pub trace: Option<PathBuf>,
    /// If `true`, operators and phases are marked as NVTX ranges for `nsys profile -t cuda,nvtx`. Default `false`.
    pub emit_nvtx: bool,
    /// The number of samples that the trained model generates at the end. Default 3.
    pub samples: u64,
}

impl Default for TrainingArguments {
    fn default() -> Self {
        Self {
            preset: Preset::default(),
            output_dir: None,
            overwrite_output_dir: false,
            seed: 42,
            data: Vec::new(),
            dataset_text_field: "text".to_owned(),
            sample_by: SampleBy::default(),
            remove_duplicates: false,
            tokenizer: None,
            vocab_size: 4096,
            context_length: 256,
            validation_fraction: 0.05,
            sequences: None,
            packing: false,
            packing_strategy: PackingStrategy::default(),
            padding_free: false,
            pad_to_multiple_of: 1,
            group_by_length: false,
            length_column_name: DEFAULT_LENGTH_COLUMN.to_owned(),
            dataloader_num_workers: 0,
            dataloader_prefetch_factor: None,
            dataloader_pin_memory: true,
            dataloader_drop_last: false,
            model: ModelArguments::default(),
            max_steps: -1,
            num_train_epochs: 3.0,
            per_device_train_batch_size: 8,
            auto_find_batch_size: false,
            per_device_eval_batch_size: 8,
            gradient_accumulation_steps: 1,
            optim: OptimizerName::default(),
            learning_rate: 5e-5,
            weight_decay: 0.0,
            decay_embeddings: true,
            adam_beta1: 0.9,
            adam_beta2: 0.999,
            adam_epsilon: 1e-8,
            ema_decay: None,
            max_grad_norm: 1.0,
            lr_scheduler_type: LrSchedulerType::default(),
            lr_scheduler_kwargs: ScheduleOptions::default(),
            warmup_ratio: 0.0,
            warmup_steps: 0.0,
            attn_implementation: AttentionImplementation::default(),
            fused_kernels: true,
            gradient_checkpointing: false,
            gradient_checkpointing_kwargs: GradientCheckpointingArguments::default(),
            auto_precision: true,
            bf16: false,
            fp16: false,
            tf32: None,
            ddp_backend: None,
            ddp_bucket_cap_mb: None,
            ddp_find_unused_parameters: None,
            ddp_static_graph: None,
            ddp_broadcast_buffers: None,
            ddp_timeout: 1800.0,
            zero_stage: 0,
            use_cpu: false,
            threads: None,
            flush_denormals: true,
            eval_strategy: IntervalStrategy::default(),
            eval_steps: None,
            eval_on_start: false,
            max_eval_batches: None,
            save_strategy: SaveStrategy::default(),
            save_steps: 500.0,
            save_total_limit: None,
            resume_from_checkpoint: None,
            resume_with_changes: false,
            load_best_model_at_end: false,
            metric_for_best_model: None,
            greater_is_better: None,
            early_stopping_patience: None,
            early_stopping_threshold: 0.0,
            logging_steps: 500.0,
            report_to: Vec::new(),
            trace: None,
            emit_nvtx: false,
            samples: 3,
        }
    }
}

/// The optimizers of the key `optim`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum OptimizerName {
    /// AdamW with libtorch's fused kernel. Also `adamw_torch`.
    #[default]
    #[serde(alias = "adamw_torch")]
    AdamwTorchFused,
    /// AdamW with 8-bit blockwise states: a quarter of the memory. Also `adamw_bnb_8bit`.
    #[serde(rename = "adamw_8bit", alias = "adamw_bnb_8bit")]
    Adamw8bit,
    /// AdamW with states in host memory (GPU training) or in a mapped file (CPU training). Also
    /// `paged_adamw`.
    #[serde(rename = "paged_adamw_32bit", alias = "paged_adamw")]
    PagedAdamw32bit,
    /// Paged AdamW with 8-bit states.
    #[serde(rename = "paged_adamw_8bit")]
    PagedAdamw8bit,
    /// Lion, with one state per parameter. Also `lion`.
    #[serde(rename = "lion_32bit", alias = "lion")]
    Lion32bit,
    /// Adafactor with a fixed learning rate (no relative step, no parameter scale), as in Hugging Face's
    /// trainer.
    Adafactor,
    /// Stochastic gradient descent without momentum.
    Sgd,
    /// Muon for the matrices of the blocks, AdamW for embeddings, head, norms and biases.
    Muon,
}

/// The times of a recurring action during a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IntervalStrategy {
    /// Never.
    #[default]
    No,
    /// At a fixed number of steps, and at the end.
    Steps,
    /// At the end of each epoch, and at the end.
    Epoch,
}

/// A destination of metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum ReportTo {
    /// TensorBoard event files in the run folder.
    TensorBoard,
}

impl ReportTo {
    /// All destinations.
    pub const ALL: [Self; 1] = [Self::TensorBoard];
}

impl TrainingArguments {
    /// Returns the number of sequences in an optimizer step on one device.
    pub fn sequences_per_step(&self) -> u64 {
        self.per_device_train_batch_size * self.gradient_accumulation_steps
    }

    /// Returns the number of tokens in an optimizer step on one device.
    pub fn tokens_per_step(&self) -> u64 {
        self.sequences_per_step() * self.context_length
    }

    /// Returns `true` if metrics are sent to `destination`.
    pub fn reports_to(&self, destination: ReportTo) -> bool {
        self.report_to.contains(&destination)
    }
}

/// A list, or its only element.
#[derive(Deserialize)]
#[serde(untagged, expecting = "a string or a list of strings")]
enum OneOrMany<T> {
    One(T),
    Many(Vec<T>),
}

fn one_or_many<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<PathBuf>, D::Error> {
    Ok(match OneOrMany::deserialize(deserializer)? {
        OneOrMany::One(path) => vec![path],
        OneOrMany::Many(paths) => paths,
    })
}

fn report_to<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<ReportTo>, D::Error> {
    let names = match Option::<OneOrMany<String>>::deserialize(deserializer)? {
        None => Vec::new(),
        Some(OneOrMany::One(name)) => vec![name],
        Some(OneOrMany::Many(names)) => names,
    };
    let mut destinations = Vec::new();
    for name in names {
        match name.as_str() {
            "none" => {}
            "all" => destinations.extend(ReportTo::ALL),
            "tensorboard" => destinations.push(ReportTo::TensorBoard),
            other => {
                let known = &["tensorboard", "all", "none"];
                return Err(serde::de::Error::unknown_variant(other, known));
            }
        }
    }
    Ok(destinations)
}
