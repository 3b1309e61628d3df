//! The tensors of a model: initial ones, and those of a checkpoint.

use std::collections::HashMap;
use std::path::Path;

use overdrive_core::units::first_few;
use tch::{Kind, Tensor};

use super::layout::Layout;
use super::parameters::parameters;
use super::{EncoderConfig, HeadKind, LoadReport};
use crate::checkpoint::{self, CheckpointConfig};
use crate::init::initialize;
use crate::parameters::{ModelTensors, ParameterRole, allocate};
use crate::{InitOptions, LoadOptions, ParameterSpec, Result};

/// Returns the parameters of a new model.
pub(super) fn initial(
    config: &EncoderConfig,
    kind: HeadKind,
    options: &InitOptions,
) -> Result<ModelTensors> {
    let (specs, layout) = (parameters(config, kind), Layout::new(config, kind));
    let kinds = vec![options.kind; specs.len()];
    let dense = allocate(specs.clone(), &kinds, options.device, &layout.adjacent())?;
    initialize(&dense, &specs, options.seed)?;
    for ((_, tensor), spec) in dense.iter().zip(&specs) {
        clear_padding(config, spec, tensor)?;
    }
    Ok(ModelTensors {
        parameters: dense,
        ..ModelTensors::default()
    })
}

/// Sets the vector of padding to zeros, as in transformers: it never gets a gradient.
fn clear_padding(config: &EncoderConfig, spec: &ParameterSpec, tensor: &Tensor) -> Result<()> {
    let positions = spec.name.ends_with(".position_embeddings.weight");
    let padded = spec.role == ParameterRole::Embedding || (positions && config.family.is_roberta());
    if let (Some(pad), true) = (config.pad_token_id, padded) {
        let _same = tensor.f_detach()?.f_select(0, pad)?.f_zero_()?;
    }
    Ok(())
}

/// Reads the parameters from a folder, and initializes missing parameters of the head. The returned configuration
/// matches the parameters: a head whose stored weight differs from the embedding is untied in it.
pub(super) fn read(
    dir: &Path,
    config: &EncoderConfig,
    kind: HeadKind,
    options: &LoadOptions,
    seed: u64,
) -> Result<(EncoderConfig, ModelTensors, LoadReport)> {
    let mut layout = Layout::new(config, kind);
    let parts = checkpoint::read(dir, &mut layout, options)?;
    let (config, unused) = layout.into_parts();
    let tensors = EncoderTensors::new(config, kind);
    let (parts, mut report) = tensors.completed(parts, options, seed)?;
    report.unused = unused;
    log(dir, &report);
    Ok((tensors.config, parts, report))
}

/// The parameters that a reader of files finds the tensors of.
pub(crate) struct EncoderTensors {
    pub(crate) config: EncoderConfig,
    pub(crate) specs: Vec<ParameterSpec>,
    kind: HeadKind,
}

impl EncoderTensors {
    pub(crate) fn new(config: EncoderConfig, kind: HeadKind) -> EncoderTensors {
        EncoderTensors {
            specs: parameters(&config, kind),
            config,
            kind,
        }
    }

    /// Returns the groups of parameters that lie next to one another.
    pub(crate) fn adjacent(&self) -> Vec<Vec<String>> {
        Layout::new(&self.config, self.kind).adjacent()
    }

    /// Puts the parameters that were read in order, and initializes the missing ones.
    pub(crate) fn completed(
        &self,
        mut parts: ModelTensors,
        options: &LoadOptions,
        seed: u64,
    ) -> Result<(ModelTensors, LoadReport)> {
        let specs = &self.specs;
        let mut held: HashMap<String, Tensor> = parts.parameters.drain(..).collect();
        let quantized = |spec: &ParameterSpec| {
            // The bias of a quantized layer is a dense parameter.
            !spec.is_bias() && parts.quantized.contains_key(spec.module())
        };
        let missing = |spec: &&ParameterSpec| !held.contains_key(&spec.name) && !quantized(spec);
        let missing: Vec<ParameterSpec> = specs.iter().filter(missing).cloned().collect();
        let first = specs.iter().find_map(|spec| held.get(&spec.name));
        let dtype = options
            .kind
            .or(first.map(Tensor::kind))
            .unwrap_or(Kind::Float);
        let made = allocate(
            missing.clone(),
            &vec![dtype; missing.len()],
            options.device,
            &[],
        )?;
        initialize(&made, &missing, seed)?;
        held.extend(made);
        parts.parameters = specs
            .iter()
            .filter_map(|spec| held.remove_entry(&spec.name))
            .collect();
        let report = LoadReport {
            initialized: missing.into_iter().map(|spec| spec.name).collect(),
            unused: Vec::new(),
        };
        Ok((parts, report))
    }
}

fn log(dir: &Path, report: &LoadReport) {
    if !report.initialized.is_empty() {
        tracing::warn!(
            "{} parameters are missing from {} and were initialized; train the model before you use it: {}",
            report.initialized.len(),
            dir.display(),
            first_few(&report.initialized)
        );
    }
    if !report.unused.is_empty() {
        tracing::warn!(
            "{} tensors in {} are not used by this head: {}",
            report.unused.len(),
            dir.display(),
            first_few(&report.unused)
        );
    }
}
