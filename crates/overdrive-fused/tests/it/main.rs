//! Fused kernels against libtorch's operators in f64.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod activation;
mod common;
mod cross_entropy;
mod few_rows;
mod fp8;
mod rms_norm;
mod rotary;
