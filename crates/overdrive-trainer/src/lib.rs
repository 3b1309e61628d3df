//! What a training program needs around its loop: arguments in Hugging Face's words, presets, run
//! folders, interrupts.
//!
//! What transformers' `TrainingArguments` and `HfArgumentParser` are to a Python user, and for going on
//! with a model what TRL's `SFTTrainer` is:
//!
//! - [`TrainingArguments`] is the configuration, [`Preset`]s are ones that work as they stand;
//! - [`TrainArgs`] and [`FinetuneArgs`] are the flags, [`Layers`] puts flags over a JSON, YAML or TOML file
//!   over a preset and names every wrong key, type and choice with the nearest right one;
//! - [`TrainingPlan`] is what that comes to in whole steps;
//! - [`TextData`] is the text of files of any kind, tokenized and split, [`BatchLoader`] its batches,
//!   prepared by threads; [`evaluate`] the loss on the part held back;
//!   `TrainingArguments` makes the other parts too: model, optimizer, schedule, scaler;
//! - [`TrainingLoop`] is the loop, for any [`TrainBatch`];
//! - [`finetune`] goes on with a model that there is, as [`FinetuneArguments`] say: LoRA, QLoRA, or all
//!   weights, on questions and answers; [`compare`] does each and prints what they cost;
//! - [`RunFolder`] is where a run writes, [`Saving`] are its snapshots, from which it goes on bit for bit,
//!   [`Interrupt`] lets it end well.
//!
//! ```
//! use clap::Parser;
//! use overdrive_trainer::{RunFolder, TrainArgs};
//!
//! #[derive(Parser)]
//! struct Flags {
//!     #[command(flatten)]
//!     train: TrainArgs,
//! }
//!
//! let folder = tempfile::tempdir()?;
//! let out = folder.path().join("run").display().to_string();
//! let flags = Flags::parse_from(["train", "--out", &out, "--steps", "50", "--seed", "7"]);
//!
//! let arguments = flags.train.resolve()?;
//! let run = RunFolder::create(&arguments)?;
//! let plan = arguments.plan(1000)?; // micro-batches of a pass over the data
//! for step in 1..=plan.total_steps {
//!     // … forward, backward, optimizer …
//!     if plan.eval_due(step) {
//!         // … evaluate …
//!     }
//! }
//! assert!(run.arguments().is_file());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | feature | default | adds |
//! |---|---|---|
//! | `parquet` | no | text out of Parquet and Arrow files (arrow takes minutes to compile) |

#![deny(missing_docs)]
#![forbid(unsafe_code)]

mod batch_loader;
mod best_so_far;
mod config_format;
mod data_arguments;
mod diagnosis;
mod documents;
mod error;
mod evaluate;
mod execution_arguments;
mod finetune;
mod interrupt;
mod joint_step;
mod keys;
mod layers;
mod measures;
mod model_arguments;
mod parallel;
mod plan;
mod preset;
mod recording;
mod results;
mod run_folder;
mod samples;
mod save_arguments;
mod saving;
mod setup;
mod text_data;
mod text_records;
mod text_source;
mod train_batch;
mod training_arguments;
mod training_loop;
mod training_summary;
mod under_way;
mod validate;

pub use batch_loader::{BatchLoader, TrainBatches};
pub use config_format::ConfigFormat;
pub use data_arguments::{SampleBy, SequenceMode};
pub use error::{Error, Result};
pub use evaluate::{evaluate, evaluate_in};
pub use execution_arguments::GradientCheckpointingArguments;
pub use finetune::{
    Comparison, ComputeDtype, FinetuneArguments, FinetuneModel,
    FinetuneResults, InstructionData, Method, Quant4Type, TargetModulesArgument, TemplateFormat,
    TrainingMemory, compare, finetune, finetune_in,
};
pub use interrupt::Interrupt;
pub use keys::ConfigArgs;
pub use layers::{Configuration, Layers};
pub use model_arguments::ModelArguments;
pub use parallel::{DdpBackend, Part};
pub use plan::TrainingPlan;
pub use preset::Preset;
pub use results::Results;
pub use run_folder::RunFolder;
pub use samples::write_samples;
pub use save_arguments::{ResumeFromCheckpoint, SaveStrategy};
pub use saving::Saving;
pub use text_data::TextData;
pub use train_batch::{TextBatch, TrainBatch};
pub use training_arguments::{IntervalStrategy, OptimizerName, ReportTo, TrainingArguments};
pub use training_loop::TrainingLoop;
pub use training_summary::{Evaluation, TrainingSummary};

/// The flags of a training program: `--config` and one for each key of [`TrainingArguments`].
pub type TrainArgs = ConfigArgs<TrainingArguments>;

/// The flags of a fine-tuning program: `--config` and one for each key of [`FinetuneArguments`].
pub type FinetuneArgs = ConfigArgs<FinetuneArguments>;
