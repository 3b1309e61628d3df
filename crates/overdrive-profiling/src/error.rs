use std::path::PathBuf;

use thiserror::Error;

/// What can go wrong while measuring, logging and reporting.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// A file or folder could not be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried, in words: `create`, `append to`, `read`.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The operating system's answer.
        source: std::io::Error,
    },

    /// A line of a metrics file is no metrics record.
    #[error(
        "{}:{line} is not a metrics record: {source}; each line must be one JSON object with at \
         least `step`, `loss`, `learning_rate`, `tokens_per_second` and `peak_memory_bytes`",
        path.display()
    )]
    BadRecord {
        /// The metrics file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// What the JSON parser says.
        source: serde_json::Error,
    },

    /// A record could not be written as JSON: one of its extra values cannot be.
    #[error("the metrics of step {step} cannot be written as JSON: {source}")]
    Unwritable {
        /// The step of the record.
        step: u64,
        /// What the JSON writer says.
        source: serde_json::Error,
    },

    /// A chart could not be drawn.
    #[error("cannot draw the chart `{chart}`: {message}")]
    Chart {
        /// The chart's title.
        chart: String,
        /// What the drawing library says.
        message: String,
    },

    /// A profile's trace could not be written.
    #[error("cannot write the trace {}: {message}", path.display())]
    Trace {
        /// The file.
        path: PathBuf,
        /// What went wrong.
        message: String,
    },

    /// A schedule, a window or a size makes no sense.
    #[error("{name} is {value}, but must be {expected}")]
    InvalidConfig {
        /// The field.
        name: &'static str,
        /// What it was.
        value: String,
        /// What it must be.
        expected: &'static str,
    },

    /// The peak of a device is neither known nor could be measured.
    #[error(
        "the peak of {device} in {dtype} is not known and could not be measured ({message}); give it \
         with `PeakFlops::given`"
    )]
    UnknownPeak {
        /// The device.
        device: String,
        /// The dtype of the products.
        dtype: String,
        /// What went wrong while measuring.
        message: String,
    },

    /// The shim or libtorch failed.
    #[error(transparent)]
    Sys(#[from] overdrive_sys::Error),

    /// A tensor operation failed.
    #[error(transparent)]
    Tch(#[from] tch::TchError),

    /// The timer was asked to wait for a device that is not there.
    #[error(
        "cannot wait for {device}: this process sees {available} CUDA device(s); time without \
         waiting (`StepTimer::new`) or choose a device that is there"
    )]
    NoSuchDevice {
        /// The device asked for.
        device: String,
        /// How many CUDA devices libtorch sees.
        available: i64,
    },
}

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// For `map_err`: names the action and the path beside the operating system's answer.
    pub(crate) fn io(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io {
            action,
            path,
            source,
        }
    }
}
