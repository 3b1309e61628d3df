//! The errors of this crate.

use tch::Device;

use crate::Backend;

/// The result of everything in this crate that can fail.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// libtorch refused an operation that tch binds.
    #[error(transparent)]
    Tch(#[from] tch::TchError),

    /// libtorch refused an operation that goes through overdrive-sys.
    #[error(transparent)]
    Sys(#[from] overdrive_sys::Error),

    /// The autograd function of the blockwise kernel failed.
    #[error(transparent)]
    Autograd(#[from] overdrive_autograd::Error),

    /// A GPU kernel or the CUDA driver failed.
    #[error(transparent)]
    Gpu(#[from] overdrive_gpu::Error),

    /// An option is out of range or incompatible with another, or a tensor has the wrong shape, dtype or device.
    #[error(transparent)]
    Common(#[from] overdrive_core::Error),

    /// The requested back end cannot run this attention.
    #[error(
        "the {backend} back end cannot run this attention: {}; choose Backend::Auto or one of: {alternatives}",
        .reasons.join("; ")
    )]
    Backend {
        /// The requested back end.
        backend: Backend,
        /// All reasons against it.
        reasons: Vec<String>,
        /// The names of the back ends that can.
        alternatives: String,
    },

    /// Cumulative lengths do not fit the pack.
    #[error("{tensor}: {problem}")]
    CumulativeLengths {
        /// The name of the argument.
        tensor: &'static str,
        /// The mistake, and the values that are allowed.
        problem: String,
    },

    /// Block tables, lengths or slots do not fit the pool or the queries.
    #[error("{argument}: {problem}")]
    PagedLayout {
        /// The name of the argument.
        argument: &'static str,
        /// The mistake, and the values that are allowed.
        problem: String,
    },

    /// There is nothing to merge, or the numbers of outputs and log-sum-exps differ.
    #[error(
        "cannot merge {outputs} outputs and {lses} log-sum-exps; pass at least one output, and one log-sum-exp for each"
    )]
    Merge {
        /// The number of outputs.
        outputs: usize,
        /// The number of log-sum-exps.
        lses: usize,
    },
}

/// Returns the error of a tensor on another device than the query or pool, which is on `expected`.
pub(crate) fn other_device(tensor: &'static str, device: Device, expected: Device) -> Error {
    let expected = format!("on {expected:?}, as the other tensors are");
    Error::Common(overdrive_core::Error::device(tensor, device, expected))
}
