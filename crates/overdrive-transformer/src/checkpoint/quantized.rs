//! Weights that are quantized in the checkpoint.

use std::collections::{BTreeMap, HashMap, HashSet};

use overdrive_quantization::{QuantizationConfig, QuantizedWeight, Scheme, TensorSource};
use overdrive_safetensors::StoredTensor;
use serde_json::Value;
use tch::{Device, Tensor};

use super::contents::{CheckpointConfig, Contents};
use super::multimodal::names_of;
use super::packed_experts::is_packed_expert;
use super::problems::{CheckpointProblems, Misshapen};
use crate::parameters::{ParameterRole, ParameterSpec, handles};
use crate::{Error, Result};

/// The tensors of the files by name.
pub(crate) type Views<'a> = HashMap<String, StoredTensor<'a>>;

/// The key of the layout of quantized weights in `config.json`.
pub(super) const LAYOUT_KEY: &str = "quantization_config";

struct Source<'v, 'a>(&'v Views<'a>);

impl TensorSource for Source<'_, '_> {
    fn stored(&self, name: &str) -> overdrive_quantization::Result<Option<StoredTensor<'_>>> {
        Ok(self.0.get(name).cloned())
    }
}

/// Returns the object `quantization_config` of the configuration, if it has one.
///
/// # Errors
/// [`Error::Quantization`] for an unknown method or keys that do not fit.
pub(crate) fn layout(config: &dyn CheckpointConfig) -> Result<Option<QuantizationConfig>> {
    match config.extra().get(LAYOUT_KEY) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => Ok(Some(QuantizationConfig::from_json(value)?)),
    }
}

/// Returns the [`layout`] after its lists got the names of this model, if those in the folder are of a multimodal model.
pub(super) fn layout_of_folder(
    config: &mut dyn CheckpointConfig,
    views: &Views<'_>,
) -> Result<Option<QuantizationConfig>> {
    let Some(layout) = layout(config)? else {
        return Ok(None);
    };
    let names = names_of(views);
    if names.is_empty() {
        return Ok(Some(layout));
    }
    let layout = layout.renamed(&names)?;
    config.set_quantization(layout.to_json()?);
    Ok(Some(layout))
}

/// Returns `true` if `views` hold the weight of the layer `module` quantized.
pub(super) fn is_stored(
    layout: &QuantizationConfig,
    views: &Views<'_>,
    module: &str,
) -> Result<bool> {
    Ok(layout.is_stored(&Source(views), module)?)
}

/// Removes the quantized weights of `specs`, and of a separate head beside a tied embedding, from `views`, and returns
/// them by the names of their layers. `read` is called with the bytes of each.
pub(super) fn take(
    layout: &QuantizationConfig,
    specs: &[ParameterSpec],
    views: &mut Views<'_>,
    device: Device,
    problems: &mut CheckpointProblems,
    mut read: impl FnMut(u64),
) -> Result<HashMap<String, QuantizedWeight>> {
    let mut quantized = HashMap::new();
    let weights = specs
        .iter()
        .filter(|spec| spec.role != ParameterRole::Other);
    let mut layers: Vec<(&str, [i64; 2])> = weights.filter_map(|spec| layer_of(spec)).collect();
    // A checkpoint with a tied embedding may hold a quantized head beside it.
    // The embedding is the first parameter of every architecture.
    if let Some(&(_, embedding)) = layers.first()
        && !layers.iter().any(|(module, _)| *module == "lm_head")
    {
        layers.push(("lm_head", embedding));
    }
    for (module, expected) in layers {
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
        quantized.insert(module.to_owned(), weight.to_device(device)?);
    }
    leave_static_scales(layout, &quantized, views);
    take_zero_biases(specs, &quantized, views, problems)?;
    Ok(quantized)
}

/// Removes the static scales of the quantized weights from `views`, and logs that they are not used.
fn leave_static_scales(
    layout: &QuantizationConfig,
    quantized: &HashMap<String, QuantizedWeight>,
    views: &mut Views<'_>,
) {
    let names = quantized
        .keys()
        .flat_map(|module| layout.static_scale_names(module));
    let mut found: Vec<String> = names.filter(|name| views.remove(name).is_some()).collect();
    found.sort();
    if let Some(first) = found.first() {
        tracing::warn!(
            "{} static scales and zero points of the checkpoint ({first}, ...) are not used: activations are quantized \
             dynamically per token, and the cache by its own options",
            found.len()
        );
    }
}

/// Removes zero biases that the configuration does not have from `views`: AutoGPTQ writes one for every quantized
/// layer.
fn take_zero_biases(
    specs: &[ParameterSpec],
    quantized: &HashMap<String, QuantizedWeight>,
    views: &mut Views<'_>,
    problems: &mut CheckpointProblems,
) -> Result<()> {
    let expected: HashSet<&str> = specs.iter().map(|spec| spec.name.as_str()).collect();
    for module in quantized.keys() {
        let name = format!("{module}.bias");
        if expected.contains(name.as_str()) {
            continue;
        }
        let Some(bias) = views.remove(&name) else {
            continue;
        };
        let values = bias.copy_to_tensor(None, Device::Cpu)?;
        if values.f_ne(0.0)?.f_any()?.f_int64_value(&[])? != 0 {
            problems.nonzero_biases.push(name);
        }
    }
    problems.nonzero_biases.sort();
    Ok(())
}

