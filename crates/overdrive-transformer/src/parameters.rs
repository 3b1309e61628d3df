use std::collections::HashMap;

use overdrive_nn::{AdapterHost, Embedding, Linear, LinearWeight};
use overdrive_quantization::QuantizedWeight;
use overdrive_sys::cuda::on_device;
use overdrive_sys::engine;
use tch::{Device, Kind, Tensor};

use crate::moe::is_correction;
use crate::{Error, Init, Result};

/// A parameter of a configuration.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ParameterSpec {
    /// The name in a Hugging Face checkpoint.
    pub name: String,
    /// The shape in a Hugging Face checkpoint.
    pub shape: Vec<i64>,
    /// The initial value, as in transformers.
    pub init: Init,
    /// The role in the model.
    pub role: ParameterRole,
}

/// The role of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ParameterRole {
    /// A table of token embeddings `(V, C)`.
    Embedding,
    /// The weight `(O, I)` of a linear layer.
    Linear,
    /// The weight `(I, O)` of a linear layer: GPT-2's `Conv1D`.
    Conv1d,
    /// The weight `(V, C)` of an untied head.
    Head,
    /// The weight `(E, I)` of the router of a mixture of experts, or `(1, I)` of the gate of its shared expert. It is
    /// never quantized here, but read if a file holds it quantized.
    Router,
    /// The weight `(H · (D + D_v), R)` that expands the latent vectors of multi-head latent attention to keys and
    /// values. It multiplies queries as well, transposed, so it is never quantized here, but read if a file holds it
    /// quantized.
    Expansion,
    /// The table of the inputs that layers get beside the residual stream (Gemma 3n and 4). It is never quantized here,
    /// but stays quantized if a file holds it so.
    LayerInputs,
    /// A norm, a bias, a table of positions.
    Other,
}

/// Returns the parameters. A shallow clone is the same tensor: its storage, gradient and flags are shared.
pub(crate) fn handles(parameters: &[(String, Tensor)]) -> Vec<(String, Tensor)> {
    let share = |(name, tensor): &(String, Tensor)| (name.clone(), tensor.shallow_clone());
    parameters.iter().map(share).collect()
}

/// Returns `true` for a tensor that training never changes: a buffer in transformers, such as the corrections of a
/// router (DeepSeek-V3) or the factor of a layer (Gemma 4).
fn is_buffer(name: &str) -> bool {
    is_correction(name) || name.ends_with(".layer_scalar")
}

/// Makes each parameter require a gradient, or not. Buffers never do.
pub(crate) fn set_requires_grad(
    parameters: &[(String, Tensor)],
    requires_grad: bool,
) -> Result<()> {
    for (_, tensor) in parameters.iter().filter(|(name, _)| !is_buffer(name)) {
        // The flag belongs to the tensor that all shallow clones share.
        let _same = tensor.f_set_requires_grad(requires_grad)?;
    }
    Ok(())
}

/// Switches the training mode of every linear layer, and so of its adapters, on or off.
pub(crate) fn set_training_of_layers(model: &mut dyn AdapterHost, training: bool) -> Result<()> {
    Ok(model.visit_linears(&mut |_, linear| {
        linear.set_training(training);
        Ok(())
    })?)
}

impl ParameterSpec {
    pub(crate) fn new(name: String, shape: &[i64], init: Init, role: ParameterRole) -> Self {
        ParameterSpec {
            name,
            shape: shape.to_vec(),
            init,
            role,
        }
    }

    /// Returns the name of the module that it belongs to.
    pub(crate) fn module(&self) -> &str {
        self.name
            .rsplit_once('.')
            .map_or(&*self.name, |(module, _)| module)
    }

    pub(crate) fn is_bias(&self) -> bool {
        self.name.ends_with(".bias")
    }

    /// Returns the number of elements.
    pub fn numel(&self) -> i64 {
        self.shape.iter().product()
    }
}

