//! Errors of tracking.

use thiserror::Error;

/// An error of tracking a run.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// A file or folder could not be read or written.
    #[error(transparent)]
    Common(#[from] overdrive_core::Error),

    /// A record has an extra value that JSON cannot represent.
    #[error("the metrics of step {step} cannot be written as JSON: {source}")]
    NotJson {
        /// The step of the record.
        step: u64,
        /// The error of the JSON writer.
        source: serde_json::Error,
    },

    /// A chart could not be drawn.
    #[error("cannot draw the chart `{chart}`: {message}")]
    Chart {
        /// The title of the chart.
        chart: String,
        /// The error of the drawing library.
        message: String,
    },

    /// An MLflow server has not taken records.
    #[error("the MLflow server {server} {reason}")]
    MlFlow {
        /// The address of the server.
        server: String,
        /// The reason, as the end of the sentence.
        reason: String,
    },

    /// An error of a [`Tracker`](crate::Tracker) outside this crate.
    #[error("the tracker `{tracker}` failed: {source}")]
    Tracker {
        /// The name of the tracker.
        tracker: String,
        /// Its error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;
