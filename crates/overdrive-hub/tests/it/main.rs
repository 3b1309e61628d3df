//! Tests against a local server that speaks the hub's protocol, well and badly.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod broken_answers;
mod cache;
mod datasets;
mod names;
#[path = "../../../../on_python/mod.rs"]
mod on_python;
mod python;
mod server;
