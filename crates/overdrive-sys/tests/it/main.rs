//! Operators, threads and saved tensors.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod denormals;
mod located_tensor;
mod operators;
mod parallel;
mod saved_tensors;
mod scopes;
mod transfer;
