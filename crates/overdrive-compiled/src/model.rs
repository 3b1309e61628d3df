//! A compiled model that runs.

use std::path::Path;

use overdrive_sys::compiled::{Package, PackageOptions};
use tch::{Device, Tensor};

use crate::gate::Gate;
use crate::{Error, ModelInfo, PackageInfo, Result, TensorSpec, host, tree_spec};

/// How a [`CompiledModel`] is loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadOptions {
    /// Which model of the package; default `None`: the only one.
    pub model: Option<String>,
    /// How many threads may run it at a time; others wait. The weights are held once. Default 1.
    pub runners: usize,
    /// Leaves out the locks of the compiled code, for work inside a [`CudaGraph`](crate::CudaGraph); one
    /// thread runs at a time then. Default false.
    pub single_threaded: bool,
    /// Which CUDA device, for a package compiled for CUDA; default `None`: the current one.
    pub device_index: Option<usize>,
    /// Loads a package that does not say for which libtorch it was made, as those that were not made by
    /// compile_package.py do not. Run on another version it may crash the process. Default false.
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
    /// The model `name`, else the defaults.
    #[must_use]
    pub fn for_model(name: &str) -> Self {
        LoadOptions {
            model: Some(name.to_owned()),
            ..LoadOptions::default()
        }
    }
}

/// A model that `torch.export` and AOTInductor compiled ahead of time: no Python and no compiler at run
/// time, the same libtorch.
///
/// It is [`Sync`]: threads share one and run it at the same time, as many as there are
/// [runners](LoadOptions::runners). Each run uses libtorch's threads besides.
#[derive(Debug)]
pub struct CompiledModel {
    pub(crate) package: Package,
    pub(crate) info: ModelInfo,
    gate: Gate,
    inputs: Vec<String>,
    outputs: Vec<String>,
}

