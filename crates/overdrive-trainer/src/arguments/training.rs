//! The configuration of a training run.

use std::path::PathBuf;

use overdrive_datasets::PackingStrategy;
use overdrive_distributed::GroupConfig;
use overdrive_optim::{LrSchedulerType, ScheduleOptions};
use overdrive_transformer::AttentionImplementation;
use serde::{Deserialize, Serialize};

use super::choices::{
    CudaGraphs, DdpBackend, GradientCheckpointingArguments, IntervalStrategy, MixtureWeights,
    OptimizerName, Preset, ReportTo, ResumeFromCheckpoint, SampleBy, SaveStrategy, SequenceMode,
};
use super::key::Harmless::Only;
use super::key::List::{Names, Paths};
use super::key::Range::{
    AtLeast, AtMost, BelowOne, Between, Fraction, NotNegative, Positive, Seconds, Steps,
    StepsOrZero, UpTo,
};
use super::key::options;
use super::model::ModelArguments;

/// The default of `length_column_name`, as in transformers.
pub(crate) const DEFAULT_LENGTH_COLUMN: &str = "length";

/// The remedy for keys of mixtures in fine-tuning.
const NO_MIXTURE: &str = "leave it out: a mixture is for training from scratch";
/// The remedy for keys of the tokenizer in fine-tuning.
const HAS_TOKENIZER: &str = "leave it out: the tokenizer of the model is used";

