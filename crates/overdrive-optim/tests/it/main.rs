//! Optimizers, clipping, schedules and their states.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod adamw;
mod clip;
mod combined;
mod common;
mod early_stopping;
mod groups;
mod launches;
mod memory;
mod optimizers;
mod schedules;
mod states;
