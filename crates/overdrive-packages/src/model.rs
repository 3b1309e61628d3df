//! A compiled model.

use std::path::Path;

use overdrive_core::Error as CommonError;
use overdrive_sys::compiled::{Package, PackageOptions};
use tch::{Device, Tensor};

use crate::semaphore::Semaphore;
use crate::{Error, ModelInfo, PackageInfo, Result, TensorSpec, compatibility, tree_spec};

/// Options of [`CompiledModel::load`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadOptions {
    /// The name of the model in the package. Default `None`: the only one.
    pub model: Option<String>,
    /// The number of threads that may run the model at a time; further threads wait. They share the weights. Default 1.
    pub runners: usize,
    /// If `true`, the compiled code takes no locks, so that a CUDA graph can capture it, and only one thread runs it at
    /// a time. Default `false`.
    pub single_threaded: bool,
    /// The index of the CUDA device, for a package compiled for CUDA. Default `None`: the current one.
    pub device_index: Option<usize>,
    /// If `true`, packages load that do not record the libtorch version that they were compiled for; only
    /// compile_package.py records it. On another version they may crash the process. Default `false`.
    pub allow_unknown_version: bool,
}

impl Default for LoadOptions {
    fn default() -> Self {
        LoadOptions {
            model: None,
            runners: 1,
            single_threaded: false,
            device_index: None,
            allow_unknown_version: false,
        }
    }
}

impl LoadOptions {
    /// Returns the default options for the model `name`.
    #[must_use]
    pub fn for_model(name: &str) -> Self {
        LoadOptions {
            model: Some(name.to_owned()),
            ..LoadOptions::default()
        }
    }
}

/// A model that `torch.export` and AOTInductor compiled ahead of time. It runs on the libtorch that it was compiled
/// for, without Python and without a compiler.
///
/// It is [`Sync`]: up to [`runners`](LoadOptions::runners) threads can run it at the same time. Each run also uses
/// libtorch's own threads.
#[derive(Debug)]
pub struct CompiledModel {
    pub(crate) package: Package,
    pub(crate) info: ModelInfo,
    semaphore: Semaphore,
    inputs: Vec<String>,
    outputs: Vec<String>,
}

