//! Tests of the engine. A target of its own, because these tests set the number of libtorch's threads,
//! which belongs to the process, to one: their models are too small for more.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod adapters;
mod chat;
mod requests;
mod soak;
#[path = "../it/support.rs"]
mod support;
mod vision;
mod warm_up;
