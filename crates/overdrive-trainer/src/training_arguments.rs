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
/// (transformers 5) and with its defaults; the keys about model and data are ours.
///
/// It is read from a file, flags and a preset by [`TrainArgs::resolve`](crate::TrainArgs::resolve)
/// or [`Layers`](crate::Layers), which also know the older and longer names of some keys
/// (`max_seq_length`, `evaluation_strategy`) and refuse the keys of Hugging Face's that Overdrive
/// cannot do, by name. Plain serde reads it too, with serde's own errors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainingArguments {
    /// The preset whose values stand where file and flags say nothing.
    pub preset: Preset,
    /// The folder of the run. Default: a new one under `runs/`.
    pub output_dir: Option<PathBuf>,
    /// Replaces a run that `output_dir` holds. Default false.
    pub overwrite_output_dir: bool,
    /// Seed of all random numbers: weights, order of the data, samples. Default 42.
    pub seed: u64,

    /// The text to train on: files or folders of text, JSON Lines, JSON arrays, CSV, TSV, and with the
    /// feature `parquet` Parquet and Arrow. Default: the Rust sources that Cargo keeps.
    #[serde(deserialize_with = "one_or_many")]
    pub data: Vec<PathBuf>,
    /// The column or field of a record that holds its text (also `text_column`). Default `text`.
    pub dataset_text_field: String,
    /// The documents of a text file: all of it, or each line. Default `document`.
    pub sample_by: SampleBy,
    /// Leaves out documents that are equal to an earlier one, before they are tokenized. Default false.
    pub remove_duplicates: bool,
    /// A `tokenizer.json`. Default: a byte-level BPE of `vocab_size` tokens is trained on the data.
    pub tokenizer: Option<PathBuf>,
    /// Tokens of the tokenizer that is trained where none is given. Default 4096.
    pub vocab_size: u64,
    /// Tokens of a training sequence (also `max_seq_length`, `max_length`). Default 256.
    pub context_length: u64,
    /// The part of the documents that is kept for validation, above 0 and below 1. Default 0.05.
    pub validation_fraction: f64,
    /// The kind of a training sequence: a window of the documents laid end to end, or a document. Default:
    /// windows, unless `packing`, `padding_free`, `group_by_length` or `pad_to_multiple_of` asks for
    /// documents.
    pub sequences: Option<SequenceMode>,
    /// Puts as many documents into a row as fit. Default false.
    pub packing: bool,
    /// How documents are assigned to rows: `bfd`, `bfd_split` or `wrapped`. Default `bfd`.
    pub packing_strategy: PackingStrategy,
    /// Puts the documents of a batch one after the other instead of padding them. Default false.
    pub padding_free: bool,
    /// Rounds the padded length of a batch up to a multiple of this. Default 1.
    pub pad_to_multiple_of: usize,
    /// Puts documents of about one length into a batch (`train_sampling_strategy: group_by_length` in
    /// transformers 5). Default false.
    pub group_by_length: bool,
    /// A column of numbers that `group_by_length` goes by instead of the tokens, where the records have
    /// it; not used without `group_by_length`. Default `length`.
    pub length_column_name: String,
    /// Threads that prepare batches; 0 prepares each when it is asked for. The batches are the same.
    /// Default 0; 1 in the presets.
    pub dataloader_num_workers: usize,
    /// Batches that each worker prepares ahead. Default: 2.
    pub dataloader_prefetch_factor: Option<usize>,
    /// Copies batches to a GPU from page-locked memory, while it computes. Default true.
    pub dataloader_pin_memory: bool,
    /// Leaves out the last batch of a pass where it has fewer rows. Windows leave none. Default false.
    pub dataloader_drop_last: bool,
    /// The shape of the model.
    pub model: ModelArguments,

    /// Optimizer steps; overrides `num_train_epochs` where it is above 0. Default -1.
    pub max_steps: i64,
    /// Passes over the training data, where `max_steps` is not above 0. Default 3.
    pub num_train_epochs: f64,
    /// Sequences of a micro-batch (on each device). Default 8.
    pub per_device_train_batch_size: u64,
    /// Sequences of an evaluation batch (on each device). Default 8.
    pub per_device_eval_batch_size: u64,
    /// Micro-batches of an optimizer step. Default 1.
    pub gradient_accumulation_steps: u64,

    /// The optimizer.
    pub optim: OptimizerName,
    /// The highest learning rate of the schedule. Default 5e-5.
    pub learning_rate: f64,
    /// Decoupled weight decay of matrices (not of norms, biases and embeddings). Default 0.
    pub weight_decay: f64,
    /// AdamW's β₁. Default 0.9.
    pub adam_beta1: f64,
    /// AdamW's β₂. Default 0.999.
    pub adam_beta2: f64,
    /// AdamW's ε. Default 1e-8.
    pub adam_epsilon: f64,
    /// The decay of an exponential moving average of the weights, from 0 and below 1; the average is
    /// evaluated, and saved as `model_ema`. Default: no average.
    pub ema_decay: Option<f64>,
    /// Gradients are scaled down to this global norm; 0 for never. Default 1.
    pub max_grad_norm: f64,
    /// The schedule of the learning rate. Default `linear`.
    pub lr_scheduler_type: LrSchedulerType,
    /// Options of the schedule.
    pub lr_scheduler_kwargs: ScheduleOptions,
    /// Warm-up as a part of all steps, 0 to 1. Default 0.
    pub warmup_ratio: f64,
    /// Warm-up steps; below 1 a part of all steps. Overrides `warmup_ratio` where above 0. Default 0.
    pub warmup_steps: f64,

    /// The kernel of attention: `eager`, `sdpa` or `flash_attention_2`. Default `flash_attention_2`.
    #[serde(with = "crate::execution_arguments::attention_by_name")]
    pub attn_implementation: AttentionImplementation,
    /// Norms, rotary positions, gates and the loss in one pass each (what `use_liger_kernel` asks for).
    /// Default true.
    pub fused_kernels: bool,
    /// Computes the blocks again in backward instead of keeping their activations. Default false.
    pub gradient_checkpointing: bool,
    /// The options of `gradient_checkpointing`.
    pub gradient_checkpointing_kwargs: GradientCheckpointingArguments,

    /// Autocast to bfloat16. Default false.
    pub bf16: bool,
    /// Autocast to float16 with loss scaling. Default false.
    pub fp16: bool,
    /// TensorFloat-32 matrix products on CUDA. Default: as libtorch has it.
    pub tf32: Option<bool>,
    /// Between several processes: `gloo` (CPUs) or `nccl` (GPUs). Default: `nccl` where there are GPUs and it
    /// was built in.
    pub ddp_backend: Option<DdpBackend>,
    /// MiB of gradients that are sent together. Default 25.
    pub ddp_bucket_cap_mb: Option<f64>,
    /// Looks for parameters that a backward pass does not reach. Default false.
    pub ddp_find_unused_parameters: Option<bool>,
    /// Copies the buffers of rank 0 to all before each forward. Default true.
    pub ddp_broadcast_buffers: Option<bool>,
    /// Seconds after which a process that does not answer is given up. Default 1800.
    pub ddp_timeout: f64,
    /// How much of the training state is sharded over the processes, as in DeepSpeed: 0 for nothing, 1 for
    /// the optimizer states (ZeRO-1). Default 0.
    pub zero_stage: u8,
    /// Trains on the CPU even where there is a GPU. Default false.
    pub use_cpu: bool,
    /// Threads inside one operator. Default: as libtorch chooses.
    pub threads: Option<usize>,

    /// When the validation loss is measured. Default `no`.
    pub eval_strategy: IntervalStrategy,
    /// Steps between evaluations; below 1 a part of all steps. Default: `logging_steps`.
    pub eval_steps: Option<f64>,
    /// Measures the validation loss before the first step too. Default false.
    pub eval_on_start: bool,
    /// At most so many batches an evaluation. Default: the whole validation part.
    pub max_eval_batches: Option<u64>,
    /// When a snapshot is saved, from which a run can be resumed: `no`, `steps`, `epoch`, or `best`, whenever
    /// `metric_for_best_model` improves. Default `steps`.
    pub save_strategy: SaveStrategy,
    /// Steps between snapshots; below 1 a part of all steps. The last step has one too. Default 500.
    pub save_steps: f64,
    /// How many snapshots are kept; the newest, and with `load_best_model_at_end` the best, always are.
    /// Default: all.
    pub save_total_limit: Option<usize>,
    /// Resumes from a snapshot: `true` for the newest whole one in `output_dir` (a fresh start where
    /// there is none), or its folder. Default: a new run.
    pub resume_from_checkpoint: Option<ResumeFromCheckpoint>,
    /// Takes the weights of the best snapshot at the end. Default false.
    pub load_best_model_at_end: bool,
    /// The metric that decides which snapshot is best: `loss` or `bits_per_byte` of the evaluations (`eval_` before it is the same).
    /// Default `loss`.
    pub metric_for_best_model: Option<String>,
    /// Whether a greater value of that metric is better. Default false.
    pub greater_is_better: Option<bool>,
    /// Ends the run after so many evaluations in a row without improvement. Default: never.
    pub early_stopping_patience: Option<u32>,
    /// How much counts as an improvement. Default 0.
    pub early_stopping_threshold: f64,
    /// Steps between lines on the terminal; below 1 a part of all steps. Default 500.
    pub logging_steps: f64,
    /// Where metrics go beside `metrics.jsonl`: `tensorboard`, `all` or `none`. Default none.
    #[serde(deserialize_with = "report_to")]
    pub report_to: Vec<ReportTo>,
    /// A file for a Chrome trace (chrome://tracing, Perfetto) of the sixth to eighth step, by libtorch's
    /// profiler. Default: none.
    pub trace: Option<PathBuf>,
    /// Samples that the trained model generates at the end. Default 3.
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
            per_device_eval_batch_size: 8,
            gradient_accumulation_steps: 1,
            optim: OptimizerName::default(),
            learning_rate: 5e-5,
            weight_decay: 0.0,
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
            bf16: false,
            fp16: false,
            tf32: None,
            ddp_backend: None,
            ddp_bucket_cap_mb: None,
            ddp_find_unused_parameters: None,
            ddp_broadcast_buffers: None,
            ddp_timeout: 1800.0,
            zero_stage: 0,
            use_cpu: false,
            threads: None,
            eval_strategy: IntervalStrategy::default(),
            eval_steps: None,
            eval_on_start: false,
            max_eval_batches: None,
            save_strategy: SaveStrategy::default(),
            save_steps: 500.0,
            save_total_limit: None,
            resume_from_checkpoint: None,
            load_best_model_at_end: false,
            metric_for_best_model: None,
            greater_is_better: None,
            early_stopping_patience: None,
            early_stopping_threshold: 0.0,
            logging_steps: 500.0,
            report_to: Vec::new(),
            trace: None,
            samples: 3,
        }
    }
}

