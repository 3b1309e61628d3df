//! Packages of AOTInductor.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;
mod packages;
mod refusals;
