//! Calibrated quantization: scales and codes that change the outputs of a layer less than rounding to the
//! nearest does.
//!
//! | method | needs | chooses |
//! |---|---|---|
//! | [`ClipOptions`] | nothing; second moments of the inputs help | the scales of the least squared error |
//! | [`GptqOptions`] | second moments of all pairs of inputs | codes; later columns compensate the errors of earlier ones |
//! | [`migration_scales`] | the inputs' largest magnitudes | the scales that divide the inputs and multiply the weights |
//!
//! [`InputCollector`] collects these statistics while a model runs on a few hundred sequences under
//! [`observe_inputs`]; [`quantize_calibrated`] quantizes one weight, and
//! [`quantize_checkpoint`](crate::quantize_checkpoint) a folder.

mod clip;
mod gptq;
mod grid;
mod migration;
mod observer;
mod quantize;
mod statistics;

pub use clip::ClipOptions;
pub use gptq::GptqOptions;
pub use migration::{Migration, fold_into_columns, fold_into_rows, migration_scales};
pub use observer::{InputCollector, InputObserver, is_observed, observe_input, observe_inputs};
pub use quantize::{CalibrationOptions, quantize_calibrated};
pub use statistics::{InputStatistics, Moments};
