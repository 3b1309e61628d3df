use std::cell::Cell;
use std::collections::HashMap;
use std::path::Path;

use overdrive_core::{Error as Common, text};
use overdrive_quantization::Scheme;
use overdrive_safetensors::StoredTensor;
use serde_json::{Map, Value};
use tch::{Device, Kind};

use super::contents::CheckpointConfig;
use super::problems::{CheckpointProblems, Misshapen};
use super::progress::LoadProgress;
use super::quantized::{self, Views, layout, layout_of_folder};
use super::shards::{WeightFile, weight_files};
use super::unused_tensors::{UnusedTensors, is_buffer};
use crate::config::check_layers_of_files;
use crate::parameters::{ModelTensors, ParameterSpec, allocate};
use crate::quantize::quantize_parameter;
use crate::{Error, QuantizeOptions, Result};

/// The options of loading a checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadOptions {
    /// The device of the parameters; default: the CPU.
    pub device: Device,
    /// The dtype of the parameters; default `None`: each keeps that of the file.
    pub kind: Option<Kind>,
    /// The weights that are quantized as they are read, one at a time; default `None`: none, except those that
    /// the checkpoint holds quantized.
    pub quantization: Option<QuantizeOptions>,
    /// A callback that receives the progress; default: none.
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

/// Reads the parameters of `config` from the weight files in `dir`, in the order of the configuration. A tied head
/// whose stored values differ from the embedding is untied in the configuration.
///
/// Each tensor of the files is read, compared with the tensor that is read in its place, or named in a warning, as
/// complex ones are; a tensor of another dtype that the configuration does not have is an error.
///
/// Each tensor is converted from the mapped file directly into the model's memory: there is no second copy on the
/// CPU, and a copy of at most one tensor for another device.
pub(crate) fn read(
    dir: &Path,
    config: &mut dyn CheckpointConfig,
    options: &LoadOptions,
) -> Result<ModelTensors> {
    let weights = weight_files(dir)?;
    let files = weights.paths.iter().map(WeightFile::open);
    let files = files.collect::<Result<Vec<_>>>()?;
    let mut unused = UnusedTensors::default();
    let (mut views, mut copies) = (HashMap::new(), Vec::new());
    for (file, path) in files.iter().zip(&weights.paths) {
        for stored in file.tensors() {
            // A buffer, such as rotary frequencies of `torch.polar`.
            if stored.kind() == Some(Kind::ComplexFloat) {
                unused.add(stored.name(), "it is complex, and no parameter is");
                continue;
            }
            // A tensor that is in two shards is read from the one that the index names.
            match weights.names_other_file(stored.name(), path) {
                true => copies.push(stored),
                false => drop(views.insert(stored.name().to_owned(), stored)),
            }
        }
        for name in file.others() {
            unused.add(name, "it is not a tensor that can be read");
        }
    }
    for copy in &copies {
        if let Some(used) = views.get(copy.name()) {
            unused.compare(copy, used)?;
        }
    }
    let mut views = renamed(config.own_tensors(views), config, &mut unused)?;
    if has_own_head(config, &views)? {
        let head = config.tied_head().unwrap_or_default();
        tracing::warn!(
            "`tie_word_embeddings` is true in {}, but {head}.weight differs from the embedding, so the head was not \
             tied. Set `tie_word_embeddings` to false in config.json",
            dir.display()
        );
        config.untie_head();
        // An untied head may have other names.
        views = renamed(views, config, &mut unused)?;
    }
    unused.log(dir);
    let total = views.values().map(|stored| stored.data().len() as u64);
    // Before the parameters are listed layer by layer.
    check_layers_of_files(config.layers(), views.len())?;
    let progress = Progress::new(options, total.sum());
    let mut specs = config.parameters();
    let mut problems = CheckpointProblems::default();
    let quantized_weights = match layout_of_folder(config, &views)? {
        None => HashMap::new(),
        // A second quantization would add its rounding to that of the first.
        Some(_) if options.quantization.is_some() => {
            let expected =
                "unset for a checkpoint that is already quantized; load it without the option";
            return Err(Common::option("quantization", "set", expected).into());
        }
        Some(layout) => quantized::take(
            &layout,
            &specs,
            &mut views,
            options.device,
            &mut problems,
            |bytes| progress.add(bytes),
        )?,
    };
    // A quantized layer has no dense weight, but its bias is a dense parameter.
    specs.retain(|spec| !quantized_weights.contains_key(spec.module()) || spec.is_bias());
    let held = |spec: &ParameterSpec| views.contains_key(&spec.name);
    specs.retain(|spec| held(spec) || !config.may_be_missing(spec));
    let sources = check(dir, config, &specs, &mut views, problems)?;
    let tied = config.tied_head().is_some();
    let scheme_of = |spec: &ParameterSpec| match &options.quantization {
        None => Ok(None),
        Some(quantization) => quantization.scheme_of(spec, tied),
    };
    let schemes = specs.iter().map(scheme_of);
    let schemes = schemes.collect::<Result<Vec<Option<Scheme>>>>()?;
    let (mut dense, mut kinds) = (Vec::new(), Vec::new());
    for ((spec, (_, from)), scheme) in specs.iter().zip(&sources).zip(&schemes) {
        if scheme.is_none() {
            dense.push(spec.clone());
            kinds.push(config.kind_of(spec, options.kind.unwrap_or(*from)));
        }
    }
    let mut parts = ModelTensors {
        parameters: allocate(dense, &kinds, options.device, &config.adjacent())?,
        quantized: quantized_weights,
    };
    let indices: HashMap<String, usize> = parts
        .parameters
        .iter()
        .enumerate()
        .map(|(index, (name, _))| (name.clone(), index))
        .collect();
    // In the order of the files, because disks read ahead.
    let mut order: Vec<usize> = (0..sources.len()).collect();
    order.sort_by_key(|&index| sources[index].0.data().as_ptr());
    for index in order {
        let (spec, (stored, _)) = (&specs[index], &sources[index]);
        match (schemes[index], indices.get(&spec.name)) {
            (Some(scheme), _) => {
                // Quantization computes scales from fp32, whatever the dtype of the file.
                let mut whole = stored.copy_to_tensor(Some(Kind::Float), options.device)?;
                if is_transposed(stored, spec) {
                    whole = whole.f_tr()?;
                }
                let weight = quantize_parameter(&whole, spec, scheme)?;
                parts.quantized.insert(spec.module().to_owned(), weight);
            }
            (None, Some(&parameter)) => {
                let parameter = &mut parts.parameters[parameter].1;
                match is_transposed(stored, spec) {
                    true => {
                        let whole = stored.copy_to_tensor(None, Device::Cpu)?;
                        parameter.f_copy_(&whole.f_tr()?)?;
                    }
                    false => stored.copy_into(parameter)?,
                }
            }
            (None, None) => unreachable!("every parameter without a scheme was allocated"),
        }
        progress.add(stored.data().len() as u64);
    }
    progress.finish();
    Ok(parts)
}

