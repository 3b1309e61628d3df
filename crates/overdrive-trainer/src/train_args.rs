//! The command line of a training program.

use std::path::PathBuf;

use clap::Args;
use overdrive_optim::LrSchedulerType;
use serde_json::{Map, Value, json};

use crate::layers::preset_of;
use crate::{Layers, Preset, Result, TrainingArguments};

/// The flags of a training program, to be flattened into its own:
///
/// ```
/// use clap::Parser;
/// use overdrive_trainer::TrainArgs;
///
/// #[derive(Parser)]
/// struct Flags {
///     #[command(flatten)]
///     train: TrainArgs,
/// }
///
/// let flags = Flags::parse_from(["train", "--preset", "small", "--steps", "20", "--bf16"]);
/// let arguments = flags.train.resolve()?;
/// assert_eq!(arguments.max_steps, 20);
/// assert!(arguments.bf16);
/// assert_eq!(arguments.model.hidden_size, 384); // the preset's
/// # Ok::<(), overdrive_trainer::Error>(())
/// ```
///
/// Flags stand over the file, and the file over the preset.
#[derive(Debug, Clone, Default, Args)]
pub struct TrainArgs {
    /// Configuration to start from [default: the file's, else tiny]
    #[arg(long, value_enum, help_heading = "Configuration")]
    pub preset: Option<Preset>,

    /// JSON, YAML or TOML file with Hugging Face's TrainingArguments keys
    #[arg(long, value_name = "FILE", help_heading = "Configuration")]
    pub config: Option<PathBuf>,