/// The optimizers that `optim` can name.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum OptimizerName {
    /// AdamW with decoupled decay through libtorch's fused kernel. Also `adamw_torch`.
    #[default]
    #[serde(alias = "adamw_torch")]
    AdamwTorchFused,
    /// AdamW whose states are 8-bit blocks: a quarter of the memory. Also `adamw_bnb_8bit`.
    #[serde(rename = "adamw_8bit", alias = "adamw_bnb_8bit")]
    Adamw8bit,
    /// AdamW whose states lie in host memory behind a GPU, or in a mapped file behind a CPU. Also
    /// `paged_adamw`.
    #[serde(rename = "paged_adamw_32bit", alias = "paged_adamw")]
    PagedAdamw32bit,
    /// The same with 8-bit states.
    #[serde(rename = "paged_adamw_8bit")]
    PagedAdamw8bit,
    /// Lion: one state, the sign of its update. Also `lion`.
    #[serde(rename = "lion_32bit", alias = "lion")]
    Lion32bit,
    /// Adafactor with a given learning rate (no relative step, no parameter scale), as Hugging Face's
    /// trainer makes it.
    Adafactor,
    /// Stochastic gradient descent without momentum.
    Sgd,
    /// Muon for the matrices of the blocks, AdamW for embeddings, head, norms and biases.
    Muon,
}

