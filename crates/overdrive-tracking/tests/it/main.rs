//! Metrics files and reports.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod metrics_files;
mod report;
