use std::collections::{BTreeSet, HashMap};

use overdrive_quantization::{GgufFile, GgufTensor};
use tch::{Kind, Tensor};

use super::names::{fused_rows, gguf_shape, is_of_shared_keys, llama_name, row_order, stream_of};
use crate::checkpoint::{CheckpointProblems, Misshapen};
use crate::config::{LlamaConfig, check_layers_of_files};
use crate::moe;
use crate::parameters::{ModelTensors, ParameterRole, ParameterSpec, allocate};
use crate::quantize::quantize_parameter;
use crate::{Error, LoadOptions, ModelConfig, Result, RopeScaling};

/// A parameter, and the tensor of the file that holds it.
pub(super) struct Source<'a> {
    pub(super) spec: ParameterSpec,
    pub(super) tensor: GgufTensor<'a>,
    pub(super) rows: Option<Vec<i64>>,
}

/// The properties of a model that its tensors do not show.
pub(super) struct Arrangement {
    /// If `true`, the head is the embedding.
    pub(super) tied: bool,
    /// The groups of parameters that lie next to one another.
    pub(super) adjacent: Vec<Vec<String>>,
    /// If `true`, norms multiply by one more than their weight.
    pub(super) norm_adds_one: bool,
}

/// Reads the parameters of `config` from `file`.
pub(super) fn tensors(
    file: &GgufFile,
    config: &ModelConfig,
    options: &LoadOptions,
) -> Result<ModelTensors> {
    let ModelConfig::Llama(llama) = config else {
        return Err(Error::Unsupported {
            key: "general.architecture".to_owned(),
            found: "another family".to_owned(),
            supported: "models of the Llama family".to_owned(),
        });
    };
    let arrangement = Arrangement {
        tied: config.tie_word_embeddings(),
        adjacent: config.adjacent(),
        norm_adds_one: llama.norm_adds_one(),
    };
    read(sources(file, config, llama)?, &arrangement, options)
}

/// Reads the parameters of `sources`.
pub(super) fn read(
    sources: Vec<Source<'_>>,
    arrangement: &Arrangement,
    options: &LoadOptions,
) -> Result<ModelTensors> {
    let kind = options.kind.unwrap_or_else(|| kind_of_matrices(&sources));
    let (dense, quantized): (Vec<Source<'_>>, Vec<Source<'_>>) =
        sources.into_iter().partition(|source| {
            // Norms, biases and routers are dense; a matrix is, unless the file or the options quantize it.
            let matrix = is_matrix(&source.spec);
            !matrix
                || !source.tensor.tensor_type().is_quantized()
                    && scheme(source, arrangement, options).is_none()
        });
    let all = dense.iter().chain(&quantized);
    let total: u64 = all.map(|source| source.tensor.data().len() as u64).sum();
    let mut done = 0;
    let mut report = |bytes: usize| {
        done += bytes as u64;
        if let Some(progress) = &options.progress {
            progress.report(done, total);
        }
    };
    report(0);
    let mut quantized_weights = HashMap::new();
    for source in &quantized {
        let weight = match scheme(source, arrangement, options) {
            None => {
                let weight = source
                    .tensor
                    .to_quantized(source.rows.as_deref(), options.device)?;
                weight.ok_or_else(|| {
                    let name = &source.spec.name;
                    overdrive_core::Error::internal(format!("`{name}` has no quantized groups"))
                })?
            }
            Some(scheme) => quantize_parameter(
                &numbers(source, options, Kind::Float)?,
                &source.spec,
                scheme,
            )?,
        };
        quantized_weights.insert(source.spec.module().to_owned(), weight);
        report(source.tensor.data().len());
    }
    let specs: Vec<ParameterSpec> = dense.iter().map(|source| source.spec.clone()).collect();
    let kinds = vec![kind; specs.len()];
    let mut parameters = allocate(specs, &kinds, options.device, &arrangement.adjacent)?;
    for ((_, parameter), source) in parameters.iter_mut().zip(&dense) {
        let mut numbers = numbers(source, options, Kind::Float)?;
        let norm = source.spec.name.ends_with("norm.weight");
        if arrangement.norm_adds_one && norm {
            // llama.cpp stores what these norms multiply by, transformers what they add to one.
            numbers = numbers.f_sub_scalar(1.0)?;
        }
        // A gate of one row is a vector in the file.
        parameter.f_copy_(&numbers.f_view_as(parameter)?)?;
        report(source.tensor.data().len());
    }
    Ok(ModelTensors {
        parameters,
        quantized: quantized_weights,
    })
}

/// Returns `true` for weights that files keep in half precision or quantized.
fn is_matrix(spec: &ParameterSpec) -> bool {
    !matches!(spec.role, ParameterRole::Other | ParameterRole::Router)
}

