use std::collections::HashMap;

use overdrive_nn::{Embedding, Linear, LinearWeight};
use overdrive_quantization::QuantizedWeight;
use overdrive_sys::engine;
use tch::{Device, Kind, Tensor};

use crate::{Init, Result};

/// A parameter that a configuration calls for.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ParameterSpec {
    /// Its name in a Hugging Face checkpoint.
    pub name: String,
    /// Its shape there.
    pub shape: Vec<i64>,
    /// How transformers initialises it.
    pub init: Init,
    /// What it does.
    pub role: ParameterRole,
}

/// What a parameter does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ParameterRole {
    /// A table of token embeddings `(V, C)`.
    Embedding,
    /// The weight `(O, I)` of a linear map.
    Linear,
    /// The weight `(I, O)` of a linear map: GPT-2's `Conv1D`.
    Conv1d,
    /// The weight `(V, C)` of an untied head.
    Head,
    /// A norm, a bias, a table of positions.
    Other,
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

    /// The name of the module that it belongs to.
    pub(crate) fn module(&self) -> &str {
        self.name
            .rsplit_once('.')
            .map_or(&*self.name, |(module, _)| module)
    }

    pub(crate) fn is_bias(&self) -> bool {
        self.name.ends_with(".bias")
    }

    /// Number of elements.
    pub fn numel(&self) -> i64 {
        self.shape.iter().product()
    }
}

/// Memory for the parameters `specs`, of `kinds`, not filled yet. Those of a group, where they are of
/// one kind, lie one after another in one piece, of which they are parts.
pub(crate) fn allocate(
    specs: Vec<ParameterSpec>,
    kinds: &[Kind],
    device: Device,
    groups: &[Vec<String>],
) -> Result<Vec<(String, Tensor)>> {
    let places: HashMap<&str, usize> = specs
        .iter()
        .enumerate()
        .map(|(place, spec)| (spec.name.as_str(), place))
        .collect();
    let mut tensors: Vec<Option<Tensor>> = specs.iter().map(|_| None).collect();
    // A parameter is no view that autograd would have to follow.
    let _no_grad = engine::GradMode::new(false);
    for group in groups {
        let places: Vec<usize> = group
            .iter()
            .filter_map(|name| places.get(name.as_str()).copied())
            .collect();
        let Some(&first) = places.first() else {
            continue;
        };
        if places.iter().any(|&place| kinds[place] != kinds[first]) {
            continue;
        }
        let mut shape = specs[first].shape.clone();
        shape[0] = places.iter().map(|&place| specs[place].shape[0]).sum();
        let joint = Tensor::f_empty(&shape, (kinds[first], device))?;
        let mut start = 0;
        for place in places {
            let rows = specs[place].shape[0];
            tensors[place] = Some(joint.f_narrow(0, start, rows)?);
            start += rows;
        }
    }
    specs
        .into_iter()
        .zip(tensors)
        .zip(kinds)
        .map(|((spec, tensor), kind)| {
            let tensor = match tensor {
                Some(part) => part,
                None => Tensor::f_empty(&spec.shape, (*kind, device))?,
            };
            Ok((spec.name, tensor))
        })
        .collect()
}

/// What a model is made of.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    /// Dense parameters in the order of the configuration.
    pub(crate) parameters: Vec<(String, Tensor)>,
    /// Quantized weights by the names of their maps, without `.weight`.
    pub(crate) quantized: HashMap<String, QuantizedWeight>,
}

/// Parameters by name, for the modules to take theirs from.
#[derive(Debug)]
pub(crate) struct ParameterMap {
    dense: HashMap<String, Tensor>,
    quantized: HashMap<String, QuantizedWeight>,
    kind: Kind,
}

impl ParameterMap {
    pub(crate) fn new(parts: Parts) -> Self {
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

    /// Takes the layer of `{name}.weight (in, out)` and `{name}.bias`.
    pub(crate) fn take_conv1d(&mut self, name: &str) -> Result<Linear> {
        self.take_layer(name, true, true)
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
            None => Ok(Embedding::dense(self.take(&format!("{name}.weight"))?)),
        }
    }

    /// Takes the weight of the layer `name` if it is quantized.
    pub(crate) fn take_quantized(&mut self, name: &str) -> Option<QuantizedWeight> {
        self.quantized.remove(name)
    }

    pub(crate) fn take(&mut self, name: &str) -> Result<Tensor> {
        // The list of parameters and the modules are both derived from one configuration; a test
        // builds each architecture, so this is an error of this crate and not of its user.
        self.dense
            .remove(name)
            .ok_or_else(|| crate::Error::BadConfig {
                key: name.to_owned(),
                found: "not a parameter of this architecture".to_owned(),
                expected: "a name of `ModelConfig::parameters` (please report this)".to_owned(),
            })
    }
}
