//! What can go wrong while looking for libtorch.

use std::fmt;
use std::path::PathBuf;

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// Why no usable libtorch was found. Written by hand, not with `thiserror`: this crate is built
/// before every other one and uses the standard library only.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// None of the places holds a libtorch.
    NotFound {
        /// The places that were looked at, in order, each with what was missing there.
        tried: Vec<String>,
    },
    /// A variable names a folder that holds no libtorch.
    Incomplete {
        /// What pointed there, for example `LIBTORCH`.
        source: String,
        /// The folder it names.
        root: PathBuf,
        /// The files that a libtorch has and this folder has not.
        missing: Vec<PathBuf>,
    },
    /// `LIBTORCH_USE_PYTORCH` is set and Python did not say where its PyTorch is.
    Python {
        /// The interpreter that was asked.
        interpreter: PathBuf,
        /// What happened, with Python's own last words.
        reason: String,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::NotFound { tried } => {
                write!(f, "found no libtorch; tried")?;
                for place in tried {
                    write!(f, "\n  - {place}")?;
                }
                write!(
                    f,
                    "\nRun `cargo xtask setup` in a checkout of Overdrive, or set LIBTORCH to the \
                     folder of a libtorch {} (the one that holds lib/ and include/), or set \
                     LIBTORCH_USE_PYTORCH=1 where Python has PyTorch {}.",
                    crate::TORCH_VERSION,
                    crate::TORCH_VERSION,
                )
            }
            Error::Incomplete {
                source,
                root,
                missing,
            } => {
                write!(
                    f,
                    "{source} names {}, which is no complete libtorch: ",
                    root.display()
                )?;
                for (i, file) in missing.iter().enumerate() {
                    let comma = if i == 0 { "" } else { ", " };
                    write!(f, "{comma}{} is missing", file.display())?;
                }
                write!(
                    f,
                    ". Set it to the folder that holds lib/ and include/, or unset it and run \
                     `cargo xtask setup`."
                )
            }
            Error::Python {
                interpreter,
                reason,
            } => write!(
                f,
                "LIBTORCH_USE_PYTORCH is set, but {} did not say where its PyTorch is: {reason}. \
                 Activate the environment that has PyTorch {}, or unset LIBTORCH_USE_PYTORCH.",
                interpreter.display(),
                crate::TORCH_VERSION,
            ),
        }
    }
}

impl std::error::Error for Error {}