    /// Folder of the run [default: a new one under runs/]
    #[arg(
        long,
        alias = "output-dir",
        value_name = "DIR",
        help_heading = "Configuration"
    )]
    pub out: Option<PathBuf>,

    /// Replace the run that the folder holds
    #[arg(long, help_heading = "Configuration")]
    pub overwrite: bool,

    #[arg(long, value_name = "N", help_heading = "Configuration",
        help = help("Seed of weights, order of the data and samples", |a| a.seed.to_string()))]
    #[allow(missing_docs, reason = "documented by `help`")]
    pub seed: Option<u64>,

    /// Text to train on: files or folders of text, JSON Lines, CSV, Parquet [default: the Rust sources
    /// that Cargo keeps]
    #[arg(long, value_name = "PATH", num_args = 1.., help_heading = "Data")]
    pub data: Vec<PathBuf>,

    #[arg(long, alias = "dataset-text-field", value_name = "NAME", help_heading = "Data",
        help = help("Column or field of a record that holds its text", |a| a.dataset_text_field.clone()))]
    #[allow(missing_docs, reason = "documented by `help`")]
    pub text_column: Option<String>,

    /// What a document of a text file is: document (the whole file) or line [default: document]
    #[arg(long, value_name = "WHAT", help_heading = "Data")]
    pub sample_by: Option<String>,

    /// Leave out documents that are equal to an earlier one
    #[arg(long, help_heading = "Data")]
    pub remove_duplicates: bool,

    /// What a sequence is: windows (of documents laid end to end) or documents [default: windows]
    #[arg(long, value_name = "WHAT", help_heading = "Data")]
    pub sequences: Option<String>,

    /// Lay as many documents into a row as fit
    #[arg(long, help_heading = "Data")]
    pub packing: bool,

    /// How: bfd, bfd_split or wrapped [default: bfd]
    #[arg(long, value_name = "NAME", help_heading = "Data")]
    pub packing_strategy: Option<String>,

    /// Put documents of about one length into a batch
    #[arg(long, help_heading = "Data")]
    pub group_by_length: bool,

    /// Column of lengths to group by instead of the tokens [default: length, where there is one]
    #[arg(long, value_name = "NAME", help_heading = "Data")]
    pub length_column_name: Option<String>,

    #[arg(long, value_name = "N", help_heading = "Data",
        help = help("Threads that prepare batches", |a| a.dataloader_num_workers.to_string()))]
    #[allow(missing_docs, reason = "documented by `help`")]
    pub dataloader_num_workers: Option<usize>,

    /// Batches that each of them is ahead [default: 2]
    #[arg(long, value_name = "N", help_heading = "Data")]
    pub dataloader_prefetch_factor: Option<usize>,

    /// A tokenizer.json [default: a byte-level BPE trained on the data]
    #[arg(long, value_name = "FILE", help_heading = "Data")]
    pub tokenizer: Option<PathBuf>,

    #[arg(long, value_name = "N", help_heading = "Data",
        help = help("Tokens of the tokenizer that is trained", |a| a.vocab_size.to_string()))]
    #[allow(missing_docs, reason = "documented by `help`")]
    pub vocab_size: Option<u64>,

    #[arg(long, alias = "max-seq-length", value_name = "N", help_heading = "Data",
        help = help("Tokens of a training sequence", |a| a.context_length.to_string()))]
    #[allow(missing_docs, reason = "documented by `help`")]
    pub context_length: Option<u64>,

    #[arg(long, value_name = "PART", help_heading = "Data",
        help = help("Part of the documents kept for validation", |a| a.validation_fraction.to_string()))]
    #[allow(missing_docs, reason = "documented by `help`")]
    pub validation_fraction: Option<f64>,

    #[arg(long, alias = "max-steps", value_name = "N", help_heading = "Training",
        help = help("Optimizer steps", |a| a.max_steps.to_string()))]
    #[allow(missing_docs, reason = "documented by `help`")]
    pub steps: Option<u64>,

    /// Passes over the data, instead of a number of steps
    #[arg(
        long,
        alias = "num-train-epochs",
        value_name = "X",
        conflicts_with = "steps",
        help_heading = "Training"
    )]
    pub epochs: Option<f64>,

    #[arg(long, alias = "per-device-train-batch-size", value_name = "N", help_heading = "Training",
        help = help("Sequences of a micro-batch", |a| a.per_device_train_batch_size.to_string()))]
    #[allow(missing_docs, reason = "documented by `help`")]
    pub micro_batch_size: Option<u64>,

    #[arg(long, value_name = "N", help_heading = "Training",
        help = help("Micro-batches of a step", |a| a.gradient_accumulation_steps.to_string()))]
    #[allow(missing_docs, reason = "documented by `help`")]
    pub gradient_accumulation_steps: Option<u64>,

    #[arg(long, value_name = "X", help_heading = "Training",
        help = help("Highest learning rate", |a| a.learning_rate.to_string()))]
    #[allow(missing_docs, reason = "documented by `help`")]
    pub learning_rate: Option<f64>,

    #[arg(long, value_name = "NAME", help_heading = "Training",
        help = help("Schedule of the learning rate", |a| a.lr_scheduler_type.to_string()))]
    #[allow(missing_docs, reason = "documented by `help`")]
    pub lr_scheduler_type: Option<LrSchedulerType>,

    #[arg(long, value_name = "PART", help_heading = "Training",
        help = help("Warm-up as a part of all steps", |a| a.warmup_ratio.to_string()))]
    #[allow(missing_docs, reason = "documented by `help`")]
    pub warmup_ratio: Option<f64>,

    #[arg(long, value_name = "X", help_heading = "Training",
        help = help("Decoupled weight decay", |a| a.weight_decay.to_string()))]
    #[allow(missing_docs, reason = "documented by `help`")]
    pub weight_decay: Option<f64>,

    #[arg(long, value_name = "X", help_heading = "Training",
        help = help("Largest norm of the gradients, 0 for no limit", |a| a.max_grad_norm.to_string()))]
    #[allow(missing_docs, reason = "documented by `help`")]
    pub max_grad_norm: Option<f64>,

    #[arg(long, value_name = "N", help_heading = "Training",
        help = help("Steps between evaluations, 0 for none", |a| a.eval_steps.unwrap_or(0.0).to_string()))]
    #[allow(missing_docs, reason = "documented by `help`")]
    pub eval_steps: Option<f64>,

    #[arg(long, value_name = "N", help_heading = "Training",
        help = help("Steps between snapshots, 0 for none", |a| a.save_steps.to_string()))]
    #[allow(missing_docs, reason = "documented by `help`")]
    pub save_steps: Option<f64>,

    /// Snapshots that are kept [default: all]
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub save_total_limit: Option<usize>,

    /// Go on after the newest snapshot in `--out` (true), or after the one in this folder
    #[arg(long, value_name = "true|DIR", help_heading = "Training")]
    pub resume_from_checkpoint: Option<String>,

    /// Take the weights of the best snapshot at the end
    #[arg(long, help_heading = "Training")]
    pub load_best_model_at_end: bool,

    /// End after so many evaluations without improvement
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub early_stopping_patience: Option<u32>,

    #[arg(long, value_name = "N", help_heading = "Training",
        help = help("Texts that the trained model writes", |a| a.samples.to_string()))]
    #[allow(missing_docs, reason = "documented by `help`")]
    pub samples: Option<u64>,

    /// adamw_torch_fused, adamw_8bit, paged_adamw_32bit, paged_adamw_8bit, lion_32bit, adafactor or sgd [default: adamw_torch_fused]
    #[arg(long, value_name = "NAME", help_heading = "Training")]
    pub optim: Option<String>,

    /// Write a Chrome trace of the sixth to eighth step to this file
    #[arg(long, value_name = "FILE", help_heading = "Training")]
    pub trace: Option<PathBuf>,

    /// Compute blocks again in backward instead of keeping their activations
    #[arg(
        long,
        overrides_with = "no_gradient_checkpointing",
        help_heading = "Machine"
    )]
    pub gradient_checkpointing: bool,

    /// Do not, also where the file says so
    #[arg(
        long,
        overrides_with = "gradient_checkpointing",
        help_heading = "Machine"
    )]
    pub no_gradient_checkpointing: bool,

    /// eager, sdpa or flash_attention_2 [default: flash_attention_2]
    #[arg(long, value_name = "NAME", help_heading = "Machine")]
    pub attn_implementation: Option<String>,

    /// libtorch's operators one by one instead of the fused kernels
    #[arg(long, help_heading = "Machine")]
    pub no_fused_kernels: bool,

    /// Train in bfloat16 with autocast
    #[arg(long, overrides_with = "no_bf16", help_heading = "Machine")]
    pub bf16: bool,

    /// Do not, also where the file says so
    #[arg(long, overrides_with = "bf16", help_heading = "Machine")]
    pub no_bf16: bool,

    /// Train in float16 with autocast and loss scaling
    #[arg(long, overrides_with = "no_fp16", help_heading = "Machine")]
    pub fp16: bool,

    /// Do not, also where the file says so
    #[arg(long, overrides_with = "fp16", help_heading = "Machine")]
    pub no_fp16: bool,

    /// TensorFloat-32 matrix products on CUDA
    #[arg(long, overrides_with = "no_tf32", help_heading = "Machine")]
    pub tf32: bool,

    /// Full-precision matrix products on CUDA
    #[arg(long, overrides_with = "tf32", help_heading = "Machine")]
    pub no_tf32: bool,

    /// MiB of gradients that several processes send together [default: 25]
    #[arg(long, value_name = "N", help_heading = "Machine")]
    pub ddp_bucket_cap_mb: Option<f64>,

    /// Seconds after which a process that does not answer is given up [default: 1800]
    #[arg(long, value_name = "S", help_heading = "Machine")]
    pub ddp_timeout: Option<f64>,

    /// Train on the CPU even where there is a GPU
    #[arg(long, alias = "use-cpu", help_heading = "Machine")]
    pub cpu: bool,

    /// Threads inside one operator [default: libtorch's choice, one a core]
    #[arg(long, value_name = "N", help_heading = "Machine")]
    pub threads: Option<usize>,
}

