//! What the benchmarks share: the training step that they measure.
//!
//! One file of `benches/` is one claim, named after it. `pytorch/compare.py` sets the same step
//! beside PyTorch's.

pub mod ablation;
pub mod generation;
mod step;

pub use step::{Shape, Step, StepResult};
