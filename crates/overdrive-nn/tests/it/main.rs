//! Tests of the layers.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod adapter;
mod adapter_rows;
mod layers;
