//! Advice before a run: the check of its machine and data, recommended settings, and tuning.

mod check;
mod recommended;
mod tuning;

pub use check::{Finding, RunCheck, Severity};
pub use recommended::{
    DEVICES, DeviceFacts, DeviceKind, MODELS, ModelSize, RecommendedSettings, Task, TrainedWeights,
};
pub use tuning::{Trial, Trials, TuneCandidate, TuneOptions, TuneOutcome, TuneRow, Tuning};
