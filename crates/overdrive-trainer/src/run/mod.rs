//! The parts of a training loop, from the arguments to the snapshots: what a [`TrainingRun`] is built from.

mod batch_fit;
mod capture;
mod components;
mod duration;
mod fingerprints;
mod folder;
mod log;
mod memory;
mod micro_batch;
mod optimizer;
mod parallel;
mod plan;
mod snapshots;
mod start;
mod summary;
mod trackers;
mod training_run;

pub(crate) use batch_fit::{FinetuneStep, Objective};
pub use batch_fit::{train_with_batch_that_fits, usable_memory};
pub use fingerprints::Fingerprints;
pub use folder::RunFolder;
pub use log::Done;
pub(crate) use memory::gpu_memory;
pub use micro_batch::{MicroBatch, StaticInputs};
pub use plan::TrainingPlan;
pub use snapshots::BestModel;
pub use start::RunOptions;
pub use summary::{Evaluation, RunSummary};
pub use training_run::TrainingRun;

pub(crate) use fingerprints::model_digest;
pub(crate) use summary::tensor_bytes;
pub(crate) use training_run::shared;
