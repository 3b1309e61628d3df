//! Packages of AOTInductor.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;
#[path = "../../../../on_python/mod.rs"]
mod on_python;
mod packages;
mod refusals;
