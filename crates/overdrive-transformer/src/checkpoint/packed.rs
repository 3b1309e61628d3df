//! Weights that a checkpoint has quantized.

use std::collections::{BTreeMap, HashMap};

use overdrive_quantization::{QuantizationConfig, QuantizedWeight, Scheme, TensorSource};
use overdrive_safetensors::StoredTensor;
use serde_json::Value;
use tch::{Device, Tensor};

use super::problems::{CheckpointProblems, Misshapen};
use crate::parameters::{ParameterRole, ParameterSpec};
use crate::{CausalLm, Error, ModelConfig, Result};

/// The tensors of the files by name.
pub(super) type Views<'a> = HashMap<String, StoredTensor<'a>>;

struct Source<'v, 'a>(&'v Views<'a>);

impl TensorSource for Source<'_, '_> {
    fn stored(&self, name: &str) -> overdrive_quantization::Result<Option<StoredTensor<'_>>> {
        Ok(self.0.get(name).cloned())
    }
}

/// The object `quantization_config` of the configuration, where there is one.
///
/// # Errors
/// When its method is not known or its keys do not fit.
pub(crate) fn layout(config: &ModelConfig) -> Result<Option<QuantizationConfig>> {
    match config.extra().get("quantization_config") {
        None | Some(Value::Null) => Ok(None),
        Some(value) => Ok(Some(QuantizationConfig::from_json(value)?)),
    }
}

/// Takes the quantized weights among `specs`, and that of a head of its own beside a tied embedding, out
/// of `views`; by the names of their maps. `read` is told the bytes of each.
pub(super) fn take(
    layout: &QuantizationConfig,
    specs: &[ParameterSpec],
    views: &mut Views<'_>,
    device: Device,
    problems: &mut CheckpointProblems,
    mut read: impl FnMut(u64),
) -> Result<HashMap<String, QuantizedWeight>> {
    let mut packed = HashMap::new();
    let weights = specs
        .iter()
        .filter(|spec| spec.role != ParameterRole::Other);
    let mut maps: Vec<(&str, [i64; 2])> = weights.filter_map(|spec| map_of(spec)).collect();
    if let Some(&(_, embedding)) = maps.first()
        && !maps.iter().any(|(module, _)| *module == "lm_head")
    {
        maps.push(("lm_head", embedding));
    }
    for (module, expected) in maps {
        if !layout.is_stored(&Source(views), module)? {
            continue;
        }
        let weight = layout.read_weight(&Source(views), module)?;
        let stored = layout.tensor_names(module);
        let stored = stored.iter().filter_map(|name| views.remove(name));
        read(stored.map(|tensor| tensor.data().len() as u64).sum());
        if weight.size() != expected {
            problems.misshapen.push(Misshapen {
                name: format!("{module}.weight"),
                found: weight.size().to_vec(),
                expected: expected.to_vec(),
            });
        }
        packed.insert(module.to_owned(), weight.to_device(device)?);
    }
    Ok(packed)
}

/// The name of the map and its outputs and inputs.
fn map_of(spec: &ParameterSpec) -> Option<(&str, [i64; 2])> {
    match (spec.role, spec.shape.as_slice()) {
        (ParameterRole::Conv1d, &[inputs, outputs]) => Some((spec.module(), [outputs, inputs])),
        (_, &[outputs, inputs]) => Some((spec.module(), [outputs, inputs])),
        _ => None,
    }
}

/// What is written of a model.
pub(super) struct Written {
    /// In the order of the configuration.
    pub(super) tensors: Vec<(String, Tensor)>,
    /// The object of `config.json`, where a weight is quantized.
    pub(super) layout: Option<QuantizationConfig>,
}

/// The tensors of `model` in a file.
pub(super) fn written(model: &CausalLm) -> Result<Written> {
    let specs = model.config().parameters();
    let mut packed = HashMap::new();
    model.for_each_packed(&mut |name, weight| {
        packed.insert(name.to_owned(), weight.shallow_clone());
    });
    let mut dense: HashMap<String, Tensor> = model.named_parameters().into_iter().collect();
    let layout = layout_of(model, &specs, &packed)?;
    let mut tensors = Vec::new();
    for spec in &specs {
        if let Some(tensor) = dense.remove(&spec.name) {
            tensors.push((spec.name.clone(), tensor));
        } else if let (Some(layout), Some(weight)) = (&layout, packed.remove(spec.module())) {
            tensors.extend(layout.write_weight(&weight, spec.module())?);
        }
    }
    // A head that is tied by the configuration and has a weight of its own.
    for (name, weight) in packed {
        if let Some(layout) = &layout {
            tensors.extend(layout.write_weight(&weight, &name)?);
        }
    }
    Ok(Written { tensors, layout })
}

/// The layout that the model was read in where it can be written, else that of the one scheme of its
/// weights.
fn layout_of(
    model: &CausalLm,
    specs: &[ParameterSpec],
    packed: &HashMap<String, QuantizedWeight>,
) -> Result<Option<QuantizationConfig>> {
    if packed.is_empty() {
        return Ok(None);
    }
    let read = layout(model.config())?;
    if let Some(
        layout @ (QuantizationConfig::BitsAndBytes(_) | QuantizationConfig::CompressedTensors(_)),
    ) = read
    {
        return Ok(Some(layout));
    }
    let schemes: BTreeMap<String, Scheme> = packed
        .values()
        .map(|weight| (weight.scheme().to_string(), weight.scheme()))
        .collect();
    let mut values = schemes.values();
    let (Some(scheme), None) = (values.next(), values.next()) else {
        let names: Vec<&str> = schemes.keys().map(String::as_str).collect();
        return Err(Error::Unsupported {
            key: "quantization_config".to_owned(),
            found: format!("weights of several schemes ({})", names.join(", ")),
            supported: "one scheme a folder, or `CausalLm::dequantize` before".to_owned(),
        });
    };
    let maps = specs.iter().filter(|spec| {
        matches!(
            spec.role,
            ParameterRole::Linear | ParameterRole::Conv1d | ParameterRole::Head
        )
    });
    let mut kept: Vec<String> = maps
        .map(|spec| spec.module().to_owned())
        .filter(|name| !packed.contains_key(name))
        .collect();
    if model.config().tie_word_embeddings() && !packed.contains_key("lm_head") {
        kept.push("lm_head".to_owned());
    }
    Ok(Some(QuantizationConfig::for_scheme(*scheme, kept)))
}