/// A flag's help with the value that each preset gives it, so that the two cannot part.
fn help(text: &str, value: impl Fn(&TrainingArguments) -> String) -> String {
    let values: Vec<_> = Preset::ALL
        .map(|preset| (preset, value(&preset.arguments())))
        .into();
    let all_equal = values.windows(2).all(|pair| pair[0].1 == pair[1].1);
    match values.first() {
        Some((_, value)) if all_equal => format!("{text} [default: {value}]"),
        _ => {
            let each: Vec<_> = values
                .iter()
                .map(|(preset, value)| format!("{preset} {value}"))
                .collect();
            format!("{text} [default: {}]", each.join(", "))
        }
    }
}

impl TrainArgs {
    /// The configuration: flags over the file over the preset, validated.
    ///
    /// # Errors
    /// What is wrong with the file ([`Layers::file`]) or with the values
    /// ([`TrainingArguments::validate`]).
    pub fn resolve(&self) -> Result<TrainingArguments> {
        self.resolve_telling(|_| {})
    }

    /// The same, and tells what keys in other spellings than Hugging Face's were taken for, a line each.
    ///
    /// # Errors
    /// As [`resolve`](Self::resolve).
    pub fn resolve_telling(&self, mut say: impl FnMut(&str)) -> Result<TrainingArguments> {
        let in_file = match &self.config {
            Some(path) => preset_of(path)?,
            None => None,
        };
        let mut layers = Layers::new(self.preset.or(in_file).unwrap_or_default());
        if let Some(path) = &self.config {
            layers = layers.file(path)?;
        }
        let layers = layers.layer(Value::Object(self.overrides()), "the command line")?;
        for note in layers.notes() {
            say(&format!("configured  {note}"));
        }
        layers.resolve()
    }

