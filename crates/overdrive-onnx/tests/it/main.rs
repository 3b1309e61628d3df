//! Written ONNX models: their structure, and their logits in ONNX Runtime.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;
mod onnx_runtime;
mod structure;