impl CompiledModel {
    /// Loads a model from a package, after checking that the file is intact ([`PackageInfo::read`]) and was compiled
    /// for this libtorch, device and processor.
    ///
    /// libtorch unpacks the library, with its weights, into a folder in `/tmp`, and deletes it when the model is
    /// dropped. A package is native code: only load packages that you would run as a program.
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::NoSuchModel`], [`Error::VersionMismatch`],
    /// [`Error::UnknownVersion`], [`Error::MachineMismatch`] before anything is loaded; then errors of libtorch.
    pub fn load(path: impl AsRef<Path>, options: &LoadOptions) -> Result<CompiledModel> {
        let path = path.as_ref();
        let package = PackageInfo::read(path)?;
        let info = package.model(options.model.as_deref())?.clone();
        compatibility::check(path, &info, options.allow_unknown_version)?;
        // libtorch takes every entry whose path *begins* with the name: of `model` and `model2` it
        // would run one for the other. The slash ends the name.
        let package = Package::open(
            path,
            &format!("{}/", info.name),
            PackageOptions {
                runners: options.runners,
                single_threaded: options.single_threaded,
                device_index: options.device_index,
            },
        )?;
        let (inputs, outputs) = match &info.manifest {
            Some(manifest) => {
                let names = |specs: &[TensorSpec]| specs.iter().map(|s| s.name.clone()).collect();
                (names(&manifest.inputs), names(&manifest.outputs))
            }
            None => {
                let (inputs, outputs) = package.call_spec()?;
                let unreadable = || Error::Damaged {
                    path: path.to_owned(),
                    problem: format!("model {:?} has no call spec", info.name),
                };
                let inputs = tree_spec::argument_names(&inputs).ok_or_else(unreadable)?;
                let outputs = tree_spec::result_names(&outputs).ok_or_else(unreadable)?;
                (inputs, outputs)
            }
        };
        Ok(CompiledModel {
            package,
            semaphore: Semaphore::new(options.runners),
            info,
            inputs,
            outputs,
        })
    }

    /// Returns the metadata of the model.
    #[must_use]
    pub fn info(&self) -> &ModelInfo {
        &self.info
    }

    /// Returns the names of the inputs, in order. For a package that compile_package.py did not make, they come
    /// from its call spec: keywords, or the indices of positional arguments.
    #[must_use]
    pub fn input_names(&self) -> &[String] {
        &self.inputs
    }

    /// Returns the names of the outputs, in order.
    #[must_use]
    pub fn output_names(&self) -> &[String] {
        &self.outputs
    }

    /// Returns the dtypes and shapes of the inputs; `None` for a package that compile_package.py did not make.
    #[must_use]
    pub fn inputs(&self) -> Option<&[TensorSpec]> {
        Some(&self.info.manifest.as_ref()?.inputs)
    }

    /// Returns the dtypes and shapes of the outputs; `None` for a package that compile_package.py did not make.
    #[must_use]
    pub fn outputs(&self) -> Option<&[TensorSpec]> {
        Some(&self.info.manifest.as_ref()?.outputs)
    }

    /// Runs the model on inputs in the order of [`input_names`](CompiledModel::input_names). No gradients are
    /// recorded.
    ///
    /// Inputs are checked against the [dtypes and shapes](CompiledModel::inputs) that the code was compiled
    /// for. If the package does not record them, the compiled code checks its inputs, unless
    /// `AOTI_RUNTIME_CHECK_INPUTS=0` is set in the environment. An input that is not contiguous is copied;
    /// an input that the model writes to must be contiguous.
    ///
    /// # Errors
    /// [`Error::InputCount`], [`Error::NotContiguous`], and [`Error::Common`] for a wrong shape, dtype or device,
    /// before anything runs; else errors of libtorch.
    pub fn run(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        if inputs.len() != self.inputs.len() {
            return Err(Error::InputCount {
                expected: self.inputs.len(),
                names: self.inputs.join(", "),
                given: inputs.len(),
            });
        }
        self.check_devices(inputs)?;
        if let Some(specs) = self.inputs() {
            // A dynamic size has one value in all inputs of a run.
            let mut sizes = Vec::new();
            for (spec, tensor) in specs.iter().zip(inputs) {
                spec.check(tensor, &mut sizes)?;
                // The model would write to the copy, and the caller would never see it.
                if spec.mutated && !tensor.is_contiguous() {
                    return Err(Error::NotContiguous {
                        name: spec.name.clone(),
                        strides: tensor.stride(),
                        shape: tensor.size(),
                    });
                }
            }
        }
        // Compiled code computes addresses from the strides of its example, which were contiguous.
        let contiguous: Vec<Tensor> = inputs
            .iter()
            .map(|tensor| tensor.f_contiguous())
            .collect::<std::result::Result<_, _>>()?;
        let handles: Vec<&Tensor> = contiguous.iter().collect();
        let _permit = self.semaphore.acquire();
        Ok(self.package.run(&handles)?)
    }

    /// Runs the model on named inputs, in any order. Returns the outputs with their names.
    ///
    /// # Errors
    /// [`Error::InputName`] for a name that is unknown, given twice or missing; else as for
    /// [`run`](CompiledModel::run).
    pub fn run_named(&self, inputs: &[(&str, &Tensor)]) -> Result<Vec<(String, Tensor)>> {
        let wrong = |problem: String| Error::InputName {
            problem,
            names: self.inputs.join(", "),
        };
        let mut ordered: Vec<Option<&Tensor>> = vec![None; self.inputs.len()];
        for (name, tensor) in inputs {
            let index = self.inputs.iter().position(|known| known == name);
            let index = index.ok_or_else(|| wrong(format!("there is no input {name:?}")))?;
            if ordered[index].replace(tensor).is_some() {
                return Err(wrong(format!("input {name:?} was given twice")));
            }
        }
        let ordered: Vec<&Tensor> = ordered
            .into_iter()
            .zip(&self.inputs)
            .map(|(tensor, name)| tensor.ok_or_else(|| wrong(format!("input {name:?} is missing"))))
            .collect::<Result<_>>()?;
        let outputs = self.run(&ordered)?;
        let names = (0..outputs.len()).map(|index| match self.outputs.get(index) {
            Some(name) => name.clone(),
            None => index.to_string(),
        });
        Ok(names.zip(outputs).collect())
    }

    fn check_devices(&self, inputs: &[&Tensor]) -> Result<()> {
        let device = self.info.device();
        for (tensor, name) in inputs.iter().zip(&self.inputs) {
            let fits = match tensor.device() {
                Device::Cpu => device == "cpu",
                Device::Cuda(_) => device == "cuda",
                Device::Mps => device == "mps",
                Device::Vulkan => false,
            };
            if !fits {
                let expected = format!("on {device}, for which the model was compiled");
                return Err(CommonError::device(name.clone(), tensor.device(), expected).into());
            }
        }
        Ok(())
    }
}
