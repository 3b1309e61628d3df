//! What can go wrong in this crate.

use tch::{Device, Kind};

use crate::Backend;

/// The result of everything in this crate that can fail.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of an attention.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// libtorch refused an operation that tch binds.
    #[error(transparent)]
    Torch(#[from] tch::TchError),

    /// libtorch refused an operation that goes through overdrive-sys.
    #[error(transparent)]
    Sys(#[from] overdrive_sys::Error),

    /// The autograd function of the blockwise kernel failed.
    #[error(transparent)]
    Autograd(#[from] overdrive_autograd::Error),

    /// A tensor has the wrong shape.
    #[error("{tensor} has shape {shape:?}, expected {expected}")]
    Shape {
        /// Name of the argument.
        tensor: &'static str,
        /// Its shape.
        shape: Vec<i64>,
        /// What it has to be.
        expected: String,
    },

    /// A tensor has the wrong dtype.
    #[error("{tensor} is {kind:?}, expected {expected}")]
    Dtype {
        /// Name of the argument.
        tensor: &'static str,
        /// Its dtype.
        kind: Kind,
        /// What it has to be.
        expected: String,
    },

    /// A tensor is on another device than the query.
    #[error("{tensor} is on {device:?}, but the query is on {expected:?}; move it there")]
    OtherDevice {
        /// Name of the argument.
        tensor: &'static str,
        /// Its device.
        device: Device,
        /// The device of the query.
        expected: Device,
    },

    /// An option is outside its range, or does not go with another.
    #[error("{option} is {value}, expected {expected}")]
    InvalidOption {
        /// Name of the option.
        option: &'static str,
        /// What it was set to.
        value: String,
        /// What it may be.
        expected: &'static str,
    },

    /// The back end that was asked for cannot run this attention.
    #[error(
        "the {backend} back end cannot run this attention: {}; choose Backend::Auto or one of: {alternatives}",
        .reasons.join("; ")
    )]
    Backend {
        /// The back end.
        backend: Backend,
        /// Everything that stands against it.
        reasons: Vec<String>,
        /// Those that can.
        alternatives: String,
    },

    /// Cumulative lengths do not describe the pack.
    #[error("{tensor}: {problem}")]
    CumulativeLengths {
        /// Name of the argument.
        tensor: &'static str,
        /// What is wrong with them.
        problem: String,
    },

    /// Block tables, lengths or slots do not fit the pool or the queries.
    #[error("{argument}: {problem}")]
    PagedLayout {
        /// Name of the argument.
        argument: &'static str,
        /// What is wrong with it.
        problem: String,
    },

    /// There is nothing to merge, or not as many log-sum-exps as outputs.
    #[error(
        "merging {outputs} outputs with {lses} log-sum-exps; give at least one, and as many of each"
    )]
    Merge {
        /// Number of outputs.
        outputs: usize,
        /// Number of log-sum-exps.
        lses: usize,
    },
}
