//! The arguments of a run: plain data, the validation of its values, and the files, flags and presets that it is read from.
//!
//! An option is added in one place, the `options!` block of `training.rs`, `model.rs`, `finetune.rs` or `preference.rs`: a field with its
//! documentation, its default, and its row (the program that reads it, its other names, its range). The key in files, the
//! flag, its help, the errors and the tables of the guide follow from it; what is left is the code in which it
//! acts. An optimizer is added in two: a variant of [`OptimizerName`], and its arms in `run/optimizer.rs`.

mod choices;
mod data;
mod execution;
mod finetune;
mod flags;
mod format;
mod key;
mod keys;
mod layers;
mod model;
mod preference;
mod preset;
mod read;
mod saving;
mod training;
mod validate;

pub use choices::{
    ComputeDtype, CudaGraphs, DdpBackend, DpoLossType, GradientCheckpointingArguments,
    IntervalStrategy, MixtureWeights, OptimizerName, Preset, Quant4Type, ReportTo,
    ResumeFromCheckpoint, SampleBy, SaveStrategy, SequenceMode,
};
pub use finetune::FinetuneArguments;
pub use flags::ConfigArgs;
pub use format::ConfigFormat;
pub use layers::{Configuration, Layers};
pub use model::ModelArguments;
pub use preference::{DpoArguments, DpoConfig, REWARD_METRICS};
pub use training::TrainingArguments;

pub(crate) use data::is_token_file;
pub(crate) use format::read_file;
pub(crate) use key::{Program, plain};
pub(crate) use keys::{differs_by_rank, keys_of_the_order};
pub(crate) use read::{as_value, keys_of, nearest};
pub(crate) use saving::{ARGUMENTS, BITS_PER_BYTE, no_metric};
pub(crate) use training::DEFAULT_LENGTH_COLUMN;
pub(crate) use validate::STEPS_BEFORE_TRACE;