/// The number of bytes read, and the callback that receives it.
struct Progress<'a> {
    callback: Option<&'a LoadProgress>,
    // A `Cell`: the closure for quantized weights and the loop over dense ones both count.
    done: Cell<u64>,
    total: u64,
}

impl<'a> Progress<'a> {
    fn new(options: &'a LoadOptions, total: u64) -> Self {
        let progress = Progress {
            callback: options.progress.as_ref(),
            done: Cell::new(0),
            total,
        };
        progress.add(0);
        progress
    }

    /// Counts the tensors that are not read, such as buffers that are computed, as done.
    fn finish(&self) {
        if self.done.get() < self.total {
            self.add(self.total - self.done.get());
        }
    }

    fn add(&self, bytes: u64) {
        self.done.set(self.done.get() + bytes);
        if let Some(callback) = self.callback {
            callback.report(self.done.get(), self.total);
        }
    }
}

/// Reads `generation_config.json`, if there is one.
pub(crate) fn read_generation_config(dir: &Path) -> Result<Option<Map<String, Value>>> {
    let path = dir.join("generation_config.json");
    let Some(text) = text::read_optional(&path)? else {
        return Ok(None);
    };
    let object = serde_json::from_str(&text).map_err(Common::parse("JSON", path))?;
    Ok(Some(object))
}

