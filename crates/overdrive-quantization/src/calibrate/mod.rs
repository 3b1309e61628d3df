//! Quantization with the help of data: scales and codes that change what a model computes less than
//! rounding does.
//!
//! | | needs | chooses |
//! |---|---|---|
//! | [`ClipOptions`] | nothing; second moments of the inputs help | scales, by the least squared error |
//! | [`GptqOptions`] | second moments of all pairs of inputs | codes, so that later ones make good the errors of earlier ones |
//! | [`migration_scales`] | the inputs' largest magnitudes | what to divide inputs by, and multiply weights |
//!
//! [`InputCollector`] gathers what is needed while a model reads a few hundred lines of text under
//! [`observe_inputs`]; [`quantize_calibrated`] quantizes one weight, and
//! [`quantize_checkpoint`](crate::quantize_checkpoint) a folder.

mod clip;
mod gptq;
mod grid;
mod observer;
mod quantize;
mod smooth;
mod statistics;

pub use clip::ClipOptions;
pub use gptq::GptqOptions;
pub use observer::{InputCollector, InputObserver, observe_input, observe_inputs};
pub use quantize::{CalibrationOptions, quantize_calibrated};
pub use smooth::{Migration, fold_into_columns, fold_into_rows, migration_scales};
pub use statistics::{InputStatistics, Moments};
