//! What can go wrong with compiled work.

use std::path::PathBuf;

use tch::Device;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is no package, or a damaged one. No code of it was loaded.
    #[error("{} is no whole package: {problem}; copy it again, or make it again with compile_package.py", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The package has no such model.
    #[error("{} has no model {asked:?}; it has {}", path.display(), models.join(", "))]
    NoSuchModel {
        /// The package.
        path: PathBuf,
        /// The model that was asked for, or what stands for none.
        asked: String,
        /// Its models.
        models: Vec<String>,
    },
    /// The package was made for another libtorch than the one that this program runs on.
    #[error("{}: model {model:?} was compiled for libtorch {package}, and this is libtorch {here}: compiled code runs on the version it was made for; make the package again with torch=={here}", path.display())]
    OtherVersion {
        /// The package.
        path: PathBuf,
        /// The model.
        model: String,
        /// The version it was made for.
        package: String,
        /// The version here.
        here: String,
    },
    /// The package does not say for which libtorch it was made.
    #[error("{}: model {model:?} does not say for which libtorch it was compiled, as PyTorch's own packages do not ({known}); run on another version it may crash. This is libtorch {here}: make the package with compile_package.py, which writes it down, or set LoadOptions::allow_unknown_version if you know that they agree", path.display())]
    UnknownVersion {
        /// The package.
        path: PathBuf,
        /// The model.
        model: String,
        /// What it says of itself.
        known: String,
        /// The version here.
        here: String,
    },
    /// The package was made for another device or processor than there is here.
    #[error("{}: model {model:?} was compiled for {package}, and this is {here}; make the package again on such a machine", path.display())]
    OtherMachine {
        /// The package.
        path: PathBuf,
        /// The model.
        model: String,
        /// What it was made for.
        package: String,
        /// What there is.
        here: String,
    },
    /// The metadata that compile_package.py writes cannot be understood.
    #[error("{}: the metadata of model {model:?}: {problem}", path.display())]
    BadManifest {
        /// The package.
        path: PathBuf,
        /// The model.
        model: String,
        /// What is wrong.
        problem: String,
    },
    /// The model takes another number of inputs.
    #[error("the model takes {expected} inputs ({names}), and {got} were given")]
    InputCount {
        /// How many it takes.
        expected: usize,
        /// Their names.
        names: String,
        /// How many were given.
        got: usize,
    },
    /// An input by a name that the model does not have, or one that is missing.
    #[error("{problem}; the inputs are {names}")]
    InputName {
        /// What is wrong.
        problem: String,
        /// The names there are.
        names: String,
    },
    /// An input does not fit.
    #[error("input {name}: expected {expected}, got {got}")]
    BadInput {
        /// Its name.
        name: String,
        /// What the model was compiled for.
        expected: String,
        /// What was given.
        got: String,
    },
    /// Constants that cannot be replaced by what was given. Nothing was changed.
    #[error("nothing was replaced: {}", problems.join("; "))]
    BadConstants {
        /// What is wrong with each.
        problems: Vec<String>,
    },
    /// CUDA graphs on something that is not a CUDA device.
    #[error("CUDA graphs need a CUDA device: {reason}")]
    NeedsCuda {
        /// What there is instead.
        reason: String,
    },
    /// The work failed before anything was captured, when it ran for real.
    #[error("the work failed before it was captured: {source}")]
    Work {
        /// What it returned.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The work runs, but cannot be captured.
    #[error(
        "the work cannot be captured in a CUDA graph: {source}. Captured work reads nothing back to the host (no item, no printing, no choice by a value), makes no tensor from host memory, keeps its shapes, and stays on one device and stream"
    )]
    CannotCapture {
        /// The words of the operation that failed.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Sizes or options that do not go together.
    #[error("{what}: expected {expected}, got {got}")]
    BadArgument {
        /// What they are of.
        what: String,
        /// What fits.
        expected: String,
        /// What was given.
        got: String,
    },
    /// libtorch refused.
    #[error(transparent)]
    Sys(#[from] overdrive_sys::Error),
    /// An error of tch.
    #[error(transparent)]
    Tch(#[from] tch::TchError),
    /// An error of the model.
    #[error(transparent)]
    Model(#[from] overdrive_transformer::Error),
    /// An error of the cache.
    #[error(transparent)]
    Cache(#[from] overdrive_kv_cache::Error),
    /// An option of the optimizer.
    #[error(transparent)]
    Optimizer(#[from] overdrive_optim::Error),
    /// A file of weights.
    #[error(transparent)]
    Weights(#[from] overdrive_safetensors::Error),
}

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// The CUDA index of a device.
pub(crate) fn cuda_index(device: Device) -> Result<usize> {
    match device {
        Device::Cuda(index) if tch::Cuda::is_available() => Ok(index),
        Device::Cuda(index) => Err(Error::NeedsCuda {
            reason: format!("cuda:{index} was named, and libtorch finds no GPU"),
        }),
        other => Err(Error::NeedsCuda {
            reason: format!("the work is on {other:?}"),
        }),
    }
}