    /// The keys that the flags set.
    fn overrides(&self) -> Map<String, Value> {
        let mut keys = Map::new();
        let mut set = |key: &str, value: Value| {
            if !value.is_null() {
                keys.insert(key.to_owned(), value);
            }
        };
        set("preset", json!(self.preset));
        set("output_dir", json!(self.out));
        set("overwrite_output_dir", switch(self.overwrite, false));
        set("seed", json!(self.seed));
        if !self.data.is_empty() {
            set("data", json!(self.data));
        }
        set("dataset_text_field", json!(self.text_column));
        set("sample_by", json!(self.sample_by));
        set("remove_duplicates", switch(self.remove_duplicates, false));
        set("sequences", json!(self.sequences));
        set("packing", switch(self.packing, false));
        set("packing_strategy", json!(self.packing_strategy));
        set("group_by_length", switch(self.group_by_length, false));
        set("length_column_name", json!(self.length_column_name));
        set("dataloader_num_workers", json!(self.dataloader_num_workers));
        set(
            "dataloader_prefetch_factor",
            json!(self.dataloader_prefetch_factor),
        );
        set("tokenizer", json!(self.tokenizer));
        set("vocab_size", json!(self.vocab_size));
        set("context_length", json!(self.context_length));
        set("validation_fraction", json!(self.validation_fraction));
        set("max_steps", json!(self.steps));
        set("num_train_epochs", json!(self.epochs));
        set("per_device_train_batch_size", json!(self.micro_batch_size));
        set(
            "gradient_accumulation_steps",
            json!(self.gradient_accumulation_steps),
        );
        set("learning_rate", json!(self.learning_rate));
        set("lr_scheduler_type", json!(self.lr_scheduler_type));
        set("warmup_ratio", json!(self.warmup_ratio));
        set("weight_decay", json!(self.weight_decay));
        set("max_grad_norm", json!(self.max_grad_norm));
        every(&mut set, "eval", self.eval_steps);
        every(&mut set, "save", self.save_steps);
        set("save_total_limit", json!(self.save_total_limit));
        set("resume_from_checkpoint", json!(self.resume_from_checkpoint));
        set(
            "load_best_model_at_end",
            switch(self.load_best_model_at_end, false),
        );
        set(
            "early_stopping_patience",
            json!(self.early_stopping_patience),
        );
        set("samples", json!(self.samples));
        set("trace", json!(self.trace));
        set("optim", json!(self.optim));
        set(
            "gradient_checkpointing",
            switch(self.gradient_checkpointing, self.no_gradient_checkpointing),
        );
        set("attn_implementation", json!(self.attn_implementation));
        set("fused_kernels", switch(false, self.no_fused_kernels));
        set("bf16", switch(self.bf16, self.no_bf16));
        set("fp16", switch(self.fp16, self.no_fp16));
        set("tf32", switch(self.tf32, self.no_tf32));
        set("ddp_bucket_cap_mb", json!(self.ddp_bucket_cap_mb));
        set("ddp_timeout", json!(self.ddp_timeout));
        set("use_cpu", switch(self.cpu, false));
        set("threads", json!(self.threads));
        keys
    }
}

/// The keys of something that comes every so many steps; 0 is never.
pub(crate) fn every(set: &mut impl FnMut(&str, Value), what: &str, steps: Option<f64>) {
    let Some(steps) = steps else { return };
    let strategy = if steps == 0.0 { "no" } else { "steps" };
    set(&format!("{what}_strategy"), json!(strategy));
    if steps != 0.0 {
        set(&format!("{what}_steps"), json!(steps));
    }
}

/// What a pair of flags says: on, off, or nothing.
fn switch(on: bool, off: bool) -> Value {
    match (on, off) {
        (true, _) => Value::Bool(true),
        (false, true) => Value::Bool(false),
        (false, false) => Value::Null,
    }
}
