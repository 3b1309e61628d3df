//! The errors of the search for libtorch.

use std::fmt;
use std::path::PathBuf;

use crate::Release;

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
    /// Overdrive does not work with this version of libtorch.
    UnknownRelease {
        /// The source of the path, for example `LIBTORCH`.
        source: String,
        /// The folder of its libraries.
        lib_dir: PathBuf,
        /// Its version.
        version: String,
    },
    /// `LIBTORCH_CXX11_ABI` is 0, but no supported libtorch is compiled with the old ABI of C++'s standard library.
    OldAbi,
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
                     folder of a libtorch (the one that holds lib/ and include/), or set \
                     LIBTORCH_USE_PYTORCH=1 if Python has PyTorch. The version of tch in Cargo.lock \
                     determines the version: {}.",
                    Release::in_words(),
                )
            }
            Error::OldAbi => f.write_str(
                "LIBTORCH_CXX11_ABI is 0, but libtorch has only the new ABI since 2.7; unset the variable",
            ),
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
            Error::UnknownRelease {
                source,
                lib_dir,
                version,
            } => write!(
                f,
                "{source} names libtorch {version} in {}, but Overdrive works with {}. Set LIBTORCH to one of \
                 these, or unset it and run `cargo xtask setup`; `cargo update -p tch --precise VERSION` \
                 chooses its tch. LIBTORCH_BYPASS_VERSION_CHECK=1 builds with any version.",
                lib_dir.display(),
                Release::in_words(),
            ),
            Error::Python {
                interpreter,
                reason,
            } => write!(
                f,
                "LIBTORCH_USE_PYTORCH is set, but {} did not return the folder of its PyTorch: {reason}. \
                 Activate the environment that has PyTorch, or unset LIBTORCH_USE_PYTORCH.",
                interpreter.display(),
            ),
        }
    }
}

impl std::error::Error for Error {}
