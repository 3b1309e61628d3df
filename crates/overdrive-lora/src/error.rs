use std::fmt;
use std::path::PathBuf;

use overdrive_core::units::first_few;

/// The errors of adapters.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A configuration key or an option is outside its range, a tensor has the wrong shape, dtype or device, or a
    /// file cannot be read or written.
    #[error(transparent)]
    Common(#[from] overdrive_core::Error),
    /// A key of an adapter's configuration requires a feature that this crate does not implement.
    #[error("`{key}` is {value}, which is not supported; unset it, or use the adapter with PEFT")]
    UnsupportedKey {
        /// The key.
        key: String,
        /// Its value.
        value: String,
    },
    /// A configuration matches no linear layer of the model.
    #[error(
        "no linear layer matches {target_modules}; the model has {}",
        available.join(", ")
    )]
    NoTarget {
        /// The rule that matched nothing.
        target_modules: String,
        /// The names of the linear layers, with `*` in place of numbers.
        available: Vec<String>,
    },
    /// `modules_to_save` names a module that the model does not have.
    #[error(
        "no module matches `{name}` of `modules_to_save`; the model has {}",
        list(available)
    )]
    NoModule {
        /// The name in the configuration.
        name: String,
        /// The modules of the model.
        available: Vec<String>,
    },
    /// There is no adapter of this name.
    #[error("there is no adapter `{name}`; the model has {}", list(available))]
    UnknownAdapter {
        /// The requested name.
        name: String,
        /// The adapters of the model.
        available: Vec<String>,
    },
    /// An adapter of this name exists already, or the name is not valid.
    #[error("`{name}` cannot be the name of a new adapter: {reason}")]
    BadName {
        /// The name.
        name: String,
        /// The reason.
        reason: &'static str,
    },
    /// Adapters cannot be combined.
    #[error("{adapters} cannot be combined: {reason}")]
    NotCombinable {
        /// The adapters.
        adapters: String,
        /// The reason, and the remedy where there is one.
        reason: String,
    },
    /// Adapters are merged into the weights.
    #[error(
        "{operation} is not possible while adapters are merged into the weights ({}); unmerge them first",
        merged.join(", ")
    )]
    Merged {
        /// The operation that failed.
        operation: &'static str,
        /// The adapters that are merged.
        merged: Vec<String>,
    },
    /// A merged weight would have elements that are not finite.
    #[error(
        "merging `{adapter}` into `{layer}` gives elements that are not finite; the layer is unchanged"
    )]
    NotFinite {
        /// The adapter.
        adapter: String,
        /// The linear layer.
        layer: String,
    },
    /// A full copy cannot be merged because its parameter is tied to another one.
    #[error(
        "the full copy of `{name}` cannot be merged because the parameter is tied to `{other}`; keep the adapter unmerged, or leave the module out of `modules_to_save`"
    )]
    TiedCopy {
        /// The parameter with a copy.
        name: String,
        /// The parameter that it is tied to.
        other: String,
    },
    /// An adapter cannot be merged because the weight of its layer is tied to another parameter.
    #[error(
        "the adapter of `{name}` cannot be merged because the parameter is tied to `{other}`; keep the adapter unmerged"
    )]
    TiedAdapter {
        /// The parameter with an adapter.
        name: String,
        /// The parameter that it is tied to.
        other: String,
    },
    /// A linear layer has an adapter from another crate.
    #[error(
        "a linear layer has an adapter that is not a LoRA adapter; remove it with `Linear::take_adapter` first"
    )]
    OtherAdapter,
    /// An adapter's file does not fit the model and the configuration beside it.
    #[error(
        "{} does not fit the model: {problems}{}",
        path.display(),
        trained_over(base.as_deref())
    )]
    Checkpoint {
        /// The file.
        path: PathBuf,
        /// The tensors that do not fit.
        problems: Box<AdapterProblems>,
        /// The model that the adapter was trained over, according to its configuration.
        base: Option<String>,
    },
    /// A folder holds no adapter.
    #[error("{} holds no adapter: {missing} is missing", folder.display())]
    NoAdapter {
        /// The folder.
        folder: PathBuf,
        /// The missing file.
        missing: &'static str,
    },
    /// The tensors of an adapter are a Python pickle.
    #[error(
        "{} is a Python pickle: save the adapter again with PEFT, which writes adapter_model.safetensors",
        path.display()
    )]
    Pickle {
        /// The file.
        path: PathBuf,
    },
    /// An error of a layer, or of the model that visits its layers.
    #[error(transparent)]
    Nn(overdrive_nn::Error),
    /// An error of a custom autograd function.
    #[error(transparent)]
    Autograd(#[from] overdrive_autograd::Error),
    /// An error of an autocast region.
    #[error(transparent)]
    Precision(#[from] overdrive_precision::Error),
    /// An error of the shim.
    #[error(transparent)]
    Sys(#[from] overdrive_sys::Error),
    /// An error of a quantized weight.
    #[error(transparent)]
    Quantization(#[from] overdrive_quantization::Error),
    /// An error of a safetensors file.
    #[error(transparent)]
    File(#[from] overdrive_safetensors::Error),
    /// An error of libtorch, with its message.
    #[error("libtorch: {0}")]
    Tch(#[from] tch::TchError),
}

/// The tensors of an adapter's file that do not fit the model. Printed, it names three of each kind.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct AdapterProblems {
    /// The tensors of the adapter that the file does not hold.
    pub missing: Vec<String>,
    /// The tensors of another shape, each with the shape in the file and that in the model.
    pub misshapen: Vec<String>,
    /// The tensors that do not belong to this model and adapter.
    pub unexpected: Vec<String>,
    /// Anything else, as sentences.
    pub others: Vec<String>,
}

impl AdapterProblems {
    pub(crate) fn is_empty(&self) -> bool {
        *self == AdapterProblems::default()
    }
}

impl fmt::Display for AdapterProblems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let groups = [
            (&self.missing, "missing"),
            (&self.misshapen, "of another shape"),
            (&self.unexpected, "not of this model and adapter"),
        ];
        let groups = groups.into_iter().filter(|(names, _)| !names.is_empty());
        let groups = groups.map(|(names, what)| {
            let (count, names) = (names.len(), first_few(names));
            let tensors = if count == 1 {
                "tensor is"
            } else {
                "tensors are"
            };
            format!("{count} {tensors} {what}: {names}")
        });
        let texts: Vec<String> = groups.chain(self.others.iter().cloned()).collect();
        f.write_str(&texts.join("; "))
    }
}

fn trained_over(base: Option<&str>) -> String {
    base.map_or(String::new(), |base| {
        format!("; the adapter was trained over {base}, so give that model")
    })
}

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

fn list(names: &[String]) -> String {
    if names.is_empty() {
        "none".to_owned()
    } else {
        names.join(", ")
    }
}

impl From<overdrive_nn::Error> for Error {
    /// Unwraps an error of this crate: a visitor's error passes through the model, which knows only
    /// overdrive-nn's errors.
    fn from(error: overdrive_nn::Error) -> Error {
        match error {
            overdrive_nn::Error::Common(error) => Error::Common(error),
            overdrive_nn::Error::Quantization(error) => Error::Quantization(error),
            overdrive_nn::Error::Tch(error) => Error::Tch(error),
            overdrive_nn::Error::Adapter(error) => match error.downcast::<Error>() {
                Ok(own) => *own,
                Err(other) => Error::Nn(overdrive_nn::Error::Adapter(other)),
            },
            other => Error::Nn(other),
        }
    }
}

impl From<Error> for overdrive_nn::Error {
    fn from(error: Error) -> overdrive_nn::Error {
        match error {
            Error::Common(error) => overdrive_nn::Error::Common(error),
            Error::Nn(error) => error,
            Error::Quantization(error) => overdrive_nn::Error::Quantization(error),
            Error::Tch(error) => overdrive_nn::Error::Tch(error),
            other => overdrive_nn::Error::Adapter(Box::new(other)),
        }
    }
}
