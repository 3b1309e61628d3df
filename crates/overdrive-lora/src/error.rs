use std::path::PathBuf;

/// What can go wrong with adapters.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The layers are part of a graph that has not been differentiated yet.
    #[error(
        "the model's layers are still held by a checkpointed graph: call `backward` or drop the loss before changing them"
    )]
    InUse,
    /// A key of an adapter's configuration has a value that cannot be used.
    #[error("`{key}` is {found}: expected {expected}")]
    BadConfig {
        /// Which key.
        key: String,
        /// Its value.
        found: String,
        /// What fits.
        expected: String,
    },
    /// A key of an adapter's configuration asks for what is not computed here.
    #[error(
        "`{key}` is set to {value}, which is not supported here: unset it, or use the adapter with PEFT"
    )]
    UnsupportedKey {
        /// Which key.
        key: String,
        /// Its value.
        value: String,
    },
    /// A configuration means no map of the model.
    #[error(
        "no linear map fits {}; there are: {}",
        target_modules,
        available.join(", ")
    )]
    NoTarget {
        /// What was asked for.
        target_modules: String,
        /// The names of the maps, without their layers' numbers.
        available: Vec<String>,
    },
    /// A configuration names a module to train in full that the model does not offer.
    #[error(
        "no module to save fits `{name}`; there are: {}",
        if available.is_empty() { "none".to_owned() } else { available.join(", ") }
    )]
    NoModule {
        /// What was asked for.
        name: String,
        /// The modules there are.
        available: Vec<String>,
    },
    /// There is no adapter of this name.
    #[error(
        "there is no adapter `{name}`; there are: {}",
        if available.is_empty() { "none".to_owned() } else { available.join(", ") }
    )]
    UnknownAdapter {
        /// What was asked for.
        name: String,
        /// The adapters there are.
        available: Vec<String>,
    },
    /// An adapter of this name is there already, or the name cannot be one.
    #[error("`{name}` cannot be a new adapter's name: {reason}")]
    BadName {
        /// The name.
        name: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A tensor of an adapter has the wrong shape or kind, or options do not fit one another.
    #[error("{name} is {found}: expected {expected}")]
    BadInput {
        /// What.
        name: String,
        /// What it is.
        found: String,
        /// What fits.
        expected: String,
    },
    /// Adapters are merged into the weight.
    #[error(
        "{operation} while adapters are merged into the weights ({}): unmerge them first",
        merged.join(", ")
    )]
    Merged {
        /// What was tried.
        operation: &'static str,
        /// The adapters that are merged.
        merged: Vec<String>,
    },
    /// A merged weight would hold numbers that are not finite.
    #[error(
        "merging `{adapter}` into `{map}` gives numbers that are not finite: nothing was changed there"
    )]
    NotFinite {
        /// The adapter.
        adapter: String,
        /// The map.
        map: String,
    },
    /// An adapter's file does not fit the model and the configuration beside it.
    #[error("{} does not fit: {}", path.display(), problems.join("; "))]
    Checkpoint {
        /// The file.
        path: PathBuf,
        /// Every tensor that is missing, unexpected or misshapen.
        problems: Vec<String>,
    },
    /// A file could not be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// An error of a custom function.
    #[error(transparent)]
    Autograd(#[from] overdrive_autograd::Error),
    /// An error of an autocast region.
    #[error(transparent)]
    Precision(#[from] overdrive_precision::Error),
    /// An error of the shim.
    #[error(transparent)]
    Sys(#[from] overdrive_sys::Error),
    /// An error of a quantized base.
    #[error(transparent)]
    Quantization(#[from] overdrive_quantization::Error),
    /// An error of a fused kernel.
    #[error(transparent)]
    Fused(#[from] overdrive_fused::Error),
    /// An error of a weight file.
    #[error(transparent)]
    File(#[from] overdrive_safetensors::Error),
    /// An error of libtorch, with its message.
    #[error("libtorch: {0}")]
    Torch(#[from] tch::TchError),
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;
