//! The errors of the search for libtorch.

use std::fmt;
use std::path::PathBuf;

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// The reason why no usable libtorch was found. It is written without `thiserror`, because this crate is
/// built before all others and uses the standard library only.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// No location holds a libtorch.
    NotFound {
        /// The locations in the order of the search, each with what is missing there.
        tried: Vec<String>,
    },
    /// A variable names a folder that holds no complete libtorch.
    Incomplete {
        /// The source of the path, for example `LIBTORCH`.
        source: String,
        /// The folder.
        root: PathBuf,
        /// The missing files of libtorch.
        missing: Vec<PathBuf>,
    },
    /// `LIBTORCH_USE_PYTORCH` is set, but Python did not return the folder of PyTorch.
    Python {
        /// The interpreter.
        interpreter: PathBuf,
        /// The cause, with the last line of Python's error output.
        reason: String,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::NotFound { tried } => {
                write!(f, "no libtorch found; tried")?;
                for location in tried {
                    write!(f, "\n  - {location}")?;
                }
                write!(
                    f,
                    "\nRun `cargo xtask setup` in a checkout of Overdrive, or set LIBTORCH to the \
                     folder of a libtorch {} (the one that holds lib/ and include/), or set \
                     LIBTORCH_USE_PYTORCH=1 if Python has PyTorch {}.",
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
                    "{source} names {}, which is not a complete libtorch: ",
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
                "LIBTORCH_USE_PYTORCH is set, but {} did not return the folder of its PyTorch: {reason}. \
                 Activate the environment that has PyTorch {}, or unset LIBTORCH_USE_PYTORCH.",
                interpreter.display(),
                crate::TORCH_VERSION,
            ),
        }
    }
}

impl std::error::Error for Error {}
