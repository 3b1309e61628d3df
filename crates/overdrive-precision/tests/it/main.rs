//! Autocast and the gradient scaler.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod autocast;
mod grad_scaler;
mod scaler_statistics;
