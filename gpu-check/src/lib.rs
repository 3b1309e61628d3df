//! Checks and measurements of everything that Overdrive does on a GPU, in one program: `cargo xtask gpu-check`.
//!
//! A [section](sections) is one file in `sections/`. The [runner] starts each section in its own process with a time
//! limit, so that a crash, a hang or exhausted memory ends only that section. Every result is written to the [report]
//! as soon as it is available.

#![forbid(unsafe_code)]

pub mod context;
pub mod finding;
pub mod line;
mod models;
pub mod parity;
pub mod peer;
pub mod report;
pub mod runner;
pub mod sections;
pub mod summary;
mod timing;
mod training;