/// Returns F16 or BF16 if every matrix of the file has that type, else fp32.
fn kind_of_matrices(sources: &[Source<'_>]) -> Kind {
    let matrices = sources.iter().filter(|source| is_matrix(&source.spec));
    let mut kinds = matrices.map(|source| source.tensor.tensor_type().kind());
    match kinds.next() {
        Some(Some(first @ (Kind::Half | Kind::BFloat16)))
            if kinds.all(|kind| kind == Some(first)) =>
        {
            first
        }
        _ => Kind::Float,
    }
}

/// Returns the scheme by which the options quantize the parameter.
fn scheme(
    source: &Source<'_>,
    arrangement: &Arrangement,
    options: &LoadOptions,
) -> Option<overdrive_quantization::Scheme> {
    let chosen = options.quantization.as_ref()?;
    chosen.scheme_of(&source.spec, arrangement.tied)
}

fn numbers(source: &Source<'_>, options: &LoadOptions, kind: Kind) -> Result<Tensor> {
    Ok(source
        .tensor
        .dequantize(source.rows.as_deref(), kind, options.device)?)
}

/// Finds the tensor of every parameter, or returns an error with all that does not fit.
fn sources<'a>(
    file: &'a GgufFile,
    config: &ModelConfig,
    llama: &LlamaConfig,
) -> Result<Vec<Source<'a>>> {
    // By name, as a file may have very many, and before the parameters are listed layer by layer.
    let stored: HashMap<&str, GgufTensor<'a>> = file
        .tensors()
        .map(|tensor| (tensor.name(), tensor))
        .collect();
    check_layers_of_files(config.layers(), stored.len())?;
    let mut problems = CheckpointProblems::default();
    // These tensors are read into the configuration's rope scaling.
    let of_rope: &[&str] = match &llama.rope_scaling {
        RopeScaling::LongRope(_) => &["rope_factors_long.weight", "rope_factors_short.weight"],
        _ => &["rope_freqs.weight"],
    };
    let mut used: BTreeSet<String> = of_rope.iter().map(|name| (*name).to_owned()).collect();
    let mut sources = Vec::new();
    for spec in config.parameters() {
        let name = llama_name(&spec.name, llama.family);
        let found = name.as_deref().and_then(|name| stored.get(name).copied());
        let (mut shape, mut rows) = (gguf_shape(&spec), row_order(&spec.name, llama));
        let fused = || {
            let (name, height, part) = fused_rows(&spec.name, llama)?;
            let tensor = stored.get(name.as_str()).copied()?;
            shape[0] = height;
            rows = Some(part);
            Some(tensor)
        };
        let Some(tensor) = found.or_else(fused) else {
            problems.missing.push(name.unwrap_or(spec.name));
            continue;
        };
        used.insert(tensor.name().to_owned());
        // The matrix of an expert is a slice of a stack, read in place, and so is the projection of a residual stream.
        let streams = llama.per_layer.as_ref().and_then(|own| own.altup.as_ref());
        let experts = llama.experts.as_ref().map(|experts| experts.num_experts);
        let (slice, count) = match stream_of(spec.module()) {
            Some((_, stream)) => (
                Some(stream),
                streams.map(|altup| altup.altup_num_inputs - 1),
            ),
            None => (
                moe::expert_of(spec.module()).map(|(_, expert, _)| expert),
                experts,
            ),
        };
        let matrix = match slice {
            None => Some(tensor),
            Some(slice) => {
                let whole = tensor.shape().first().copied() == count;
                tensor.slice(slice).filter(|_| whole)
            }
        };
        let Some(tensor) = matrix else {
            // Once for the stack, which is one tensor.
            if slice == Some(0) {
                problems.misshapen.push(Misshapen {
                    name: tensor.name().to_owned(),
                    found: tensor.shape().to_vec(),
                    expected: count.into_iter().chain(spec.shape).collect(),
                });
            }
            continue;
        };
        if tensor.shape() != shape {
            problems.misshapen.push(Misshapen {
                name: tensor.name().to_owned(),
                found: tensor.shape().to_vec(),
                expected: shape,
            });
            continue;
        }
        sources.push(Source { rows, spec, tensor });
    }
    let names = file.tensors().map(|tensor| tensor.name().to_owned());
    let unread = |name: &String| !used.contains(name) && !is_of_shared_keys(name, llama);
    problems.unexpected = names.filter(unread).collect();
    if problems.is_empty() {
        return Ok(sources);
    }
    Err(Error::Checkpoint {
        path: file.path().to_path_buf(),
        problems: Box::new(problems),
    })
}
