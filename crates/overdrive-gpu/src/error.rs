/// An error of the kernels or of the CUDA driver.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option is outside its range, or a tensor has a shape, dtype or device that a kernel cannot take.
    #[error(transparent)]
    Common(#[from] overdrive_core::Error),
    /// A library cannot be loaded or lacks a function.
    #[error(
        "cannot load {library}: {reason}; install NVIDIA's driver, or set OVERDRIVE_GPU_KERNELS=0"
    )]
    Library {
        /// The file that was opened.
        library: String,
        /// The message of the dynamic linker.
        reason: String,
    },
    /// A function of the CUDA driver failed.
    #[error("{call} for {subject} failed: {name} ({code})")]
    Driver {
        /// The function.
        call: &'static str,
        /// The kernel or device that it was called for.
        subject: String,
        /// The driver's name of the error, such as `CUDA_ERROR_INVALID_IMAGE`.
        name: String,
        /// The driver's error code.
        code: i32,
    },
    /// The embedded kernels do not match the code that calls them, because of an error in this build.
    #[error("the embedded kernels do not match this program: {reason}; run `cargo xtask kernels`")]
    Embedded {
        /// The difference.
        reason: String,
    },
    /// An error of libtorch through overdrive-sys.
    #[error(transparent)]
    Sys(#[from] overdrive_sys::Error),
    /// An error of tch.
    #[error(transparent)]
    Tch(#[from] tch::TchError),
}

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// Returns the error for embedded kernels that do not match.
pub(crate) fn embedded(reason: impl Into<String>) -> Error {
    Error::Embedded {
        reason: reason.into(),
    }
}
