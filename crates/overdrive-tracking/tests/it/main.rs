//! Metrics files and reports.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod metrics_files;
#[cfg(feature = "mlflow")]
mod mlflow;
#[cfg(feature = "mlflow")]
mod mlflow_python;
#[cfg(feature = "mlflow")]
mod mlflow_server;
#[cfg(any(feature = "mlflow", feature = "wandb"))]
#[path = "../../../../on_python/mod.rs"]
mod on_python;
mod report;
#[cfg(feature = "wandb")]
mod wandb;
#[cfg(feature = "wandb")]
mod wandb_python;
