//! Configurations, run folders and labels of conversations. Tests of signals, of libtorch's profiler and of the
//! memory of the process are targets of their own.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod captured_passes;
mod chat_labels;
mod configuration;
mod dpo;
mod interrupted_runs;
mod label_counts;
mod precision;
mod run_folders;
mod run_parts;
mod text_data;
mod trackers;