options! {
    /// The configuration of a training run, under the keys of Hugging Face's `TrainingArguments`
    /// (transformers 5) and with its defaults; the keys about model and data are Overdrive's own.
    ///
    /// It is read from a file, flags and a preset by [`TrainArgs::resolve`](crate::TrainArgs::resolve) or
    /// [`Layers`](crate::Layers), which also accept older and alternative names of some keys (`max_seq_length`,
    /// `evaluation_strategy`), and return an error for keys of Hugging Face that Overdrive does not support.
    /// Plain serde reads it too, with serde's own errors.
    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    #[serde(default, deny_unknown_fields)]
    pub struct TrainingArguments, keys TRAINING in "" {
        "Configuration" => {
            /// The preset to start from; file and flags override its values. Default: the file's, else tiny.
            preset: Preset = Preset::default() =>
                TRAIN("PRESET", instead: "leave it out: the model determines its shape");
            /// The folder of the run. Default: a new one under `runs/`.
            output_dir: Option<PathBuf> = None =>
                ALL("DIR", per_rank: true, flag: Some("out"), spellings: &["out_dir"]);
            /// If `true`, replace the run in `output_dir`, unless it is still running. Default `false`.
            overwrite_output_dir: bool = false => ALL("", per_rank: true, flag: Some("overwrite"));
            /// The seed of the weights, the order of the data and the samples. Default 42.
            seed: u64 = 42 => ALL("N", orders_data: true);
        }
        "Data" => {
            /// The text to train on: files or folders of text, JSON Lines, JSON arrays, CSV, TSV, and with the feature
            /// `parquet` Parquet and Arrow, or of tokens (`tokenize`, .bin of nanoGPT and llm.c); with weights, each
            /// path is a source of a mixture: a.jsonl:0.7 b.txt:0.3. Default: the Rust sources that Cargo keeps.
            #[serde(deserialize_with = "super::choices::one_or_many")]
            data: Vec<PathBuf> = Vec::new() =>
                ALL("PATH", per_rank: true, list: Paths, spellings: &["train_file", "data_path", "dataset"],
                    help_of_finetune: Some("Records to train on: JSON Lines (or a JSON array) with `prompt` and `response`, `messages`, `instruction` and `output`, or `text`"));
            /// The unit of the weights of a mixture (samples are rows of the batches). Default `tokens`.
            mixture_weights: MixtureWeights = MixtureWeights::default() =>
                TRAIN("NAME", harmless: Only(&["\"tokens\""]), instead: NO_MIXTURE);
            /// The weights of a mixture after a number of steps, one for each source: 2000:0.2,0.8. Default: none.
            data_schedule: Vec<String> = Vec::new() =>
                TRAIN("STEPS:W,W", list: Paths, harmless: Only(&["[]"]), instead: NO_MIXTURE);
            /// The column or field of a record that holds its text. Default `text`.
            dataset_text_field: String = "text".to_owned() =>
                TRAIN("NAME", flag: Some("text-column"), spellings: &["text_column"], harmless: Only(&["\"text\""]),
                    instead: "the format of a record is recognized by its field names: call the field `text`");
            /// The part of a text file that is one document, all of it or each line. Default `document`.
            sample_by: SampleBy = SampleBy::default() =>
                TRAIN("NAME", instead: "leave it out: files of records have records");
            /// If `true`, remove documents that equal an earlier one before tokenization. Default `false`.
            remove_duplicates: bool = false => ALL("");
            /// The fraction of the documents to hold out for validation, above 0 and below 1. Default 0.05.
            validation_fraction: f64 = 0.05 =>
                ALL("FRACTION", orders_data: true, range: Between, instead: "0.05 is a good start");
            /// The path of a tokenizer.json; a resumed run uses that of its snapshot. Default: a byte-level BPE of
            /// `vocab_size` tokens that is trained on the data.
            tokenizer: Option<PathBuf> = None => TRAIN("FILE", per_rank: true, instead: HAS_TOKENIZER);
            /// The vocabulary size of the tokenizer that is trained. Default 4096.
            vocab_size: u64 = 4096 => TRAIN("N", instead: HAS_TOKENIZER);
            /// The number of tokens in a training sequence (also --max-seq-length). Default 256.
            context_length: u64 = 256 =>
                ALL("N", orders_data: true, range: AtLeast(1), spellings: &["max_seq_length", "max_length", "ctx_len"],
                    help_of_finetune: Some("Maximum number of tokens in an example, at most the context of the model (also --max-seq-length)"));
            /// The content of a training sequence, a window of the concatenated documents or one document. Default:
            /// windows, unless `packing`, `padding_free`, `group_by_length` or `pad_to_multiple_of` needs documents.
            sequences: Option<SequenceMode> = None =>
                TRAIN("NAME", harmless: Only(&["\"documents\""]),
                    instead: "each example is a sequence: drop the key, and write `packing: true` for rows without padding");
            /// If `true`, pack as many documents into a row as fit. Default `false`.
            packing: bool = false => ALL("", orders_data: true, excludes: &["group_by_length"]);
            /// The method that assigns documents to packed rows. Default `bfd`.
            packing_strategy: PackingStrategy = PackingStrategy::default() => ALL("NAME", needs: "packing");
            /// If `true`, concatenate the documents of a batch instead of padding them. Default `false`.
            padding_free: bool = false => ALL("");
            /// The multiple to which the length of a padded batch is rounded up. Default 1.
            pad_to_multiple_of: usize = 1 => ALL("N", range: AtLeast(1));
            /// If `true`, form batches of documents of similar length. Default `false`.
            group_by_length: bool = false => ALL("", orders_data: true, excludes: &["packing"]);
            /// The column of numbers that replaces the token counts in `group_by_length`, if the records have it.
            /// Default `length`.
            length_column_name: String = DEFAULT_LENGTH_COLUMN.to_owned() =>
                TRAIN("NAME", harmless: Only(&["\"length\""]),
                    instead: "the tokens are counted when the file is opened: drop the key, `group_by_length` needs no column");
            /// The number of threads that prepare batches; it does not change the batches. With 0 each batch is
            /// prepared on request. Default 0; 1 in the presets.
            dataloader_num_workers: usize = 0 =>
                ALL("N", per_rank: true, range: AtMost(1024), spellings: &["num_workers"]);
            /// The number of batches that each worker prepares ahead. Default: 2.
            dataloader_prefetch_factor: Option<usize> = None =>
                ALL("N", per_rank: true, range: AtLeast(1), spellings: &["prefetch_factor"]);
            /// If `true`, copy batches to a GPU from page-locked memory, during computation. Default `true`.
            dataloader_pin_memory: bool = true => ALL("", per_rank: true, spellings: &["pin_memory"]);
            /// If `true`, drop the last batch of an epoch if it has fewer rows. Default `false`.
            dataloader_drop_last: bool = false => ALL("");
        }
        "Model" => {
            /// The shape of the model: a section with the keys of Hugging Face's LlamaConfig.
            model: ModelArguments = ModelArguments::default() =>
                TRAIN("", flag: Some(""), instead: "leave it out: the model determines its shape");
        }
        "Training" => {
            /// The number of optimizer steps. Default -1, for that of `num_train_epochs`, which a positive number overrides.
            max_steps: i64 = -1 => ALL("N", flag: Some("steps"), spellings: &["steps", "max_iters"]);
            /// The number of epochs, if `max_steps` is not above 0. Default 3.
            num_train_epochs: f64 = 3.0 =>
                ALL("X", range: Positive, flag: Some("epochs"), spellings: &["epochs", "num_epochs"], excludes: &["max_steps"]);
            /// The number of sequences in a micro-batch, per device. Default 8.
            per_device_train_batch_size: u64 = 8 =>
                ALL("N", range: AtLeast(1), flag: Some("micro-batch-size"),
                    spellings: &["batch_size", "micro_batch_size", "per_gpu_train_batch_size"]);
            /// If `true`, take the largest micro-batch up to the given one that fits into the free memory by the
            /// estimate, and halve it whenever memory runs out; the effective batch stays the same. Default `false`.
            auto_find_batch_size: bool = false => ALL("");
            /// The number of micro-batches in an optimizer step; the last step of an epoch takes what is left. Default
            /// 1.
            gradient_accumulation_steps: u64 = 1 => ALL("N", range: AtLeast(1));
            /// The highest learning rate of the schedule. Default 5e-5.
            learning_rate: f64 = 5e-5 => ALL("X", range: Positive, spellings: &["lr"]);
            /// The learning-rate schedule. Default `linear`.
            lr_scheduler_type: LrSchedulerType = LrSchedulerType::default() => ALL("NAME", spellings: &["scheduler"]);
            /// The options of the schedule, such as {"num_cycles": 2}.
            lr_scheduler_kwargs: ScheduleOptions = ScheduleOptions::default() => ALL("JSON");
            /// The warm-up as a fraction of all steps, 0 to 1. Default 0.
            warmup_ratio: f64 = 0.0 =>
                ALL("FRACTION", range: Fraction, excludes: &["warmup_steps"],
                    instead: "for a number of steps use `warmup_steps`");
            /// The number of warm-up steps; below 1 a fraction of all steps. Overrides `warmup_ratio` if above 0.
            /// Default 0.
            warmup_steps: f64 = 0.0 => ALL("N", range: StepsOrZero, excludes: &["warmup_ratio"]);
            /// The global norm to which larger gradients are scaled down; 0 for no clipping. Default 1.
            max_grad_norm: f64 = 1.0 => ALL("X", range: NotNegative);
            /// The optimizer.
            optim: OptimizerName = OptimizerName::default() => ALL("NAME", spellings: &["optimizer"]);
            /// The decoupled weight decay (with `optim: sgd`, the L2 term) of matrices and embeddings; norms and biases
            /// have none. Default 0.
            weight_decay: f64 = 0.0 => ALL("X", range: NotNegative);
            /// If `true`, apply weight decay to embeddings and to a head that shares their table, as in transformers.
            /// Default `true`.
            decay_embeddings: bool = true => ALL("");
            /// The decay of AdamW's first moment. Default 0.9.
            adam_beta1: f64 = 0.9 => ALL("X", range: BelowOne);
            /// The decay of AdamW's second moment. Default 0.999.
            adam_beta2: f64 = 0.999 => ALL("X", range: BelowOne);
            /// The epsilon of AdamW. Default 1e-8.
            adam_epsilon: f64 = 1e-8 => ALL("X", range: Positive);
            /// The decay of an exponential moving average of the weights, which is evaluated and saved as `model_ema`.
            /// Default: no average.
            ema_decay: Option<f64> = None => ALL("X", range: BelowOne);
        }
        "Evaluation and snapshots" => {
            /// When to evaluate on the validation data. Default `no`.
            eval_strategy: IntervalStrategy = IntervalStrategy::default() =>
                ALL("NAME", spellings: &["evaluation_strategy"]);
            /// The number of steps between evaluations; below 1, a fraction of all steps; 0 for none. Default: that of
            /// the log lines.
            eval_steps: Option<f64> = None => ALL("N", range: Steps, spellings: &["eval_interval", "eval_every"]);
            /// If `true`, evaluate before the first step as well. Default `false`.
            eval_on_start: bool = false => ALL("");
            /// The maximum number of batches in an evaluation. Default: all.
            max_eval_batches: Option<u64> = None => ALL("N", range: AtLeast(1));
            /// The number of sequences in an evaluation batch, per device. Default 8.
            per_device_eval_batch_size: u64 = 8 =>
                ALL("N", range: AtLeast(1), spellings: &["per_gpu_eval_batch_size"]);
            /// When to save a snapshot, from which a run can resume; `best` saves one whenever `metric_for_best_model`
            /// improves. Default `steps`.
            save_strategy: SaveStrategy = SaveStrategy::default() => ALL("NAME");
            /// The number of steps between snapshots; below 1, a fraction of all steps; 0 for none. There is always one
            /// after the last step. Default 500.
            save_steps: f64 = 500.0 =>
                ALL("N", range: Steps, spellings: &["save_interval", "save_every", "checkpoint_interval"]);
            /// The number of snapshots to keep; the newest and, with evaluations, the best are always kept. Default: all.
            save_total_limit: Option<usize> = None =>
                ALL("N", range: AtLeast(1), spellings: &["keep_last", "max_checkpoints"],
                    instead: "give 1 or more, or `save_strategy: \"no\"` for no snapshots");
            /// The snapshot to resume from: true for the newest complete one in `output_dir` (a new run if there is
            /// none), or its folder. Default: a new run.
            resume_from_checkpoint: Option<ResumeFromCheckpoint> = None =>
                ALL("true|DIR", spellings: &["auto_resume"]);
            /// If `true`, resume although the data, the tokenizer or an argument that the snapshot depends on has
            /// changed. Default `false`.
            resume_with_changes: bool = false => ALL("");
            /// If `true`, load the weights of the best snapshot at the end. Default `false`.
            load_best_model_at_end: bool = false => ALL("");
            /// The metric that determines the best snapshot, with or without the prefix `eval_`: loss, or another
            /// metric of the evaluations, such as bits_per_byte where the bytes of the text are known. Default: loss.
            metric_for_best_model: Option<String> = None => ALL("NAME");
            /// If `true`, count a greater value of that metric as better. Default: true unless the metric is a loss or
            /// bits per byte.
            greater_is_better: Option<bool> = None => ALL("");
            /// The number of consecutive evaluations without improvement after which the run ends. Default: never.
            early_stopping_patience: Option<u32> = None => ALL("N", spellings: &["patience"]);
            /// The minimum improvement that counts. Default 0.
            early_stopping_threshold: f64 = 0.0 => ALL("X", spellings: &["min_delta"]);
            /// The number of samples that the trained model generates at the end. Default 3.
            samples: u64 = 3 => ALL("N", per_rank: true);
        }
        "Reports" => {
            /// The number of steps between log lines; below 1 a fraction of all steps. Default 500.
            logging_steps: f64 = 500.0 => ALL("N", range: Steps);
            /// The destinations of metrics besides metrics.jsonl: TensorBoard, MLflow (the server of
            /// MLFLOW_TRACKING_URI), an offline run of W&B for `wandb sync`, all that the program was built with, or
            /// none. Default: none.
            #[serde(deserialize_with = "super::choices::report_to")]
            report_to: Vec<ReportTo> = Vec::new() => ALL("NAME", per_rank: true, list: Names);
            /// The file for a Chrome trace (Perfetto) of the sixth to eighth step, recorded by libtorch's profiler.
            /// Default: no trace.
            trace: Option<PathBuf> = None => ALL("FILE", per_rank: true, excludes: &["emit_nvtx"]);
            /// If `true`, mark operators and phases as NVTX ranges for `nsys profile -t cuda,nvtx`. Default `false`.
            emit_nvtx: bool = false => ALL("", per_rank: true);
        }
        "Machine" => {
            /// If `true`, recompute the activations of the blocks in backward instead of storing them. Default `false`.
            gradient_checkpointing: bool = false => ALL("", spellings: &["activation_checkpointing", "use_gradient_checkpointing"]);
            /// The options of `gradient_checkpointing`, such as {"schedule": {"every_nth": 2}, "policy": "matmuls"}.
            gradient_checkpointing_kwargs: GradientCheckpointingArguments = GradientCheckpointingArguments::default() =>
                ALL("JSON", spellings: &["activation_checkpointing_kwargs"]);
            /// The attention kernel. Default `flash_attention_2`.
            attn_implementation: AttentionImplementation = AttentionImplementation::default() => ALL("NAME");
            /// If `true`, norms, rotary embeddings, gates and the loss use one fused kernel each. Default `true`.
            fused_kernels: bool = true => ALL("");
            /// When to capture the forward and backward pass of micro-batches of equal shape in CUDA graphs: `auto`
            /// does so if the host is slower than the GPU, as with small models; `always` does not measure. Not with
            /// packed sequences, `fp16`, `gradient_checkpointing` or several processes. Default `never`.
            cuda_graphs: CudaGraphs = CudaGraphs::default() => ALL("WHEN");
            /// If `true`, train in the recommended precision of the device unless `bf16`, `fp16`, `fp8` or `tf32` is
            /// given; a resumed run keeps its own. Default `true`.
            auto_precision: bool = true =>
                TRAIN("", harmless: Only(&["false"]),
                    instead: "fine-tuning is in fp32 unless `bf16` or `fp16` is given: drop the key, and give one of them");
            /// If `true`, autocast to bfloat16. Default `false`.
            bf16: bool = false => ALL("", excludes: &["fp16", "fp8"]);
            /// If `true`, autocast to float16 with loss scaling. Default `false`.
            fp16: bool = false => ALL("", excludes: &["bf16", "fp8"]);
            /// If `true`, autocast to bfloat16 and multiply linear layers in FP8 with a scale for each tensor, on a GPU
            /// of compute capability 8.9 or later (Ada, Hopper, Blackwell). Heads and norms stay in bfloat16. Default
            /// `false`.
            fp8: bool = false => ALL("", excludes: &["bf16", "fp16"]);
            /// If `true`, keep the residual stream of the model in fp32 under `bf16`, `fp16` and `fp8`; `false` keeps
            /// it in 16 bits, which saves memory. Default `true`.
            fp32_residual_connection: bool = true => ALL("");
            /// If `true`, use TensorFloat-32 for CUDA matmuls. Default: libtorch's setting.
            tf32: Option<bool> = None => ALL("");
            /// If `true`, train on the CPU even if there is a GPU. Default `false`.
            use_cpu: bool = false => ALL("", flag: Some("cpu"), spellings: &["no_cuda"]);
            /// The number of threads inside one operator. Default: libtorch's choice, one per core.
            threads: Option<usize> = None => ALL("N", per_rank: true, range: UpTo(1024));
            /// If `true`, flush numbers below 2^-126 to zero in libtorch's operators on a CPU, as Overdrive's kernels
            /// always do; Intel's processors take a hundred cycles for each. Default `true`.
            flush_denormals: bool = true => ALL("");
            /// The training state that is sharded over the processes, as in DeepSpeed: 0 for none, 1 for the optimizer
            /// states (ZeRO-1). Default 0.
            zero_stage: u8 = 0 => ALL("N", range: AtMost(1));
            /// The communication backend between processes; several processes on GPUs without the feature `nccl` are
            /// refused. Default: nccl on GPUs, gloo without any.
            ddp_backend: Option<DdpBackend> = None => ALL("NAME");
            /// The size of a bucket of gradients in MiB. Default: 25.
            ddp_bucket_cap_mb: Option<f64> = None => ALL("N", range: Positive);
            /// If `true`, search each backward pass for parameters that it does not reach. Default `false`; in
            /// transformers `true` without activation checkpointing.
            ddp_find_unused_parameters: Option<bool> = None => ALL("");
            /// If `true`, expect every backward pass to use the same parameters as the first one, which saves the
            /// search for parameters that it does not reach. Default `false`.
            ddp_static_graph: Option<bool> = None => ALL("");
            /// If `true`, copy the buffers of rank 0 to all processes before each forward pass. Default `true`.
            ddp_broadcast_buffers: Option<bool> = None => ALL("");
            /// The timeout of a collective in seconds. Default 1800.
            ddp_timeout: f64 = GroupConfig::DEFAULT_TIMEOUT.as_secs_f64() => ALL("S", per_rank: true, range: Seconds);
        }
    }
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
