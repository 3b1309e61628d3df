use std::path::PathBuf;

use clap::Args;
use serde_json::{Map, Value, json};

use super::{FinetuneArguments, FinetuneLayers};
use crate::Result;
use crate::train_args::every;

/// The flags of a fine-tuning program, to be flattened into its own. They stand over the file.
#[derive(Debug, Clone, Default, Args)]
pub struct FinetuneArgs {
    /// Folder of the model: config.json, model.safetensors, tokenizer.json
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,

    /// Records to learn from: JSON Lines (or a JSON array) with `prompt` and `response`, `messages`,
    /// `instruction` and `output`, or `text`
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub data: Vec<PathBuf>,

    /// Folder for the adapter, metrics and report [default: a new one under runs/]
    #[arg(long, alias = "output-dir", value_name = "DIR")]
    pub out: Option<PathBuf>,

    /// Replace the run that the folder holds
    #[arg(long)]
    pub overwrite: bool,

    /// JSON, YAML or TOML file with the keys of TRL, PEFT, BitsAndBytesConfig and TrainingArguments
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Optimizer steps
    #[arg(long, alias = "max-steps", value_name = "N")]
    pub steps: Option<u64>,

    /// Passes over the data, instead of a number of steps [default: 3]
    #[arg(long, value_name = "X", conflicts_with = "steps")]
    pub epochs: Option<f64>,

    /// Train all weights, without adapters
    #[arg(long, conflicts_with = "qlora")]
    pub full: bool,

    /// Keep the weights in NF4 with double quantization, and train adapters
    #[arg(long)]
    pub qlora: bool,

    /// Rank of the adapters [default: 16]
    #[arg(long, value_name = "N")]
    pub lora_r: Option<i64>,

    /// Scale of the adapters, divided by the rank [default: 32]
    #[arg(long, value_name = "X")]
    pub lora_alpha: Option<f64>,

    /// Linear maps that get adapters: names, or all-linear
    #[arg(long, value_name = "NAME", num_args = 1.., value_delimiter = ',')]
    pub target_modules: Vec<String>,

    /// Tokens of an example at most [default: 1024, or the model's context]
    #[arg(long, alias = "max-length", value_name = "N")]
    pub max_seq_length: Option<u64>,

    /// Lay as many examples into a row as fit
    #[arg(long)]
    pub packing: bool,

    /// Put examples of about one length into a batch
    #[arg(long, conflicts_with = "packing")]
    pub group_by_length: bool,

    /// Leave out records that are equal to an earlier one
    #[arg(long)]
    pub remove_duplicates: bool,

    /// Threads that prepare batches [default: 1]
    #[arg(long, value_name = "N")]
    pub dataloader_num_workers: Option<usize>,

    /// Rows of a micro-batch [default: 8]
    #[arg(long, alias = "per-device-train-batch-size", value_name = "N")]
    pub micro_batch_size: Option<u64>,

    /// Micro-batches of a step [default: 1]
    #[arg(long, value_name = "N")]
    pub gradient_accumulation_steps: Option<u64>,

    /// Highest learning rate [default: 2e-4]
    #[arg(long, value_name = "X")]
    pub learning_rate: Option<f64>,

    /// adamw_torch_fused, adamw_8bit, paged_adamw_32bit, paged_adamw_8bit, … [default: adamw_torch_fused]
    #[arg(long, value_name = "NAME")]
    pub optim: Option<String>,

    /// Compute blocks again in backward instead of keeping their activations
    #[arg(long)]
    pub gradient_checkpointing: bool,

    /// Steps between evaluations on a part that is held back, 0 for none [default: none]
    #[arg(long, value_name = "N")]
    pub eval_steps: Option<f64>,

    /// Steps between snapshots, 0 for none [default: 500]
    #[arg(long, value_name = "N")]
    pub save_steps: Option<f64>,

    /// Snapshots that are kept [default: all]
    #[arg(long, value_name = "N")]
    pub save_total_limit: Option<usize>,

    /// Go on after the newest snapshot in `--out` (true), or after the one in this folder
    #[arg(long, value_name = "true|DIR")]
    pub resume_from_checkpoint: Option<String>,

    /// Train in bfloat16 with autocast
    #[arg(long)]
    pub bf16: bool,

    /// Write the model with the adapter merged into it as well
    #[arg(long)]
    pub merge: bool,

    /// Seed of adapters, dropout and the order of the data [default: 42]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,

    /// Train on the CPU even where there is a GPU
    #[arg(long)]
    pub cpu: bool,
}

impl FinetuneArgs {
    /// The configuration: flags over the file, validated.
    ///
    /// # Errors
    /// What is wrong with the file or with the values.
    pub fn resolve(&self) -> Result<FinetuneArguments> {
        self.resolve_telling(|_| {})
    }

    /// The same, and tells what keys in other spellings were taken for, a line each.
    ///
    /// # Errors
    /// As [`resolve`](Self::resolve).
    pub fn resolve_telling(&self, mut say: impl FnMut(&str)) -> Result<FinetuneArguments> {
        let mut layers = FinetuneLayers::new();
        if let Some(path) = &self.config {
            layers = layers.file(path)?;
        }
        let overrides = Value::Object(self.overrides());
        let layers = layers.layer(overrides, "the command line")?;
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
        let on = |given: bool| given.then_some(true);
        set("model_name_or_path", json!(self.model));
        if !self.data.is_empty() {
            set("data", json!(self.data));
        }
        set("output_dir", json!(self.out));
        set("overwrite_output_dir", json!(on(self.overwrite)));
        set("max_steps", json!(self.steps));
        set("num_train_epochs", json!(self.epochs));
        if self.full {
            set("use_peft", json!(false));
            set("load_in_4bit", json!(false));
            set("load_in_8bit", json!(false));
        }
        if self.qlora {
            set("use_peft", json!(true));
            set("load_in_4bit", json!(true));
            set("load_in_8bit", json!(false));
            set("bnb_4bit_quant_type", json!("nf4"));
            set("bnb_4bit_use_double_quant", json!(true));
        }
        set("lora_r", json!(self.lora_r));
        set("lora_alpha", json!(self.lora_alpha));
        match self.target_modules.as_slice() {
            [] => {}
            [all] if all.eq_ignore_ascii_case("all-linear") => set("target_modules", json!(all)),
            names => set("target_modules", json!(names)),
        }
        set("context_length", json!(self.max_seq_length));
        set("packing", json!(on(self.packing)));
        set("group_by_length", json!(on(self.group_by_length)));
        set("remove_duplicates", json!(on(self.remove_duplicates)));
        set("dataloader_num_workers", json!(self.dataloader_num_workers));
        set("per_device_train_batch_size", json!(self.micro_batch_size));
        set(
            "gradient_accumulation_steps",
            json!(self.gradient_accumulation_steps),
        );
        set("learning_rate", json!(self.learning_rate));
        set("optim", json!(self.optim));
        set(
            "gradient_checkpointing",
            json!(on(self.gradient_checkpointing)),
        );
        every(&mut set, "eval", self.eval_steps);
        every(&mut set, "save", self.save_steps);
        set("save_total_limit", json!(self.save_total_limit));
        set("resume_from_checkpoint", json!(self.resume_from_checkpoint));
        set("bf16", json!(on(self.bf16)));
        set("merge", json!(on(self.merge)));
        set("seed", json!(self.seed));
        set("use_cpu", json!(on(self.cpu)));
        keys
    }
}
