//! Everything in a training program except the loop: the run that the loop drives, arguments under Hugging Face's names,
//! presets, data, run folders, interrupts.
//!
//! The counterparts in Python are Accelerate's `Accelerator`, transformers' `TrainingArguments` and `HfArgumentParser`,
//! and TRL's data preparation:
//!
//! - [`TrainingRun`] does the work of a loop around the model, its loss and the data: precision, accumulation, clipping,
//!   optimizer, schedule, averages, early stopping, snapshots, metrics. The loop itself stays in the program; that of the
//!   example `train` fits on a screen;
//! - [`TrainingArguments`] is the configuration, and a [`Preset`] is a ready-made one;
//! - [`TrainArgs`], [`FinetuneArgs`] and [`DpoArgs`] are the flags; [`Layers`] merges flags over a JSON, YAML or TOML file
//!   over a preset, and its errors name every invalid key, type and choice with the nearest valid one;
//! - [`TrainingPlan`] is the configuration in numbers of steps, and [`MemoryPlan`] estimates the memory of a run before it
//!   starts, and advises what would make it fit;
//! - [`TextData`] is the text of files in any format, tokenized and split, and [`InstructionData`] holds
//!   prompts and responses; both return loaders whose batches are prepared by threads;
//! - [`batch_loss`] and [`evaluate`] are the loss of a language model, and [`FinetuneTask`] loads one with adapters;
//! - [`dpo_loss`] is that of Direct Preference Optimization, and [`PreferenceTask`] loads a model with its reference and
//!   [`PreferenceData`];
//! - [`ClassificationTask`] loads or makes a sequence classifier with its texts, and [`Seq2SeqPair`] is a source with its
//!   target for an encoder-decoder model; [`load_image_texts`] loads images with captions for a model that sees images;
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
//! The modules are layers, each of which imports only those before it: `memory_estimate`, `arguments` (plain data and what it is read from),
//! `data` (text, tokens, loaders), `run` (the parts of a loop), `tasks` (language model, fine-tuning, preferences) and
//! `advice` (check, recommended settings, tuning).
//!
//! | feature | default | adds |
//! |---|---|---|
//! | `image` | no | images with texts: PNG, JPEG, WebP |
//! | `mlflow` | no | `report_to: mlflow`, an MLflow server (HTTP and TLS) |
//! | `nccl` | no | several processes on NVIDIA GPUs over NCCL; needs the CUDA build of libtorch |
//! | `parquet` | no | reading of text from Parquet and Arrow files (arrow takes minutes to compile) |
//! | `wandb` | no | `report_to: wandb`, an offline run of Weights & Biases |

#![deny(missing_docs)]
#![forbid(unsafe_code)]

mod advice;
mod arguments;
mod data;
mod error;
mod interrupt;
mod memory_estimate;
mod program;
mod run;
mod tasks;

pub use advice::{
    DEVICES, DeviceFacts, DeviceKind, Finding, MODELS, ModelSize, RecommendedSettings, RunCheck,
    Severity, Task, TrainedWeights, Trial, Trials, TuneCandidate, TuneOptions, TuneOutcome,
    TuneRow, Tuning,
};
pub use arguments::{
    ComputeDtype, ConfigArgs, ConfigFormat, Configuration, CudaGraphs, DdpBackend, DpoArguments,
    DpoConfig, DpoLossType, FinetuneArguments, GradientCheckpointingArguments, IntervalStrategy,
    Layers, MixtureWeights, ModelArguments, OptimizerName, Preset, Quant4Type, REWARD_METRICS,
    ReportTo, ResumeFromCheckpoint, SampleBy, SaveStrategy, SequenceMode, TrainingArguments,
};
pub use data::{BatchFill, DataShard, TextData, tokenize};
pub use error::{Error, ProgramError, Result};
pub use interrupt::Interrupt;
pub use memory_estimate::{
    Change, DecoderShape, ExpertShape, GpuMemory, MemoryAdvice, MemoryEstimate, MemoryPlan,
    OptimizerMemory, PeakPoint,
};
pub use overdrive_core::{RunEnd, print_line};
pub use program::run_main;
pub use run::{
    BestModel, Done, Evaluation, Fingerprints, MicroBatch, RunFolder, RunOptions, RunSummary,
    StaticInputs, TrainingPlan, TrainingRun, train_with_batch_that_fits, usable_memory,
};
pub use tasks::{
    ClassificationTask, DpoOutput, FinetuneMethod, FinetuneModel, FinetuneResults, FinetuneTask,
    Finetuned, InstructionData, LabeledBatch, MethodComparison, PreferenceBatch, PreferenceData,
    PreferenceExample, PreferenceLogProbs, PreferenceTask, RewardMetrics, RewardTotals,
    Seq2SeqPair, TemplateFormat, TrainingMemory, TrainingResults, batch_loss, collate_preferences,
    decoder_shape, describe_model, dpo_loss, evaluate, exact_matches, load_seq2seq, model_flops,
    new_model, preference_log_probs, snapshot_files, write_results,
};
#[cfg(feature = "image")]
pub use tasks::{ImageTextBatch, ImageTextFormat, load_image_texts};

/// The flags of a training program: `--config` and one for each key of [`TrainingArguments`].
pub type TrainArgs = ConfigArgs<TrainingArguments>;

/// The flags of a fine-tuning program: `--config` and one for each key of [`FinetuneArguments`].
pub type FinetuneArgs = ConfigArgs<FinetuneArguments>;

/// The flags of a program for preference training: `--config` and one for each key of [`DpoArguments`].
pub type DpoArgs = ConfigArgs<DpoArguments>;
