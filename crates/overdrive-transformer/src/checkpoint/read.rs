use std::collections::HashMap;
use std::path::Path;

use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Map, Value};
use tch::{Device, Kind, Tensor};

use super::mapped::{MappedFile, copy_to_tensor};
use super::problems::{CheckpointProblems, Misshapen};
use super::shards::weight_files;
use crate::parameters::ParameterSpec;
use crate::{Error, ModelConfig, Result};

/// Where and how a checkpoint's parameters are loaded.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadOptions {
    /// Where they go; default: the CPU.
    pub device: Device,
    /// Their kind; default `None`: each as it is in the file.
    pub kind: Option<Kind>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        LoadOptions {
            device: Device::Cpu,
            kind: None,
        }
    }
}

/// The parameters of `config` from the weight files in `dir`, in the order of the configuration.
pub(crate) fn read(
    dir: &Path,
    config: &ModelConfig,
    options: &LoadOptions,
) -> Result<Vec<(String, Tensor)>> {
    let files = weight_files(dir)?
        .iter()
        .map(|path| MappedFile::open(path))
        .collect::<Result<Vec<_>>>()?;
    let mut views = HashMap::new();
    for file in &files {
        views.extend(file.tensors()?.tensors());
    }
    let mut views = with_prefix(views, config);
    let specs = config.parameters();
    let sources = check(dir, config, &specs, &mut views)?;
    specs
        .into_iter()
        .zip(sources)
        .map(|(spec, (view, from))| {
            let kind = options.kind.unwrap_or(from);
            let tensor = copy_to_tensor(view.data(), &spec.shape, from, kind, options.device)?;
            Ok((spec.name, tensor))
        })
        .collect()
}

/// What `generation_config.json` holds, where there is one.
pub(crate) fn read_generation_config(dir: &Path) -> Result<Option<Map<String, Value>>> {
    let path = dir.join("generation_config.json");
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => {
            return Err(Error::Io {
                action: "read",
                path,
                source,
            });
        }
    };
    serde_json::from_str(&text)
        .map(Some)
        .map_err(|source| Error::Json { path, source })
}

/// A checkpoint of the bare decoder has names without the prefix; transformers takes both.
fn with_prefix<'a>(
    views: HashMap<String, TensorView<'a>>,
    config: &ModelConfig,
) -> HashMap<String, TensorView<'a>> {
    let prefix = match config {
        ModelConfig::Llama(_) => "model.",
        ModelConfig::Gpt2(_) => "transformer.",
    };
    if views.keys().any(|name| name.starts_with(prefix)) {
        return views;
    }
    let renamed = |name: String| {
        if name.starts_with("lm_head.") {
            name
        } else {
            format!("{prefix}{name}")
        }
    };
    views
        .into_iter()
        .map(|(name, view)| (renamed(name), view))
        .collect()
}

/// Each parameter's bytes and kind, once every name, shape and format is found to fit.
fn check<'a>(
    dir: &Path,
    config: &ModelConfig,
    specs: &[ParameterSpec],
    views: &mut HashMap<String, TensorView<'a>>,
) -> Result<Vec<(TensorView<'a>, Kind)>> {
    if config.tie_word_embeddings() {
        // Tied, the head may have been written, and it may have been written instead of the
        // embedding: they are one tensor, whichever name it has.
        let head = views.remove("lm_head.weight");
        if let (Some(head), Some(embedding)) = (head, specs.first()) {
            views.entry(embedding.name.clone()).or_insert(head);
        }
    }
    let mut problems = CheckpointProblems::default();
    let mut sources = Vec::with_capacity(specs.len());
    for spec in specs {
        let Some(view) = views.remove(&spec.name) else {
            problems.missing.push(spec.name.clone());
            continue;
        };
        // A length that does not fit i64 fits no file either: the header check has bounded it.
        let found: Vec<i64> = view.shape().iter().map(|&n| n as i64).collect();
        match kind_of(view.dtype()) {
            _ if found != spec.shape => problems.misshapen.push(Misshapen {
                name: spec.name.clone(),
                found,
                expected: spec.shape.clone(),
            }),
            None => problems
                .unreadable
                .push((spec.name.clone(), format!("{:?}", view.dtype()))),
            Some(kind) => sources.push((view, kind)),
        }
    }
    problems.unexpected = views
        .keys()
        .filter(|name| !is_buffer(name))
        .cloned()
        .collect();
    problems.unexpected.sort();
    if problems.is_empty() {
        return Ok(sources);
    }
    Err(Error::Checkpoint {
        path: dir.to_path_buf(),
        problems: Box::new(problems),
    })
}

/// Tensors that older versions of transformers saved although they are computed: frequencies of rotary
/// positions, GPT-2's causal masks.
fn is_buffer(name: &str) -> bool {
    name.ends_with(".rotary_emb.inv_freq")
        || name.ends_with(".attn.bias")
        || name.ends_with(".attn.masked_bias")
}

fn kind_of(dtype: Dtype) -> Option<Kind> {
    match dtype {
        Dtype::F64 => Some(Kind::Double),
        Dtype::F32 => Some(Kind::Float),
        Dtype::F16 => Some(Kind::Half),
        Dtype::BF16 => Some(Kind::BFloat16),
        _ => None,
    }
}
