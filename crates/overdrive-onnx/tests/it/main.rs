//! Written ONNX models: their structure, and their logits in ONNX Runtime.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;
#[path = "../../../../on_python/mod.rs"]
mod on_python;
mod onnx_runtime;
mod structure;
