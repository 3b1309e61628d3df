//! Adapters as GGUF files, for `llama-server --lora`.

use std::collections::BTreeMap;
use std::path::Path;

use overdrive_core::{Error as Common, text};
use overdrive_quantization::{GgufTensorInfo, GgufType, GgufValue, GgufWriter};
use overdrive_safetensors::MappedFile;
use serde_json::{Map, Value};
use tch::{Device, Kind, Tensor};

use super::metadata::metadata;
use super::names::gguf_name;
use super::placement::{inverse, orders};
use crate::{Error, ModelConfig, Result};

/// Writes a LoRA adapter in PEFT's format, the folder `adapter`, as a GGUF file for llama.cpp, in f32, as
/// `convert_lora_to_gguf.py` does. `config` is the configuration of its model.
///
/// # Errors
/// [`Error::Unsupported`] for an adapter that llama.cpp cannot apply: DoRA, adapters of embeddings or of single experts,
/// whole modules beside the adapter, factors that differ by layer; [`Error::Common`] if a file cannot be read or written.
pub fn save_gguf_adapter(
    config: &ModelConfig,
    adapter: impl AsRef<Path>,
    path: impl AsRef<Path>,
) -> Result<()> {
    let (folder, path) = (adapter.as_ref(), path.as_ref());
    let file = folder.join("adapter_config.json");
    let settings: Map<String, Value> =
        serde_json::from_str(&text::read(&file)?).map_err(Common::parse("JSON", &file))?;
    let alpha = check(&settings)?;
    let by_root = settings.get("use_rslora") == Some(&Value::Bool(true));
    let file = MappedFile::open(folder.join("adapter_model.safetensors"))?;
    // By module, the two factors.
    let mut pairs: BTreeMap<String, [Option<Tensor>; 2]> = BTreeMap::new();
    for tensor in file.tensors() {
        let (module, at) = module_of(tensor.name()).ok_or_else(|| {
            unsupported(
                "tensor",
                tensor.name(),
                "lora_A and lora_B of linear layers",
            )
        })?;
        let tensor = tensor.copy_to_tensor(None, Device::Cpu)?;
        pairs.entry(module.to_owned()).or_default()[at] = Some(tensor.f_to_kind(Kind::Float)?);
    }
    let own = metadata(config)?;
    let mut values: BTreeMap<String, GgufValue> = BTreeMap::new();
    values.extend(
        own.values
            .get_key_value("general.architecture")
            .map(|(key, value)| (key.clone(), value.clone())),
    );
    let string = |text: &str| GgufValue::String(text.to_owned());
    values.insert("general.type".to_owned(), string("adapter"));
    values.insert("adapter.type".to_owned(), string("lora"));
    values.insert(
        "adapter.lora.alpha".to_owned(),
        GgufValue::F32(alpha as f32),
    );
    let mut infos = Vec::new();
    let mut tensors = Vec::new();
    for (module, pair) in pairs {
        let [Some(mut a), Some(b)] = pair else {
            return Err(unsupported(
                "tensor",
                &module,
                "both lora_A and lora_B of each layer",
            ));
        };
        let name = format!("{module}.weight");
        // A file has two tensors in place of Qwen3-Next's joint projection.
        let is_matrix = crate::moe::expert_of(&module).is_none()
            && !module.ends_with(".in_proj_qkvz")
            && !(config.tie_word_embeddings() && module == "lm_head");
        let stored = gguf_name(&name, config).filter(|_| is_matrix);
        let stored = stored.ok_or_else(|| {
            unsupported(
                "layer",
                &module,
                "the linear layers of the blocks, and a head of its own",
            )
        })?;
        let rank = a.size().first().copied().unwrap_or(1) as f64;
        // llama.cpp divides by the rank; rsLoRA divides by its root.
        let mut b = if by_root {
            b.f_mul_scalar(rank.sqrt())?
        } else {
            b
        };
        if let ModelConfig::Llama(config) = config {
            let selected = |tensor: &Tensor, dimension, order: &[i64]| {
                tensor.f_index_select(dimension, &Tensor::f_from_slice(&inverse(order))?)
            };
            let [rows, columns] = orders(&name, config);
            if let Some(rows) = rows {
                b = selected(&b, 0, &rows)?;
            }
            if let Some(columns) = columns {
                a = selected(&a, 1, &columns)?;
            }
        }
        for (end, tensor) in [("lora_a", a), ("lora_b", b)] {
            infos.push(GgufTensorInfo {
                name: format!("{stored}.{end}"),
                shape: tensor.size(),
                tensor_type: GgufType::F32,
            });
            tensors.push(tensor);
        }
    }
    let mut writer = GgufWriter::create(path, &values, infos)?;
    for tensor in &tensors {
        writer.write(tensor)?;
    }
    Ok(writer.finish()?)
}

/// Returns `lora_alpha` of an adapter whose options a GGUF file can express.
fn check(settings: &Map<String, Value>) -> Result<f64> {
    let is_off = |value: &Value| match value {
        Value::Null | Value::Bool(false) => true,
        Value::Object(map) => map.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::String(text) => text == "none",
        _ => false,
    };
    for key in [
        "use_dora",
        "alpha_pattern",
        "target_parameters",
        "modules_to_save",
        "bias",
        "trainable_token_indices",
    ] {
        if let Some(value) = settings.get(key).filter(|value| !is_off(value)) {
            return Err(unsupported(
                key,
                &value.to_string(),
                "an adapter without it; merge it into the weights instead",
            ));
        }
    }
    let alpha = settings.get("lora_alpha").and_then(Value::as_f64);
    alpha.ok_or_else(|| unsupported("lora_alpha", "missing", "a number"))
}

/// Returns the layer that a tensor belongs to, and 0 for its first factor or 1 for its second.
fn module_of(name: &str) -> Option<(&str, usize)> {
    let name = name.strip_prefix("base_model.model.")?;
    let ends = [".lora_A.weight", ".lora_B.weight"].into_iter().enumerate();
    let mut modules = ends.filter_map(|(at, end)| Some((name.strip_suffix(end)?, at)));
    modules.next()
}

fn unsupported(key: &str, found: &str, supported: &str) -> Error {
    Error::unsupported(key, found, format!("{supported}, in GGUF files"))
}
