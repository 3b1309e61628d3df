//! The packing of sequences of different lengths into rows of one length.

mod best_fit;
mod plan;
mod strategy;

pub use plan::{PackPlan, Segment};
pub use strategy::PackingStrategy;
