//! Errors of compiled packages.

use std::path::PathBuf;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An input has another shape, dtype or device than the model was compiled for, or a file could not be read.
    #[error(transparent)]
    Common(#[from] overdrive_core::Error),
    /// The file is not a package, or is damaged. None of its code was loaded.
    #[error("{} is not an intact package: {problem}; copy it again, or compile it again with compile_package.py", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The damage.
        problem: String,
    },
    /// The package has no model of this name.
    #[error("{} has no model {requested:?}; it has {}", path.display(), models.join(", "))]
    NoSuchModel {
        /// The package.
        path: PathBuf,
        /// The requested name, or a note that none was given.
        requested: String,
        /// The names of its models.
        models: Vec<String>,
    },
    /// The package was compiled for another version of libtorch than this program runs on.
    #[error("{}: model {model:?} was compiled for libtorch {compiled_for}, but this program runs libtorch {running}; compiled code runs only on its own version: compile the package again with torch=={running}", path.display())]
    VersionMismatch {
        /// The package.
        path: PathBuf,
        /// The model.
        model: String,
        /// The version that it was compiled for.
        compiled_for: String,
        /// The version of this program.
        running: String,
    },
    /// The package does not record the version of libtorch that it was compiled for.
    #[error("{}: model {model:?} does not record the libtorch version that it was compiled for ({known}), and may crash on another one; compile the package with compile_package.py, which records it, or set LoadOptions::allow_unknown_version if you know that it is {running}, the version of this program", path.display())]
    UnknownVersion {
        /// The package.
        path: PathBuf,
        /// The model.
        model: String,
        /// The metadata that it has.
        known: String,
        /// The version of this program.
        running: String,
    },
    /// The package was compiled for another device, system or processor.
    #[error("{}: model {model:?} was compiled for {compiled_for}, and this is {running}; compile the package again on a machine like this one", path.display())]
    MachineMismatch {
        /// The package.
        path: PathBuf,
        /// The model.
        model: String,
        /// The device, system or processor that it was compiled for.
        compiled_for: String,
        /// The device, system or processor of this program.
        running: String,
    },
    /// The metadata that compile_package.py writes cannot be parsed.
    #[error("{}: invalid metadata of model {model:?}: {problem}", path.display())]
    InvalidManifest {
        /// The package.
        path: PathBuf,
        /// The model.
        model: String,
        /// The error of the parser.
        problem: String,
    },
    /// The number of inputs differs from the model's.
    #[error("{given} inputs were given; the model takes {expected} ({names})")]
    InputCount {
        /// The number of inputs that it takes.
        expected: usize,
        /// Their names.
        names: String,
        /// The number of inputs that were given.
        given: usize,
    },
    /// An input has a name that the model does not have, has been given twice, or is missing.
    #[error("{problem}; the inputs are {names}")]
    InputName {
        /// The problem.
        problem: String,
        /// The names of the inputs.
        names: String,
    },
    /// The model writes to an input that is not contiguous.
    #[error(
        "input `{name}` has shape {shape:?} and strides {strides:?}; it must be contiguous, since the model writes to it"
    )]
    NotContiguous {
        /// The name of the input.
        name: String,
        /// Its strides.
        strides: Vec<i64>,
        /// Its shape.
        shape: Vec<i64>,
    },
    /// Tensors do not fit the constants that they would replace. Nothing was replaced.
    #[error("nothing was replaced: {}", problems.join("; "))]
    InvalidConstants {
        /// The problem of each constant.
        problems: Vec<String>,
    },
    /// The package has no models that decode over a static cache.
    #[error(
        "the package cannot decode: {problem}; compile it with `compile_package.py --models prefill,decode`"
    )]
    NotADecoder {
        /// The problem.
        problem: String,
    },
    /// An error of the shim or of libtorch.
    #[error(transparent)]
    Sys(#[from] overdrive_sys::Error),
    /// An error of tch.
    #[error(transparent)]
    Tch(#[from] tch::TchError),
    /// An error of the cache.
    #[error(transparent)]
    Cache(#[from] overdrive_kv_cache::Error),
    /// An error of a file of weights.
    #[error(transparent)]
    Weights(#[from] overdrive_safetensors::Error),
}

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;