/// Returns the name of the layer, and its outputs and inputs.
fn layer_of(spec: &ParameterSpec) -> Option<(&str, [i64; 2])> {
    match (spec.role, spec.shape.as_slice()) {
        (ParameterRole::Conv1d, &[inputs, outputs]) => Some((spec.module(), [outputs, inputs])),
        (_, &[outputs, inputs]) => Some((spec.module(), [outputs, inputs])),
        _ => None,
    }
}

/// The tensors and the configuration that are written.
pub(super) struct Written {
    /// The tensors, in the order of the configuration.
    pub(super) tensors: Vec<(String, Tensor)>,
    /// The object for `config.json`, if a weight is quantized.
    pub(super) layout: Option<QuantizationConfig>,
}

/// Returns the tensors of `contents` in the layout of a file.
pub(super) fn written(contents: &Contents<'_>) -> Result<Written> {
    let specs = contents.config.parameters();
    let handle =
        |(name, weight): (&String, &QuantizedWeight)| (name.clone(), weight.shallow_clone());
    let mut quantized: HashMap<_, _> = contents.quantized.iter().map(handle).collect();
    let mut dense: HashMap<String, Tensor> = handles(&contents.dense).into_iter().collect();
    let layout = layout_of(contents.config, &specs, &quantized)?;
    let mut tensors = Vec::new();
    for spec in &specs {
        if let Some(tensor) = dense.remove(&spec.name) {
            tensors.push((spec.name.clone(), tensor));
        } else if let (Some(layout), Some(weight)) = (&layout, quantized.remove(spec.module())) {
            tensors.extend(layout.write_weight(&weight, spec.module())?);
        } else if !contents.config.may_be_missing(spec) {
            return Err(Error::Common(overdrive_core::Error::internal(format!(
                "the model has no weight `{}`",
                spec.name
            ))));
        }
    }
    // The rest is a head that is tied by the configuration but has a weight of its own.
    for (name, weight) in quantized {
        if let Some(layout) = &layout {
            tensors.extend(layout.write_weight(&weight, &name)?);
        }
    }
    // The other layouts describe weights of modules, of which each expert has its own.
    if matches!(layout, None | Some(QuantizationConfig::Mxfp4(_))) {
        tensors = contents.config.stacked(tensors)?;
    }
    Ok(Written { tensors, layout })
}

/// Returns the layout in which the model was read, if it can be written, else the layout of the one scheme of its
/// weights.
fn layout_of(
    config: &dyn CheckpointConfig,
    specs: &[ParameterSpec],
    quantized: &HashMap<String, QuantizedWeight>,
) -> Result<Option<QuantizationConfig>> {
    if quantized.is_empty() {
        return Ok(None);
    }
    // Of the layouts that can be read, these can be written.
    let read = layout(config)?;
    if let Some(layout @ QuantizationConfig::Mxfp4(_)) = &read {
        let is_so = |(module, weight): (&String, &QuantizedWeight)| {
            weight.scheme() == Scheme::Mxfp4 && is_packed_expert(module)
        };
        if quantized.iter().all(is_so) {
            return Ok(Some(layout.clone()));
        }
    }
    if let Some(
        layout @ (QuantizationConfig::BitsAndBytes(_) | QuantizationConfig::CompressedTensors(_)),
    ) = read
    {
        return Ok(Some(layout.for_writing()));
    }
    let layers = specs.iter().filter(|spec| {
        matches!(
            spec.role,
            ParameterRole::Linear
                | ParameterRole::Conv1d
                | ParameterRole::Head
                | ParameterRole::Router
                | ParameterRole::Expansion
        )
    });
    let mut kept: Vec<String> = layers
        .map(|spec| spec.module().to_owned())
        .filter(|name| !quantized.contains_key(name))
        .collect();
    if let Some(head) = config
        .tied_head()
        .filter(|&head| !quantized.contains_key(head))
    {
        kept.push(head.to_owned());
    }
    // Keyed by name, so that an error lists the schemes in a fixed order.
    let schemes: BTreeMap<String, Scheme> = quantized
        .values()
        .map(|weight| (weight.scheme().to_string(), weight.scheme()))
        .collect();
    let mut values = schemes.values();
    let (Some(scheme), None) = (values.next(), values.next()) else {
        // Schemes of a file's groups differ where a size is not supported, or all zero points of a weight are the middle.
        let groups = schemes.values().map(|scheme| match scheme {
            Scheme::Grouped(options) => Some(options),
            _ => None,
        });
        if let (Some(read), Some(groups)) = (&read, groups.collect::<Option<Vec<_>>>())
            && let Some(layout) =
                read.regrouped(groups.iter().all(|options| options.symmetric), kept)
        {
            return Ok(Some(layout));
        }
        let names: Vec<&str> = schemes.keys().map(String::as_str).collect();
        return Err(Error::unsupported(
            "quantization_config",
            format!("weights of several schemes ({})", names.join(", ")),
            "one scheme per folder; call `CausalLm::dequantize` first",
        ));
    };
    let mut layout = QuantizationConfig::for_scheme(*scheme, kept);
    // What a folder in FP8 says beside the lists of modules, as other programs read it.
    let read = read.map(QuantizationConfig::for_writing);
    if let (QuantizationConfig::Fp8(own), Some(QuantizationConfig::Fp8(read))) = (&mut layout, read)
    {
        own.other = read.other;
    }
    Ok(Some(layout))
}