/// The times at which something happens during a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IntervalStrategy {
    /// Never.
    #[default]
    No,
    /// Every so many steps, and at the end.
    Steps,
    /// At the end of each pass over the data, and at the end.
    Epoch,
}

/// A place that metrics can be sent to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum ReportTo {
    /// TensorBoard event files in the run folder.
    TensorBoard,
}

impl ReportTo {
    /// Every place.
    pub const ALL: [Self; 1] = [Self::TensorBoard];
}

impl TrainingArguments {
    /// Returns the sequences of an optimizer step on one device.
    pub fn sequences_per_step(&self) -> u64 {
        self.per_device_train_batch_size * self.gradient_accumulation_steps
    }

    /// Returns the tokens of an optimizer step on one device.
    pub fn tokens_per_step(&self) -> u64 {
        self.sequences_per_step() * self.context_length
    }

    /// Returns whether metrics go to `place`.
    pub fn reports_to(&self, place: ReportTo) -> bool {
        self.report_to.contains(&place)
    }
}

/// A list, or its only member.
#[derive(Deserialize)]
#[serde(untagged, expecting = "text or a list of texts")]
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
    let mut places = Vec::new();
    for name in names {
        match name.as_str() {
            "none" => {}
            "all" => places.extend(ReportTo::ALL),
            "tensorboard" => places.push(ReportTo::TensorBoard),
            other => {
                let known = &["tensorboard", "all", "none"];
                return Err(serde::de::Error::unknown_variant(other, known));
            }
        }
    }
    Ok(places)
}
