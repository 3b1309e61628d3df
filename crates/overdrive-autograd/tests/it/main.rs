//! Functions with a backward in Rust, gradients with all options, backward on several threads.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod functions;
mod gradients;
mod guards;
mod hooks;
#[path = "../../../../test_tensors/mod.rs"]
mod test_tensors;
mod threads;
