//! Quantized weights: formats, files, matrix products, calibration.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod calibration;
mod checkpoint;
mod cuda;
mod formats;
mod fp8_blocks;
mod gguf;
mod linear;
#[path = "../../../../test_tensors/mod.rs"]
mod test_tensors;
mod weights;