/// Allocates the parameters `specs` in the dtypes `kinds`, uninitialized. Those of a group, if they are of one
/// dtype, are slices of one tensor, so that a joint matmul reads them without a copy.
pub(crate) fn allocate(
    specs: Vec<ParameterSpec>,
    kinds: &[Kind],
    device: Device,
    groups: &[Vec<String>],
) -> Result<Vec<(String, Tensor)>> {
    let indices: HashMap<&str, usize> = specs
        .iter()
        .enumerate()
        .map(|(index, spec)| (spec.name.as_str(), index))
        .collect();
    let mut tensors: Vec<Option<Tensor>> = specs.iter().map(|_| None).collect();
    let empty = |shape: &[i64], kind| {
        on_device(
            device,
            Tensor::f_empty(shape, (kind, device)).map_err(Error::from),
        )
    };
    // Without this autograd would track the slices as views, and refuse in-place updates of them.
    let _no_grad = engine::GradMode::new(false);
    for group in groups {
        let members: Vec<usize> = group
            .iter()
            .filter_map(|name| indices.get(name.as_str()).copied())
            .collect();
        let Some(&first) = members.first() else {
            continue;
        };
        // One tensor has one dtype: parameters of several lie apart, and a joint matmul copies them.
        if members.iter().any(|&member| kinds[member] != kinds[first]) {
            continue;
        }
        let mut shape = specs[first].shape.clone();
        shape[0] = members.iter().map(|&member| specs[member].shape[0]).sum();
        let joint = empty(&shape, kinds[first])?;
        let mut start = 0;
        for member in members {
            let rows = specs[member].shape[0];
            tensors[member] = Some(joint.f_narrow(0, start, rows)?);
            start += rows;
        }
    }
    specs
        .into_iter()
        .zip(tensors)
        .zip(kinds)
        .map(|((spec, tensor), kind)| {
            let tensor = match tensor {
                Some(slice) => slice,
                None => empty(&spec.shape, *kind)?,
            };
            Ok((spec.name, tensor))
        })
        .collect()
}

/// The tensors that a model is made of.
#[derive(Debug, Default)]
pub(crate) struct ModelTensors {
    /// The dense parameters, in the order of the configuration.
    pub(crate) parameters: Vec<(String, Tensor)>,
    /// The quantized weights by the names of their layers, without `.weight`.
    pub(crate) quantized: HashMap<String, QuantizedWeight>,
}

/// The parameters by name, from which modules take theirs.
#[derive(Debug)]
pub(crate) struct ParameterMap {
    dense: HashMap<String, Tensor>,
    quantized: HashMap<String, QuantizedWeight>,
    kind: Kind,
}

impl ParameterMap {
    pub(crate) fn new(parts: ModelTensors) -> Self {
        // A quantized embedding has no dtype of its own and takes that of the first dense parameter.
        let kind = parts.parameters.first().map(|(_, tensor)| tensor.kind());
        ParameterMap {
            dense: parts.parameters.into_iter().collect(),
            quantized: parts.quantized,
            kind: kind.unwrap_or(Kind::Float),
        }
    }

    /// Takes the layer of `{name}.weight (out, in)`, and of `{name}.bias` if `bias`.
    pub(crate) fn take_linear(&mut self, name: &str, bias: bool) -> Result<Linear> {
        self.take_layer(name, bias, false)
    }

    /// Takes the layer of `{name}.weight (in, out)` and `{name}.bias`, if it has one.
    pub(crate) fn take_conv1d(&mut self, name: &str, bias: bool) -> Result<Linear> {
        self.take_layer(name, bias, true)
    }

    fn take_layer(&mut self, name: &str, bias: bool, transposed: bool) -> Result<Linear> {
        let weight = match self.take_quantized(name) {
            Some(weight) => LinearWeight::Quantized(weight),
            None => LinearWeight::Dense {
                weight: self.take(&format!("{name}.weight"))?,
                transposed,
            },
        };
        let bias = bias.then(|| self.take(&format!("{name}.bias")));
        Ok(Linear::new(weight, bias.transpose()?)?.with_name(name))
    }

    /// Takes the embedding of `{name}.weight`. Vectors of a quantized table have the dtype of the other
    /// parameters.
    pub(crate) fn take_embedding(&mut self, name: &str) -> Result<Embedding> {
        match self.take_quantized(name) {
            Some(table) => Ok(Embedding::quantized(table, self.kind)?),
            None => Ok(Embedding::dense(self.take(&format!("{name}.weight"))?)?),
        }
    }

    /// Takes the weight of the layer `name` if it is quantized.
    pub(crate) fn take_quantized(&mut self, name: &str) -> Option<QuantizedWeight> {
        self.quantized.remove(name)
    }

    pub(crate) fn take(&mut self, name: &str) -> Result<Tensor> {
        // The list of parameters and the modules are both derived from one configuration; a test
        // builds each architecture, so this is an error of this crate and not of its user.
        self.dense.remove(name).ok_or_else(|| {
            let what = format!("the architecture's parameter list lacks `{name}`");
            overdrive_core::Error::internal(what).into()
        })
    }
}
