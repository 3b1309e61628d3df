//! Errors of compiled packages.

use std::path::PathBuf;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An input has another shape, dtype or device than the model was compiled for, or a file could not be read.
    #[error(transparent)]
    Common(#[from] overdrive_core::Error),
    /// The file is not a package, or a damaged one. No code of it was loaded.
    #[error("{} is not an intact package: {problem}; copy it again, or make it again with compile_package.py", path.display())]
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
        /// The name that was requested, or a note that none was.
        requested: String,
        /// The names of its models.
        models: Vec<String>,
    },
    /// The package was compiled for another version of libtorch than this program runs on.
    #[error("{}: model {model:?} was compiled for libtorch {compiled_for}, and this is libtorch {running}; compiled code runs only on the version that it was made for: make the package again with torch=={running}", path.display())]
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
    /// The package does not say for which version of libtorch it was compiled.
    #[error("{}: model {model:?} does not say for which libtorch it was compiled, as PyTorch's own packages do not ({known}); run on another version it may crash. This is libtorch {running}: make the package with compile_package.py, which records the version, or set LoadOptions::allow_unknown_version if you know that they agree", path.display())]
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
    #[error("{}: model {model:?} was compiled for {compiled_for}, and this is {running}; make the package again on such a machine", path.display())]
    MachineMismatch {
        /// The package.
        path: PathBuf,
        /// The model.
        model: String,
        /// The device, system or processor that it was compiled for.
        compiled_for: String,
        /// That of this program.
        running: String,
    },
    /// The metadata that compile_package.py writes cannot be parsed.
    #[error("{}: the metadata of model {model:?}: {problem}", path.display())]
    InvalidManifest {
        /// The package.
        path: PathBuf,
        /// The model.
        model: String,
        /// The error of the parser.
        problem: String,
    },
    /// The model takes another number of inputs.
    #[error("the model takes {expected} inputs ({names}), and {given} were given")]
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
        "input `{name}` has strides {strides:?} for shape {shape:?}; it must be contiguous, since the model writes to it"
    )]
    NotContiguous {
        /// The name of the input.
        name: String,
        /// Its strides.
        strides: Vec<i64>,
        /// Its shape.
        shape: Vec<i64>,
    },
    /// Tensors do not fit the constants that they should replace. Nothing was replaced.
    #[error("nothing was replaced: {}", problems.join("; "))]
    InvalidConstants {
        /// The problem of each constant.
        problems: Vec<String>,
    },
    /// The package has no models that decode over a static cache.
    #[error(
        "the package cannot decode: {problem}; make it with compile_package.py --models prefill,decode"
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
