use std::cell::Cell;
use std::collections::HashMap;
use std::path::Path;

use overdrive_quantization::Scheme;
use overdrive_safetensors::{MappedFile, StoredTensor};
use serde_json::{Map, Value};
use tch::{Device, Kind};

use super::packed::{self, Views, layout};
use super::problems::{CheckpointProblems, Misshapen};
use super::progress::LoadProgress;
use super::shards::weight_files;
use crate::parameters::{ParameterSpec, Parts, allocate};
use crate::quantize::quantized;
use crate::{Error, ModelConfig, QuantizeOptions, Result};

/// Where and how a checkpoint's parameters are loaded.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadOptions {
    /// Where they go; default: the CPU.
    pub device: Device,
    /// Their kind; default `None`: each as it is in the file.
    pub kind: Option<Kind>,
    /// Which weights are quantized as they are read, one at a time; default `None`: as the checkpoint
    /// says.
    pub quantization: Option<QuantizeOptions>,
    /// Is told how far the loading is; default: nobody.
    pub progress: Option<LoadProgress>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        LoadOptions {
            device: Device::Cpu,
            kind: None,
            quantization: None,
            progress: None,
        }
    }
}

/// The parameters of `config` from the weight files in `dir`, in the order of the configuration.
///
/// Each tensor is converted straight from the mapped file into the place where the model keeps it: no
/// second copy of it exists on the CPU, and at most one tensor's on another device.
pub(crate) fn read(dir: &Path, config: &ModelConfig, options: &LoadOptions) -> Result<Parts> {
    let weights = weight_files(dir)?;
    let files = weights.paths.iter().map(MappedFile::open);
    let files = files.collect::<overdrive_safetensors::Result<Vec<_>>>()?;
    let mut views = HashMap::new();
    for (file, path) in files.iter().zip(&weights.paths) {
        for stored in file.tensors() {
            // A tensor that lies in two shards is taken from the one that the index names.
            if weights.names_other_file(stored.name(), path) {
                continue;
            }
            views.insert(stored.name().to_owned(), stored);
        }
    }
    let mut views = with_prefix(views, config);
    let total = views.values().map(|stored| stored.data().len() as u64);
    let progress = Progress::new(options, total.sum());
    let mut specs = config.parameters();
    let mut problems = CheckpointProblems::default();
    let quantized_maps = match layout(config)? {
        None => HashMap::new(),
        Some(_) if options.quantization.is_some() => {
            return Err(Error::BadConfig {
                key: "quantization_config".to_owned(),
                found: "there: the checkpoint is quantized".to_owned(),
                expected: "a checkpoint in full precision to quantize; this one loads as it is"
                    .to_owned(),
            });
        }
        Some(layout) => packed::take(
            &layout,
            &specs,
            &mut views,
            options.device,
            &mut problems,
            |bytes| progress.add(bytes),
        )?,
    };
    specs.retain(|spec| !quantized_maps.contains_key(spec.module()) || spec.is_bias());
    let sources = check(dir, config, &specs, &mut views, problems)?;
    let tied = config.tie_word_embeddings();
    let schemes: Vec<Option<Scheme>> = specs
        .iter()
        .map(|spec| options.quantization.as_ref()?.scheme_of(spec, tied))
        .collect();
    let (mut dense, mut kinds) = (Vec::new(), Vec::new());
    for ((spec, (_, from)), scheme) in specs.iter().zip(&sources).zip(&schemes) {
        if scheme.is_none() {
            dense.push(spec.clone());
            kinds.push(options.kind.unwrap_or(*from));
        }
    }
    let mut parts = Parts {
        parameters: allocate(dense, &kinds, options.device, &config.adjacent())?,
        quantized: quantized_maps,
    };
    let places: HashMap<String, usize> = parts
        .parameters
        .iter()
        .enumerate()
        .map(|(place, (name, _))| (name.clone(), place))
        .collect();
    // In the order of the files, which a disk reads fastest.
    let mut order: Vec<usize> = (0..sources.len()).collect();
    order.sort_by_key(|&index| sources[index].0.data().as_ptr());
    for index in order {
        let (spec, (stored, _)) = (&specs[index], &sources[index]);
        match (schemes[index], places.get(&spec.name)) {
            (Some(scheme), _) => {
                let whole = stored.copy_to_tensor(Some(Kind::Float), options.device)?;
                let weight = quantized(&whole, spec, scheme)?;
                parts.quantized.insert(spec.module().to_owned(), weight);
            }
            (None, Some(&place)) => stored.copy_into(&parts.parameters[place].1)?,
            (None, None) => unreachable!("every parameter without a scheme was allocated"),
        }
        progress.add(stored.data().len() as u64);
    }
    progress.finish();
    Ok(parts)
}

/// How far the reading is, for who wants to know.
struct Progress<'a> {
    told: Option<&'a LoadProgress>,
    done: Cell<u64>,
    total: u64,
}

impl<'a> Progress<'a> {
    fn new(options: &'a LoadOptions, total: u64) -> Self {
        let progress = Progress {
            told: options.progress.as_ref(),
            done: Cell::new(0),
            total,
        };
        progress.add(0);
        progress
    }

    /// What is not read, such as buffers that are computed, is done too.
    fn finish(&self) {
        if self.done.get() < self.total {
            self.add(self.total - self.done.get());
        }
    }

    fn add(&self, bytes: u64) {
        self.done.set(self.done.get() + bytes);
        if let Some(told) = self.told {
            told.report(self.done.get(), self.total);
        }
    }
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
fn with_prefix<'a>(views: Views<'a>, config: &ModelConfig) -> Views<'a> {
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
    views: &mut Views<'a>,
    mut problems: CheckpointProblems,
) -> Result<Vec<(StoredTensor<'a>, Kind)>> {
    if config.tie_word_embeddings() {
        // Tied, the head may have been written, and it may have been written instead of the
        // embedding: they are one tensor, whichever name it has.
        let head = views.remove("lm_head.weight");
        if let (Some(head), Some(embedding)) = (head, specs.first()) {
            views.entry(embedding.name.clone()).or_insert(head);
        }
    }
    let mut sources = Vec::with_capacity(specs.len());
    for spec in specs {
        let Some(view) = views.remove(&spec.name) else {
            problems.missing.push(spec.name.clone());
            continue;
        };
        match view.kind().filter(is_weight) {
            _ if view.shape() != spec.shape => problems.misshapen.push(Misshapen {
                name: spec.name.clone(),
                found: view.shape().to_vec(),
                expected: spec.shape.clone(),
            }),
            None => problems.unreadable.push((spec.name.clone(), view.format())),
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

/// Whether this crate computes with weights of `kind`.
fn is_weight(kind: &Kind) -> bool {
    matches!(
        kind,
        Kind::Double | Kind::Float | Kind::Half | Kind::BFloat16
    )
}
