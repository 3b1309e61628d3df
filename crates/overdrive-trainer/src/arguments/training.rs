//! The configuration of a training run.

use std::path::PathBuf;

use overdrive_datasets::PackingStrategy;
use overdrive_distributed::GroupConfig;
use overdrive_optim::{LrSchedulerType, ScheduleOptions};
use overdrive_transformer::AttentionImplementation;
use serde::{Deserialize, Serialize};

use super::choices::{
    DdpBackend, GradientCheckpointingArguments, IntervalStrategy, MixtureWeights, OptimizerName,
    Preset, ReportTo, ResumeFromCheckpoint, SampleBy, SaveStrategy, SequenceMode,
};
use super::key::Harmless::Only;
use super::key::Range::{
    AtLeast, AtMost, BelowOne, Between, Fraction, NotNegative, Positive, Seconds, Steps,
    StepsOrZero,
};
use super::key::{both, options, train};
use super::model::ModelArguments;

/// The default of `length_column_name`, as in transformers.
pub(crate) const DEFAULT_LENGTH_COLUMN: &str = "length";

/// The remedy for keys of the tokenizer in fine-tuning.
const NO_MIXTURE: &str = "leave it out: a mixture is for training from scratch";
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
            /// The preset, whose values hold unless file or flags override them.
            preset: Preset = Preset::default() =>
                train("PRESET", "Configuration to start from [default: the file's, else tiny]")
                    .instead("leave it out: the model determines its shape");
            /// The folder of the run. Default: a new one under `runs/`.
            output_dir: Option<PathBuf> = None =>
                both("DIR", "Folder of the run [default: a new one under runs/]").per_rank().flag("out").also(&["out_dir"]);
            /// If `true`, a run that `output_dir` holds is replaced. Default `false`.
            overwrite_output_dir: bool = false =>
                both("", "Replace an existing run in the folder, unless it is running").per_rank().flag("overwrite");
            /// The seed of all random numbers: weights, order of the data, samples. Default 42.
            seed: u64 = 42 => both("N", "Seed of the weights, the order of the data and the samples").orders_data();
        }
        "Data" => {
            /// The text to train on: files or folders of text, JSON Lines, JSON arrays, CSV, TSV, and with the
            /// feature `parquet` Parquet and Arrow. With weights, `a.jsonl:0.7` and `b.parquet:0.3`, each path is a source
            /// of a mixture. Default: the Rust source code that Cargo keeps.
            #[serde(deserialize_with = "super::choices::one_or_many")]
            data: Vec<PathBuf> = Vec::new() =>
                both("PATH", "Text to train on: files or folders of text, JSON Lines, CSV, Parquet, or of tokens (`tokenize`, .bin of nanoGPT and llm.c); with weights, a mixture: a.jsonl:0.7 b.txt:0.3 [default: the Rust sources that Cargo keeps]").per_rank()
                    .paths().also(&["train_file", "data_path", "dataset"])
                    .finetune("Records to train on: JSON Lines (or a JSON array) with `prompt` and `response`, `messages`, `instruction` and `output`, or `text`");
            /// What the weights in `data` are shares of: `tokens` or `samples` (rows of the batches). Default `tokens`.
            mixture_weights: MixtureWeights = MixtureWeights::default() =>
                train("NAME", "What the weights of a mixture are shares of").harmless(Only("\"tokens\"")).instead(NO_MIXTURE);
            /// Other weights in the course of the run, each as `STEPS:WEIGHT,WEIGHT`: after 2000 steps, `2000:0.2,0.8`.
            /// Default: none.
            data_schedule: Vec<String> = Vec::new() =>
                train("STEPS:W,W", "Weights of a mixture after a number of steps, one for each source")
                    .paths().harmless(Only("[]")).instead(NO_MIXTURE);
            /// The column or field of a record that holds its text (also `text_column`). Default `text`.
            dataset_text_field: String = "text".to_owned() =>
                train("NAME", "Column or field of a record that holds its text").flag("text-column").also(&["text_column"]).harmless(Only("\"text\""))
                    .instead("the format of a record is recognized by its field names: call the field `text`");
            /// The documents of a text file: the whole file, or each line. Default `document`.
            sample_by: SampleBy = SampleBy::default() =>
                train("NAME", "Unit of a text file that is a document").instead("leave it out: files of records have records");
            /// If `true`, documents that are equal to an earlier one are removed before tokenization. Default `false`.
            remove_duplicates: bool = false => both("", "Remove documents that are equal to an earlier one");
            /// The fraction of the documents that is held out for validation, above 0 and below 1. Default 0.05.
            validation_fraction: f64 = 0.05 =>
                both("FRACTION", "Fraction of the documents that is held out for validation").orders_data().range(Between).instead("0.05 is a good start");
            /// The path of a `tokenizer.json`. Default: a byte-level BPE of `vocab_size` tokens is trained on the data; a
            /// resumed run uses that of its snapshot.
            tokenizer: Option<PathBuf> = None =>
                train("FILE", "A tokenizer.json [default: a byte-level BPE trained on the data]").per_rank().instead(HAS_TOKENIZER);
            /// The vocabulary size of the tokenizer that is trained if none is given. Default 4096.
            vocab_size: u64 = 4096 => train("N", "Vocabulary size of the tokenizer that is trained").instead(HAS_TOKENIZER);
            /// The number of tokens in a training sequence (also `max_seq_length`, `max_length`). Default 256.
            context_length: u64 = 256 =>
                both("N", "Number of tokens in a training sequence (also --max-seq-length)").orders_data().range(AtLeast(1))
                    .also(&["max_seq_length", "max_length", "ctx_len"])
                    .finetune("Maximum number of tokens in an example, at most the context of the model (also --max-seq-length)");
            /// The kind of a training sequence: a window of the concatenated documents, or a document. Default:
            /// windows, unless `packing`, `padding_free`, `group_by_length` or `pad_to_multiple_of` needs documents.
            sequences: Option<SequenceMode> = None =>
                train("NAME", "Kind of a training sequence: a window of the concatenated documents, or a document [default: windows]")
                    .harmless(Only("\"documents\""))
                    .instead("each example is a sequence: drop the key, and write `packing: true` for rows without padding");
            /// If `true`, as many documents as fit are packed into a row. Default `false`.
            packing: bool = false => both("", "Pack as many documents into a row as fit").orders_data().excludes("group_by_length");
            /// The assignment of documents to rows: `bfd`, `bfd_split` or `wrapped`. Default `bfd`.
            packing_strategy: PackingStrategy = PackingStrategy::default() =>
                both("NAME", "Assignment of documents to packed rows");
            /// If `true`, the documents of a batch are concatenated instead of padded. Default `false`.
            padding_free: bool = false => both("", "Concatenate the documents of a batch instead of padding them");
            /// The padded length of a batch is rounded up to a multiple of this. Default 1.
            pad_to_multiple_of: usize = 1 =>
                both("N", "Round the padded length of a batch up to a multiple of this").range(AtLeast(1));
            /// If `true`, documents of similar lengths form a batch (`train_sampling_strategy: group_by_length` in
            /// transformers 5). Default `false`.
            group_by_length: bool = false => both("", "Batch documents of similar lengths").orders_data().excludes("packing");
            /// A column of numbers that replaces the token counts in `group_by_length`, if the records have it;
            /// without `group_by_length` it has no effect. Default `length`.
            length_column_name: String = DEFAULT_LENGTH_COLUMN.to_owned() =>
                train("NAME", "Column of lengths for --group-by-length instead of token counts").harmless(Only("\"length\""))
                    .instead("the tokens are counted when the file is opened: drop the key, `group_by_length` needs no column");
            /// The number of threads that prepare batches; with 0 each batch is prepared on request. The batches do
            /// not depend on it. Default 0; 1 in the presets.
            dataloader_num_workers: usize = 0 =>
                both("N", "Number of threads that prepare batches; it does not change the batches").per_rank().range(AtMost(1024)).also(&["num_workers"]);
            /// The number of batches that each worker prepares ahead. Default: 2.
            dataloader_prefetch_factor: Option<usize> = None =>
                both("N", "Number of batches that each worker prepares ahead [default: 2]").per_rank().range(AtLeast(1)).also(&["prefetch_factor"]);
            /// If `true`, batches are copied to a GPU from page-locked memory, concurrently with computation. Default
            /// `true`.
            dataloader_pin_memory: bool = true =>
                both("", "Copy batches to a GPU from page-locked memory").per_rank().also(&["pin_memory"]);
            /// If `true`, the last batch of an epoch is dropped if it has fewer rows. Default `false`.
            dataloader_drop_last: bool = false => both("", "Drop the last batch of an epoch if it has fewer rows");
        }
        "Model" => {
            /// The shape of the model.
            model: ModelArguments = ModelArguments::default() =>
                train("", "The shape of the model: a section with the keys of Hugging Face's LlamaConfig")
                    .flag("").instead("leave it out: the model determines its shape");
        }
        "Training" => {
            /// The number of optimizer steps; overrides `num_train_epochs` if it is above 0. Default -1.
            max_steps: i64 = -1 => both("N", "Number of optimizer steps").flag("steps").also(&["steps", "max_iters"]);
            /// The number of epochs, if `max_steps` is not above 0. Default 3.
            num_train_epochs: f64 = 3.0 =>
                both("X", "Number of epochs, instead of a number of steps").flag("epochs").also(&["epochs", "num_epochs"]).excludes("max_steps");
            /// The number of sequences in a micro-batch, per device. Default 8.
            per_device_train_batch_size: u64 = 8 =>
                both("N", "Number of sequences in a micro-batch, per device").range(AtLeast(1)).flag("micro-batch-size")
                    .also(&["batch_size", "micro_batch_size", "per_gpu_train_batch_size"]);
            /// If `true`, `per_device_train_batch_size` is the largest micro-batch to try: the run takes the largest that fits
            /// into the free memory by the estimate, and at most half of it whenever memory runs out. The effective batch stays
            /// the same. Default `false`.
            auto_find_batch_size: bool = false =>
                both("", "Take the largest micro-batch up to the given one that fits into memory, for the same effective batch");
            /// The number of micro-batches in an optimizer step; the last step of an epoch has the rest. Default 1.
            gradient_accumulation_steps: u64 = 1 => both("N", "Number of micro-batches in a step").range(AtLeast(1));
            /// The highest learning rate of the schedule. Default 5e-5.
            learning_rate: f64 = 5e-5 => both("X", "Highest learning rate").range(Positive).also(&["lr"]);
            /// The learning-rate schedule. Default `linear`.
            lr_scheduler_type: LrSchedulerType = LrSchedulerType::default() =>
                both("NAME", "Learning-rate schedule").also(&["scheduler"]);
            /// The options of the schedule.
            lr_scheduler_kwargs: ScheduleOptions = ScheduleOptions::default() =>
                both("JSON", "Options of the schedule, such as {\"num_cycles\": 2}");
            /// The warm-up as a fraction of all steps, 0 to 1. Default 0.
            warmup_ratio: f64 = 0.0 =>
                both("FRACTION", "Warm-up as a fraction of all steps")
                    .range(Fraction).excludes("warmup_steps").instead("for a number of steps use `warmup_steps`");
            /// The number of warm-up steps; below 1 a fraction of all steps. Overrides `warmup_ratio` if above 0.
            /// Default 0.
            warmup_steps: f64 = 0.0 =>
                both("N", "Warm-up in steps, or below 1 as a fraction of all steps").range(StepsOrZero).excludes("warmup_ratio");
            /// The global norm to which larger gradients are scaled down; 0 for no clipping. Default 1.
            max_grad_norm: f64 = 1.0 => both("X", "Maximum norm of the gradients, 0 for no clipping").range(NotNegative);
            /// The optimizer.
            optim: OptimizerName = OptimizerName::default() => both("NAME", "Optimizer").also(&["optimizer"]);
            /// The decoupled weight decay of matrices and embeddings (not of norms and biases). Default 0.
            weight_decay: f64 = 0.0 =>
                both("X", "Decoupled weight decay of matrices and embeddings; norms and biases have none").range(NotNegative);
            /// If `true`, embeddings and a head that shares their table decay, as in transformers. Default: `true`.
            decay_embeddings: bool = true => both("", "Apply the weight decay to embeddings and a tied head too");
            /// The β₁ of AdamW. Default 0.9.
            adam_beta1: f64 = 0.9 => both("X", "Decay of AdamW's first moment").range(BelowOne);
            /// The β₂ of AdamW. Default 0.999.
            adam_beta2: f64 = 0.999 => both("X", "Decay of AdamW's second moment").range(BelowOne);
            /// The ε of AdamW. Default 1e-8.
            adam_epsilon: f64 = 1e-8 => both("X", "AdamW's epsilon").range(Positive);
            /// The decay of an exponential moving average of the weights, at least 0 and below 1. The average is
            /// evaluated, and saved as `model_ema`. Default: no average.
            ema_decay: Option<f64> = None =>
                both("X", "Decay of an exponential moving average of the weights, which is evaluated and saved as model_ema [default: no average]")
                    .range(BelowOne);
        }
        "Evaluation and snapshots" => {
            /// The times of an evaluation on the validation data. Default `no`.
            eval_strategy: IntervalStrategy = IntervalStrategy::default() =>
                both("NAME", "Times of an evaluation on the validation data").also(&["evaluation_strategy"]);
            /// The number of steps between evaluations; below 1 a fraction of all steps. Default: `logging_steps`.
            eval_steps: Option<f64> = None =>
                both("N", "Number of steps between evaluations, 0 for none").range(Steps).also(&["eval_interval", "eval_every"]);
            /// If `true`, there is also an evaluation before the first step. Default `false`.
            eval_on_start: bool = false => both("", "Also evaluate before the first step");
            /// The maximum number of batches in an evaluation. Default: all validation data.
            max_eval_batches: Option<u64> = None =>
                both("N", "Maximum number of batches in an evaluation [default: all]").range(AtLeast(1));
            /// The number of sequences in an evaluation batch, per device. Default 8.
            per_device_eval_batch_size: u64 = 8 =>
                both("N", "Number of sequences in an evaluation batch, per device").range(AtLeast(1)).also(&["per_gpu_eval_batch_size"]);
            /// The times of a snapshot, from which a run can be resumed: `no`, `steps`, `epoch`, or `best`, whenever
            /// `metric_for_best_model` improves. Default `steps`.
            save_strategy: SaveStrategy = SaveStrategy::default() =>
                both("NAME", "Times of a snapshot; best saves one whenever the metric improves");
            /// The number of steps between snapshots; below 1 a fraction of all steps. There is always one after the
            /// last step. Default 500.
            save_steps: f64 = 500.0 =>
                both("N", "Number of steps between snapshots, 0 for none").range(Steps).also(&["save_interval", "save_every", "checkpoint_interval"]);
            /// The number of snapshots to keep; the newest and, with evaluations, the best are always kept. Default: all.
            save_total_limit: Option<usize> = None =>
                both("N", "Number of snapshots to keep; the newest and the best are always kept [default: all]")
                    .range(AtLeast(1)).also(&["keep_last", "max_checkpoints"]).instead("give 1 or more, or `save_strategy: \"no\"` for no snapshots");
            /// The snapshot to resume from: `true` for the newest complete one in `output_dir` (a new run if there is
            /// none), or its folder. Default: a new run.
            resume_from_checkpoint: Option<ResumeFromCheckpoint> = None =>
                both("true|DIR", "Resume from the newest snapshot in `--out` (true), or from the one in this folder").also(&["auto_resume"]);
            /// If `true`, a run resumes although its data, its tokenizer or an argument that the snapshot depends on has
            /// changed. Default `false`: the differences are an error.
            resume_with_changes: bool = false =>
                both("", "Resume although the data, the tokenizer or an argument that the snapshot depends on has changed");
            /// If `true`, the weights of the best snapshot are loaded at the end. Default `false`.
            load_best_model_at_end: bool = false => both("", "Load the weights of the best snapshot at the end");
            /// The metric that determines the best snapshot: `loss`, or `bits_per_byte` where the bytes of the text are known
            /// (not in fine-tuning), of the evaluations; also with the prefix `eval_`. Default `loss`.
            metric_for_best_model: Option<String> = None =>
                both("NAME", "Metric that determines the best snapshot: loss or bits_per_byte [default: loss]");
            /// If `true`, a greater value of that metric is better. Default `false`.
            greater_is_better: Option<bool> = None => both("", "Treat greater values of that metric as better");
            /// The number of consecutive evaluations without improvement after which the run ends. Default: never.
            early_stopping_patience: Option<u32> = None =>
                both("N", "Stop after this number of evaluations without improvement [default: never]").also(&["patience"]);
            /// The minimum improvement that counts. Default 0.
            early_stopping_threshold: f64 = 0.0 => both("X", "Minimum improvement that counts").also(&["min_delta"]);
            /// The number of samples that the trained model generates at the end. Default 3.
            samples: u64 = 3 => both("N", "Number of samples that the trained model generates at the end").per_rank();
        }
        "Reports" => {
            /// The number of steps between log lines; below 1 a fraction of all steps. Default 500.
            logging_steps: f64 = 500.0 => both("N", "Number of steps between log lines").range(Steps);
            /// The destinations of metrics besides `metrics.jsonl`: `tensorboard`, `mlflow` (the server of
            /// `MLFLOW_TRACKING_URI`), `wandb` (an offline run for `wandb sync`), `all` that the program was built with,
            /// or `none`. Default `none`.
            #[serde(deserialize_with = "super::choices::report_to")]
            report_to: Vec<ReportTo> = Vec::new() => both("NAME", "Destinations of the metrics besides metrics.jsonl: tensorboard, mlflow (the server of MLFLOW_TRACKING_URI), wandb (an offline run for `wandb sync`), all or none").per_rank().names();
            /// The path of a Chrome trace (chrome://tracing, Perfetto) of the sixth to eighth step, recorded by
            /// libtorch's profiler. Default: no trace.
            trace: Option<PathBuf> = None =>
                both("FILE", "Write a Chrome trace of the sixth to eighth step to this file").per_rank().excludes("emit_nvtx");
            /// If `true`, operators and phases are marked as NVTX ranges for `nsys profile -t cuda,nvtx`. Default `false`.
            emit_nvtx: bool = false => both("", "Mark operators and phases for `nsys profile -t cuda,nvtx`").per_rank();
        }
        "Machine" => {
            /// If `true`, backward recomputes the activations of the blocks instead of storing them. Default `false`.
            gradient_checkpointing: bool = false =>
                both("", "Recompute the activations of blocks in backward instead of storing them").also(&["use_gradient_checkpointing"]);
            /// The options of `gradient_checkpointing`.
            gradient_checkpointing_kwargs: GradientCheckpointingArguments = GradientCheckpointingArguments::default() =>
                both("JSON", "Options of gradient checkpointing, such as {\"schedule\": {\"every_nth\": 2}, \"policy\": \"matmuls\"}");
            /// The attention kernel: `eager`, `sdpa` or `flash_attention_2`. Default `flash_attention_2`.
            #[serde(with = "super::choices::attention_by_name")]
            attn_implementation: AttentionImplementation = AttentionImplementation::default() =>
                both("NAME", "Attention kernel");
            /// If `true`, norms, rotary embeddings, gates and the loss use one fused kernel each (the equivalent of
            /// `use_liger_kernel`). Default `true`.
            fused_kernels: bool = true =>
                both("", "Use one fused kernel each for norms, rotary embeddings, gates and the loss");
            /// If `true`, [`choose_precision`](Self::choose_precision) trains in the recommended precision of the device,
            /// unless `bf16`, `fp16` or `tf32` is set. Default `true`.
            auto_precision: bool = true =>
                train("", "Train in the recommended precision of the device unless bf16, fp16 or tf32 is given; a resumed run keeps its own")
                    .harmless(Only("false")).instead("fine-tuning is in fp32 unless `bf16` or `fp16` is given: drop the key, and give one of them");
            /// If `true`, autocast to bfloat16 is on. Default `false`.
            bf16: bool = false => both("", "Train in bfloat16 with autocast").excludes("fp16");
            /// If `true`, autocast to float16 with loss scaling is on. Default `false`.
            fp16: bool = false => both("", "Train in float16 with autocast and loss scaling").excludes("bf16");
            /// If `true`, CUDA matmuls use TensorFloat-32. Default: libtorch's setting.
            tf32: Option<bool> = None => both("", "Use TensorFloat-32 for matmuls on CUDA");
            /// If `true`, training runs on the CPU even if there is a GPU. Default `false`.
            use_cpu: bool = false => both("", "Train on the CPU even if there is a GPU").flag("cpu").also(&["no_cuda"]);
            /// The number of threads inside one operator. Default: libtorch's choice.
            threads: Option<usize> = None =>
                both("N", "Number of threads inside one operator [default: libtorch's choice, one per core]").per_rank().range(AtLeast(1));
            /// If `true`, libtorch's operators take numbers below 2⁻¹²⁶ for zero on a CPU, as Overdrive's kernels always do
            /// ([`set_flush_denormals`](overdrive_sys::denormals::set_flush_denormals)). Default `true`.
            flush_denormals: bool = true =>
                both("", "Take numbers below 2^-126 for zero on a CPU; Intel's processors take a hundred cycles for each");
            /// The training state that is sharded over the processes, as in DeepSpeed: 0 for none, 1 for the optimizer
            /// states (ZeRO-1). Default 0.
            zero_stage: u8 = 0 =>
                both("N", "1 shards the optimizer states over the processes (ZeRO-1), 0 does not").range(AtMost(1));
            /// The backend between processes: `gloo` (CPUs) or `nccl` (GPUs). Default: `nccl` if there are GPUs, else `gloo`;
            /// several processes on GPUs without the feature `nccl` are refused.
            ddp_backend: Option<DdpBackend> = None =>
                both("NAME", "Communication backend between processes [default: nccl on GPUs, gloo without any]");
            /// The size of a bucket of gradients in MiB. Default 25.
            ddp_bucket_cap_mb: Option<f64> = None =>
                both("N", "Size of a bucket of gradients in MiB [default: 25]").range(Positive);
            /// If `true`, each backward pass is searched for parameters that it does not reach. Default `false`.
            ddp_find_unused_parameters: Option<bool> = None =>
                both("", "Search for parameters that a backward pass does not reach");
            /// If `true`, every backward pass uses the same parameters as the first one, which saves the search for
            /// parameters that it does not reach. Default `false`.
            ddp_static_graph: Option<bool> = None =>
                both("", "Expect each backward pass to use the same parameters as the first");
            /// If `true`, the buffers of rank 0 are copied to all processes before each forward pass. Default `true`.
            ddp_broadcast_buffers: Option<bool> = None =>
                both("", "Copy the buffers of rank 0 to all processes before each forward pass");
            /// The timeout of a collective in seconds. Default 1800.
            ddp_timeout: f64 = GroupConfig::DEFAULT_TIMEOUT.as_secs_f64() =>
                both("S", "Timeout of a collective in seconds").per_rank().range(Seconds);
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