impl CompiledModel {
    /// Loads a model of a package, after it was found whole ([`PackageInfo::read`]) and made for this
    /// libtorch, device and processor.
    ///
    /// libtorch unpacks its library, weights and all, into a folder of `/tmp`, until the model is
    /// dropped. A package is native code: load none that you would not run as a program.
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::NoSuchModel`], [`Error::OtherVersion`], [`Error::UnknownVersion`],
    /// [`Error::OtherMachine`] before anything is loaded; then libtorch's own.
    pub fn load(path: impl AsRef<Path>, options: &LoadOptions) -> Result<CompiledModel> {
        let path = path.as_ref();
        let package = PackageInfo::read(path)?;
        let info = package.model(options.model.as_deref())?.clone();
        host::check(path, &info, options.allow_unknown_version)?;
        // libtorch 2.11 takes every entry whose path *begins* with the name: of `model` and `model2` it
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
                    problem: format!("model {:?} says not how it is called", info.name),
                };
                let inputs = tree_spec::argument_names(&inputs).ok_or_else(unreadable)?;
                let outputs = tree_spec::result_names(&outputs).ok_or_else(unreadable)?;
                (inputs, outputs)
            }
        };
        Ok(CompiledModel {
            package,
            gate: Gate::new(options.runners),
            info,
            inputs,
            outputs,
        })
    }

    /// What the package says of it.
    #[must_use]
    pub fn info(&self) -> &ModelInfo {
        &self.info
    }

    /// The names of the inputs, in order. Those of a package that compile_package.py did not make come
    /// from its call spec: keywords, or the numbers of positional arguments.
    #[must_use]
    pub fn input_names(&self) -> &[String] {
        &self.inputs
    }

    /// The names of the outputs, in order.
    #[must_use]
    pub fn output_names(&self) -> &[String] {
        &self.outputs
    }

    /// Kinds and sizes of the inputs; `None` for a package that compile_package.py did not make.
    #[must_use]
    pub fn inputs(&self) -> Option<&[TensorSpec]> {
        Some(&self.info.manifest.as_ref()?.inputs)
    }

    /// Kinds and sizes of the outputs; `None` for a package that compile_package.py did not make.
    #[must_use]
    pub fn outputs(&self) -> Option<&[TensorSpec]> {
        Some(&self.info.manifest.as_ref()?.outputs)
    }

    /// Runs the model on inputs in its order. No gradients are recorded.
    ///
    /// Inputs are held against the [kinds and sizes](CompiledModel::inputs) that the code was compiled
    /// for; of a package that does not say, the compiled code itself looks at them, unless
    /// `AOTI_RUNTIME_CHECK_INPUTS=0` is in the environment. An input that is not contiguous is copied;
    /// one that the model writes to must be.
    ///
    /// # Errors
    /// [`Error::InputCount`], [`Error::BadInput`] before anything runs; else libtorch's own.
    pub fn run(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        if inputs.len() != self.inputs.len() {
            return Err(Error::InputCount {
                expected: self.inputs.len(),
                names: self.inputs.join(", "),
                got: inputs.len(),
            });
        }
        self.check_devices(inputs)?;
        if let Some(specs) = self.inputs() {
            let mut sizes = Vec::new();
            for (spec, tensor) in specs.iter().zip(inputs) {
                spec.check(tensor, &mut sizes)?;
                if spec.mutated && !tensor.is_contiguous() {
                    return Err(Error::BadInput {
                        name: spec.name.clone(),
                        expected: "a contiguous tensor, since the model writes to it".to_owned(),
                        got: format!("strides {:?} of shape {:?}", tensor.stride(), tensor.size()),
                    });
                }
            }
        }
        let contiguous: Vec<Tensor> = inputs
            .iter()
            .map(|tensor| tensor.f_contiguous())
            .collect::<std::result::Result<_, _>>()?;
        let handles: Vec<&Tensor> = contiguous.iter().collect();
        let _inside = self.gate.enter();
        Ok(self.package.run(&handles)?)
    }

    /// Runs the model on inputs by name, in any order; the outputs with their names.
    ///
    /// # Errors
    /// [`Error::InputName`] for a name that is not there, twice there or missing; else as
    /// [`run`](CompiledModel::run).
    pub fn run_named(&self, inputs: &[(&str, &Tensor)]) -> Result<Vec<(String, Tensor)>> {
        let wrong = |problem: String| Error::InputName {
            problem,
            names: self.inputs.join(", "),
        };
        let mut ordered: Vec<Option<&Tensor>> = vec![None; self.inputs.len()];
        for (name, tensor) in inputs {
            let place = self.inputs.iter().position(|known| known == name);
            let place = place.ok_or_else(|| wrong(format!("there is no input {name:?}")))?;
            if ordered[place].replace(tensor).is_some() {
                return Err(wrong(format!("input {name:?} was given twice")));
            }
        }
        let ordered: Vec<&Tensor> = ordered
            .into_iter()
            .zip(&self.inputs)
            .map(|(tensor, name)| tensor.ok_or_else(|| wrong(format!("input {name:?} is missing"))))
            .collect::<Result<_>>()?;
        let outputs = self.run(&ordered)?;
        let names = (0..outputs.len()).map(|place| match self.outputs.get(place) {
            Some(name) => name.clone(),
            None => place.to_string(),
        });
        Ok(names.zip(outputs).collect())
    }

    fn check_devices(&self, inputs: &[&Tensor]) -> Result<()> {
        let on = self.info.device();
        for (tensor, name) in inputs.iter().zip(&self.inputs) {
            let fits = match tensor.device() {
                Device::Cpu => on == "cpu",
                Device::Cuda(_) => on == "cuda",
                Device::Mps => on == "mps",
                Device::Vulkan => false,
            };
            if !fits {
                return Err(Error::BadInput {
                    name: name.clone(),
                    expected: format!("a tensor on {on}, for which the model was compiled"),
                    got: format!("one on {:?}", tensor.device()),
                });
            }
        }
        Ok(())
    }
}
