//! The gated delta rule and the causal convolution on a CPU.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod against_math;
mod common;
mod laws;
mod packed;
mod refused;
mod transformers;
