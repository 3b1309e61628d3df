//! Everything that a training program needs around its loop: arguments under Hugging Face's names, presets,
//! data, run folders, interrupts.
//!
//! A Python user has transformers' `TrainingArguments` and `HfArgumentParser`, and TRL's data preparation:
//!
//! - [`TrainingArguments`] is the configuration, [`Preset`]s are ones that work as they stand;
//! - [`TrainArgs`] and [`FinetuneArgs`] are the flags, [`Layers`] puts flags over a JSON, YAML or TOML file
//!   over a preset and names every wrong key, type and choice with the nearest right one;
//! - [`TrainingPlan`] is the configuration in whole steps;
//! - [`TextData`] is the text of files of any kind, tokenized and split, [`InstructionData`] are questions
//!   and answers; both make loaders of batches, prepared by threads;
//! - `TrainingArguments` makes the other parts of a run: process group, optimizer, schedule, data parallel,
//!   the recorder of its steps;
//! - [`RunFolder`] is where a run writes, with its snapshots and metrics; [`Interrupt`] lets it end well.
//!
//! The loop itself is in the example `train`: copy it and change it.
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

mod config_format;
mod data_arguments;
mod diagnosis;
mod documents;
mod error;
mod evaluation;
mod execution_arguments;
mod finetune;
mod interrupt;
mod keys;
mod layers;
mod loading;
mod measures;
mod model_arguments;
mod parallel;
mod plan;
mod preset;
mod run_folder;
mod save_arguments;
mod setup;
mod snapshots;
mod text_data;
mod text_records;
mod text_source;
mod training_arguments;
mod validate;

pub use config_format::ConfigFormat;
pub use data_arguments::{SampleBy, SequenceMode};
pub use error::{Error, Result};
pub use evaluation::Evaluation;
pub use execution_arguments::GradientCheckpointingArguments;
pub use finetune::{
    ComputeDtype, FinetuneArguments, InstructionData, Quant4Type, TargetModulesArgument,
    TemplateFormat,
};
pub use interrupt::Interrupt;
pub use keys::ConfigArgs;
pub use layers::{Configuration, Layers};
pub use model_arguments::ModelArguments;
pub use parallel::{DdpBackend, Part};
pub use plan::TrainingPlan;
pub use preset::Preset;
pub use run_folder::RunFolder;
pub use save_arguments::{ResumeFromCheckpoint, SaveStrategy};
pub use snapshots::{load_best, loader_totals};
pub use text_data::TextData;
pub use training_arguments::{IntervalStrategy, OptimizerName, ReportTo, TrainingArguments};

/// The flags of a training program: `--config` and one for each key of [`TrainingArguments`].
pub type TrainArgs = ConfigArgs<TrainingArguments>;

/// The flags of a fine-tuning program: `--config` and one for each key of [`FinetuneArguments`].
pub type FinetuneArgs = ConfigArgs<FinetuneArguments>;
