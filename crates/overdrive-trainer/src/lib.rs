//! A training program but for its loop: the run that the loop drives, arguments under Hugging Face's names, presets, data,
//! run folders, interrupts.
//!
//! The counterparts in Python are Accelerate's `Accelerator`, transformers' `TrainingArguments` and `HfArgumentParser`,
//! and TRL's data preparation:
//!
//! - [`TrainingRun`] holds everything of a loop but the model, its loss and the data: precision, accumulation, clipping,
//!   optimizer, schedule, averages, early stopping, snapshots, metrics. The loop stays in the program: the example `train`
//!   is one, on a screen;
//! - [`TrainingArguments`] is the configuration, and a [`Preset`] is a ready-made one;
//! - [`TrainArgs`] and [`FinetuneArgs`] are the flags; [`Layers`] merges flags over a JSON, YAML or TOML file
//!   over a preset, and its errors name every invalid key, type and choice with the nearest valid one;
//! - [`TrainingPlan`] is the configuration in numbers of steps;
//! - [`TextData`] is the text of files in any format, tokenized and split, and [`InstructionData`] holds
//!   prompts and responses; both return loaders whose batches are prepared by threads;
//! - [`batch_loss`] and [`evaluate`] are the loss of a language model, and [`FinetuneTask`] loads one with adapters;
//! - [`dpo_loss`] is that of Direct Preference Optimization, and [`PreferenceTask`] loads a model with its reference and
//!   [`PreferenceData`];
//! - [`RunFolder`] is the output folder of a run, with its snapshots and metrics; [`Interrupt`] lets the run
//!   save and end on Ctrl-C.
//!
//! ```
//! use clap::Parser;
//! use overdrive_trainer::TrainArgs;
//!
//! #[derive(Parser)]
//! struct Flags {
//!     #[command(flatten)]
//!     train: TrainArgs,
//! }
//!
//! let flags = Flags::parse_from(["train", "--preset", "small", "--steps", "50", "--seed", "7"]);
//! let arguments = flags.train.resolve()?;
//! assert_eq!((arguments.max_steps, arguments.seed), (50, 7));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | feature | default | adds |
//! |---|---|---|
//! | `parquet` | no | reading of text from Parquet and Arrow files (arrow takes minutes to compile) |

#![deny(missing_docs)]
#![forbid(unsafe_code)]

mod batch_fit;
mod batch_loader;
mod check;
mod components;
mod config_errors;
mod config_format;
mod config_layers;
mod data_arguments;
mod document_rows;
mod duration_estimate;
mod error;
mod estimates;
mod evaluation;
mod execution_arguments;
mod finetune;
mod fingerprints;
mod interrupt;
mod keys;
mod language_model;
mod model_arguments;
mod parallel;
mod plan;
mod precision;
mod preference;
mod preset;
mod program;
mod recommended;
mod run;
mod run_folder;
mod save_arguments;
mod snapshots;
mod text_data;
mod text_records;
mod text_source;
mod token_files;
mod tokenize;
mod training_arguments;
mod tuning;
mod validate;
mod warnings;

pub use batch_fit::{find_executable_batch_size, usable_memory};
pub use batch_loader::BatchFill;
pub use check::{Finding, MachineFacts, RunCheck, Severity};
pub use config_format::ConfigFormat;
pub use config_layers::{Configuration, Layers};
pub use data_arguments::{SampleBy, SequenceMode};
pub use error::{Error, ProgramError, Result};
pub use evaluation::Evaluation;
pub use execution_arguments::GradientCheckpointingArguments;
pub use finetune::{
    ComputeDtype, FinetuneArguments, FinetuneMethod, FinetuneModel, FinetuneResults, FinetuneTask,
    Finetuned, InstructionData, MethodComparison, Quant4Type, TargetModulesArgument,
    TemplateFormat, TrainingMemory,
};
pub use fingerprints::Fingerprints;
pub use interrupt::Interrupt;
pub use keys::ConfigArgs;
pub use language_model::{
    TrainingResults, batch_loss, decoder_shape, describe_model, evaluate, model_flops, new_model,
    snapshot_files, write_results,
};
pub use model_arguments::ModelArguments;
pub use parallel::{DataShard, DdpBackend};
pub use plan::TrainingPlan;
pub use preference::{
    DpoConfig, DpoLossType, DpoOutput, PreferenceBatch, PreferenceData, PreferenceExample,
    PreferenceLogProbs, PreferenceTask, RewardMetrics, RewardTotals, collate_preferences, dpo_loss,
    preference_log_probs,
};
pub use preset::Preset;
pub use program::{RunEnd, exit, exit_or_resume, print_line};
pub use recommended::{
    Attention, DEVICES, DeviceFacts, DeviceKind, MODELS, ModelSize, RecommendedSettings, Task,
    TrainedWeights,
};
pub use run::{Done, MicroBatch, RunBuilder, RunSummary, TrainingRun};
pub use run_folder::RunFolder;
pub use save_arguments::{ResumeFromCheckpoint, SaveStrategy};
pub use snapshots::BestModel;
pub use text_data::TextData;
pub use tokenize::tokenize;
pub use training_arguments::{IntervalStrategy, OptimizerName, ReportTo, TrainingArguments};
pub use tuning::{Trial, TrialEnd, TuneCandidate, TuneOptions, TuneOutcome, TuneRow, Tuning};

/// The flags of a training program: `--config` and one for each key of [`TrainingArguments`].
pub type TrainArgs = ConfigArgs<TrainingArguments>;

/// The flags of a fine-tuning program: `--config` and one for each key of [`FinetuneArguments`].
pub type FinetuneArgs = ConfigArgs<FinetuneArguments>;
