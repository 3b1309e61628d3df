//! Errors of measuring.

use std::path::PathBuf;

use thiserror::Error;

/// An error of measuring a step, a device or a run.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// An option is outside its range, or a file could not be read or written.
    #[error(transparent)]
    Common(#[from] overdrive_core::Error),

    /// A profile's trace could not be written.
    #[error("cannot write the trace {}: {message}", path.display())]
    Trace {
        /// The file.
        path: PathBuf,
        /// The reason.
        message: String,
    },

    /// The peak of a device is neither known nor could it be measured.
    #[error(
        "the peak of {device} in {dtype} is not known and could not be measured ({message}); give it \
         with `PeakFlops::given`"
    )]
    UnknownPeak {
        /// The device.
        device: String,
        /// The dtype of the matrix products.
        dtype: String,
        /// The error of the measurement.
        message: String,
    },

    /// The timer should wait for a device that does not exist.
    #[error(
        "cannot wait for {device}: this process sees {available} CUDA device(s); use another device, or time \
         without waiting (`StepTimer::new`)"
    )]
    NoSuchDevice {
        /// The device.
        device: String,
        /// The number of CUDA devices that libtorch sees.
        available: i64,
    },

    /// An error of the shim or of libtorch.
    #[error(transparent)]
    Sys(#[from] overdrive_sys::Error),

    /// An error of tch.
    #[error(transparent)]
    Tch(#[from] tch::TchError),
}

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;