/// Gives the tensors the names of the parameters that they hold, and leaves out those without a use.
fn renamed<'a>(
    views: Views<'a>,
    config: &dyn CheckpointConfig,
    unused: &mut UnusedTensors,
) -> Result<Views<'a>> {
    let prefix = config.prefix();
    let prefixed = views.keys().any(|name| name.starts_with(prefix));
    let (mut own, mut copies) = (Views::new(), Vec::new());
    // A `HashMap` has no order, and every run must use the same one of two tensors.
    let mut views: Vec<(String, StoredTensor<'a>)> = views.into_iter().collect();
    views.sort_by(|(one, _), (other, _)| one.cmp(other));
    for (name, view) in views {
        let Some(wanted) = config.parameter_name(&name, prefixed) else {
            continue;
        };
        // Of two tensors for one parameter, the one with exactly its name is used, else the first.
        let is_own = wanted == name;
        let (used, copy) = match own.remove(&wanted) {
            Some(other) if is_own => (view, Some(other)),
            Some(other) => (other, Some(view)),
            None => (view, None),
        };
        copies.extend(copy.map(|copy| (wanted.clone(), copy)));
        own.insert(wanted, used);
    }
    // With the tensor that is used in the end.
    for (wanted, copy) in &copies {
        if let Some(used) = own.get(wanted) {
            unused.compare(copy, used)?;
        }
    }
    Ok(own)
}

/// Returns `true` if the configuration ties the head, and the files hold one with other values than the embedding.
fn has_own_head(config: &dyn CheckpointConfig, views: &Views<'_>) -> Result<bool> {
    let is_dense = |view: &&StoredTensor<'_>| view.kind().filter(is_weight).is_some();
    let head = config.tied_head().map(|head| format!("{head}.weight"));
    let Some(head) = head.and_then(|head| views.get(&head)).filter(is_dense) else {
        return Ok(false);
    };
    // The embedding is the first parameter of every architecture.
    let Some(embedding) = config.parameters().into_iter().next() else {
        return Ok(false);
    };
    match (views.get(&embedding.name).filter(is_dense), layout(config)?) {
        (Some(table), _) => Ok(!head.has_same_values(table)?),
        // A dense head beside a quantized embedding.
        (None, Some(layout)) => quantized::is_stored(&layout, views, embedding.module()),
        // The one tensor that both share has the name of the head.
        (None, None) => Ok(false),
    }
}

/// Returns the stored tensor and dtype of each parameter after a check of all names, shapes and formats.
fn check<'a>(
    dir: &Path,
    config: &dyn CheckpointConfig,
    specs: &[ParameterSpec],
    views: &mut Views<'a>,
    mut problems: CheckpointProblems,
) -> Result<Vec<(StoredTensor<'a>, Kind)>> {
    if let Some(head) = config.tied_head() {
        // A tied head may have been written beside the embedding or in place of it: the two are one
        // tensor under either name.
        let head = views.remove(&format!("{head}.weight"));
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
            _ if view.shape() != spec.shape
                && !(config.may_be_transposed(spec) && is_transposed(&view, spec)) =>
            {
                problems.misshapen.push(Misshapen {
                    name: spec.name.clone(),
                    found: view.shape().to_vec(),
                    expected: spec.shape.clone(),
                })
            }
            None => problems.unreadable.push((spec.name.clone(), view.format())),
            Some(kind) => sources.push((view, kind)),
        }
    }
    problems.unexpected = views
        .keys()
        .filter(|name| !is_buffer(name))
        .cloned()
        .collect();
    // A `HashMap` has no order, and the message should be the same in every run.
    problems.unexpected.sort();
    if problems.is_empty() {
        return Ok(sources);
    }
    Err(Error::Checkpoint {
        path: dir.to_path_buf(),
        problems: Box::new(problems),
    })
}

/// Returns `true` if a file has the matrix with inputs and outputs in the other order.
fn is_transposed(stored: &StoredTensor<'_>, spec: &ParameterSpec) -> bool {
    stored.shape() != spec.shape && stored.shape().iter().rev().eq(&spec.shape)
}

/// Returns `true` if this crate computes with weights of `kind`.
fn is_weight(kind: &Kind) -> bool {
    matches!(
        kind,
        Kind::Double | Kind::Float | Kind::Half | Kind::BFloat16
    )
}
