//! The program on a CPU: its sections, its report, and what it does with checks that fail in every way.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod memory;
mod optimizers;
mod parity;
mod peers;
mod report;
mod runner;
mod sections;
mod summary;
