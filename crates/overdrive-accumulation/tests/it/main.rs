//! Gradient accumulation, batch plans and the search for a batch size.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod batch_plan;
mod batch_size_search;
mod big_batch;
mod errors;
mod failures;
mod sync;
mod terms;
