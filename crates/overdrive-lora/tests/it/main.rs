//! Adapters: against PEFT, gradients, merging, files, training.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod by_row;
mod common;
mod config;
mod experts;
mod files;
mod gradients;
mod layers;
mod matching;
mod merging;
mod parity;
mod tokens;
mod training;
