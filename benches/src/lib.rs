//! Code that the benchmarks share: the training step that they measure.
//!
//! Each file of `benches/` is one claim and named after it. `pytorch/compare.py` compares the same step with
//! PyTorch's.

pub mod ablation;
pub mod generation;
mod memory;
mod perplexity;
mod random_model;
mod step;
mod trained;

pub use memory::{UNCACHED_BYTES, read_bandwidth};
pub use perplexity::{Perplexity, Windows};
pub use random_model::random_model;
pub use step::{Shape, Step, StepResult, step_from};
pub use trained::Trained;

/// Returns the median, the mean of the two middle values of an even number; NaN of none.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        n => f64::midpoint(values[n / 2], values[(n - 1) / 2]),
    }
}
