//! Groups of real processes on loopback.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod accumulator;
mod collectives;
mod common;
mod data_parallel;
mod joint_batch;
#[path = "../../../../on_python/mod.rs"]
mod on_python;
mod rendezvous;
mod subgroups;
