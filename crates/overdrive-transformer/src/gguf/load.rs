use std::collections::{BTreeSet, HashMap};

use overdrive_quantization::{GgufFile, GgufTensor, QuantizedWeight};
use tch::{Device, Kind, Tensor};

use super::deepseek;
use super::names::is_unread;
use super::placement::{Form, Placement, placements};
use crate::checkpoint::CheckpointConfig;
use crate::checkpoint::{CheckpointProblems, Misshapen};
use crate::config::{LlamaConfig, check_layers_of_files};
use crate::parameters::{ModelTensors, ParameterRole, ParameterSpec, allocate};
use crate::quantize::quantize_parameter;
use crate::{Error, LoadOptions, ModelConfig, Result, RopeScaling};

/// A parameter, and the tensors of the file that hold it, as its [`Placement`] says.
pub(super) struct Source<'a> {
    pub(super) spec: ParameterSpec,
    pub(super) tensors: Vec<GgufTensor<'a>>,
    pub(super) rows: Option<Vec<i64>>,
    pub(super) columns: Option<Vec<i64>>,
    pub(super) form: Form,
}

impl Source<'_> {
    /// Returns the number of bytes in the file.
    fn bytes(&self) -> usize {
        self.tensors.iter().map(|tensor| tensor.data().len()).sum()
    }

    /// Returns `true` if the parameter can have the quantization of the file.
    fn is_quantized(&self) -> bool {
        let mut types = self.tensors.iter().map(|tensor| tensor.tensor_type());
        let first = types.clone().next();
        // Blocks of floats are joined only with one another, and their columns keep their order.
        let in_blocks = types
            .clone()
            .all(|kind| kind.is_quantized() && Some(kind) == first);
        types.all(|kind| kind.groups().is_some()) || in_blocks && self.columns.is_none()
    }

    /// Returns the parameter as the file has it quantized.
    fn quantized(&self, device: Device) -> Result<QuantizedWeight> {
        let rows = self.rows.as_deref();
        let own = |tensor: &GgufTensor<'_>, rows| {
            tensor.to_quantized(rows)?.ok_or_else(|| {
                let name = &self.spec.name;
                overdrive_core::Error::internal(format!("`{name}` has no quantized groups")).into()
            })
        };
        let weight = match self.tensors.as_slice() {
            [one] => own(one, rows)?,
            several => {
                let parts = several.iter().map(|tensor| own(tensor, None));
                QuantizedWeight::from_rows(&parts.collect::<Result<Vec<_>>>()?, rows)?
            }
        };
        let weight = match &self.columns {
            Some(columns) => weight.with_inputs(columns)?,
            None => weight,
        };
        // The last step, which arranges the codes for the device.
        Ok(weight.to_device(device)?)
    }

    /// Returns the elements of the parameter in `kind`.
    fn numbers(&self, device: Device, kind: Kind) -> Result<Tensor> {
        let rows = self.rows.as_deref();
        let index = |order: &[i64]| Tensor::f_from_slice(order)?.f_to_device(device);
        let stored = match self.tensors.as_slice() {
            [one] => one.dequantize(rows, kind, device)?,
            several => {
                let parts = several
                    .iter()
                    .map(|part| part.dequantize(None, kind, device));
                let parts = parts.collect::<std::result::Result<Vec<_>, _>>()?;
                let whole = match self.form {
                    Form::KeysAndValues => deepseek::joined(&parts)?,
                    _ => Tensor::f_cat(&parts, 0)?,
                };
                match rows {
                    Some(rows) => whole.f_index_select(0, &index(rows)?)?,
                    None => whole,
                }
            }
        };
        let stored = match &self.columns {
            Some(columns) => stored.f_index_select(1, &index(columns)?)?,
            None => stored,
        };
        let numbers = self.form.read(stored)?;
        Ok(match self.spec.role {
            ParameterRole::Conv1d => numbers.f_tr()?,
            _ => numbers,
        })
    }
}

/// The properties of a model that its tensors do not show.
pub(super) struct Arrangement {
    /// If `true`, the head is the embedding.
    pub(super) tied: bool,
    /// The groups of parameters that lie next to one another.
    pub(super) adjacent: Vec<Vec<String>>,
}

/// Reads the parameters of `config` from `file`.
pub(super) fn tensors(
    file: &GgufFile,
    config: &ModelConfig,
    options: &LoadOptions,
) -> Result<ModelTensors> {
    let ModelConfig::Llama(llama) = config else {
        return Err(Error::unsupported(
            "general.architecture",
            "another family",
            "models of the Llama family",
        ));
    };
    let arrangement = Arrangement {
        tied: config.tie_word_embeddings(),
        adjacent: config.adjacent(),
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
    let (mut dense, mut quantized) = (Vec::new(), Vec::new());
    for source in sources {
        // Norms, biases and routers are dense, and the expansion of latent vectors, which is multiplied from both sides; a
        // matrix is, unless the file or the options quantize it.
        let matrix = is_matrix(&source.spec) && source.spec.role != ParameterRole::Expansion;
        let scheme = match &options.quantization {
            Some(chosen) if matrix => chosen.scheme_of(&source.spec, arrangement.tied)?,
            _ => None,
        };
        match matrix && (source.is_quantized() || scheme.is_some()) {
            true => quantized.push((source, scheme)),
            false => dense.push(source),
        }
    }
    let all = dense
        .iter()
        .chain(quantized.iter().map(|(source, _)| source));
    let total: u64 = all.map(|source| source.bytes() as u64).sum();
    let mut done = 0;
    let mut report = |bytes: usize| {
        done += bytes as u64;
        if let Some(progress) = &options.progress {
            progress.report(done, total);
        }
    };
    report(0);
    let mut quantized_weights = HashMap::new();
    for (source, scheme) in &quantized {
        let weight = match *scheme {
            None => source.quantized(options.device)?,
            Some(scheme) => {
                let numbers = source.numbers(options.device, Kind::Float)?;
                quantize_parameter(&numbers, &source.spec, scheme)?
            }
        };
        quantized_weights.insert(source.spec.module().to_owned(), weight);
        report(source.bytes());
    }
    let specs: Vec<ParameterSpec> = dense.iter().map(|source| source.spec.clone()).collect();
    let kinds = vec![kind; specs.len()];
    let mut parameters = allocate(specs, &kinds, options.device, &arrangement.adjacent)?;
    for ((_, parameter), source) in parameters.iter_mut().zip(&dense) {
        let numbers = source.numbers(options.device, Kind::Float)?;
        // A gate of one row is a vector in the file.
        parameter.f_copy_(&numbers.f_view_as(parameter)?)?;
        report(source.bytes());
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
    let tensors = matrices.flat_map(|source| &source.tensors);
    let mut kinds = tensors.map(|tensor| tensor.tensor_type().kind());
    match kinds.next() {
        Some(Some(first @ (Kind::Half | Kind::BFloat16)))
            if kinds.all(|kind| kind == Some(first)) =>
        {
            first
        }
        _ => Kind::Float,
    }
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
        // Divisors of another formula than Llama 3.1's are LongRoPE's as well.
        RopeScaling::LongRope(_) if !stored.contains_key("rope_freqs.weight") => {
            &["rope_factors_long.weight", "rope_factors_short.weight"]
        }
        _ => &["rope_freqs.weight"],
    };
    let mut used: BTreeSet<String> = of_rope.iter().map(|name| (*name).to_owned()).collect();
    let mut sources = Vec::new();
    for spec in config.parameters() {
        let places = placements(&spec, llama);
        let is_stored = |place: &&Placement| {
            let mut names = place.tensors.iter();
            names.all(|(name, _)| stored.contains_key(name.as_str()))
        };
        let Some(place) = places.iter().find(is_stored) else {
            let mut usual = places.iter().take(1).flat_map(|place| &place.tensors);
            let missing = usual.find(|(name, _)| !stored.contains_key(name.as_str()));
            let missing = missing.map_or(spec.name, |(name, _)| name.clone());
            problems.missing.push(missing);
            continue;
        };
        let mut tensors = Vec::new();
        for (name, shape) in &place.tensors {
            let Some(whole) = stored.get(name.as_str()) else {
                continue;
            };
            used.insert(name.clone());
            match part_of(whole, place, shape) {
                Ok(tensor) => tensors.push(tensor),
                Err(Some(misshapen)) => problems.misshapen.push(misshapen),
                Err(None) => {}
            }
        }
        if tensors.len() == place.tensors.len() {
            sources.push(Source {
                tensors,
                rows: place.rows.clone(),
                columns: place.columns.clone(),
                form: place.form,
                spec,
            });
        }
    }
    let names = file.tensors().map(|tensor| tensor.name().to_owned());
    let unexpected = names.filter(|name| !used.contains(name) && !is_unread(name, llama));
    problems.unexpected = unexpected.collect();
    if problems.is_empty() {
        return Ok(sources);
    }
    Err(Error::Checkpoint {
        path: file.path().to_path_buf(),
        problems: Box::new(problems),
    })
}

/// Returns the tensor of `shape` that the place is in `whole`: all of it or a slice, which is read in place. An error has
/// the problem, unless it is that of another slice, too.
fn part_of<'a>(
    whole: &GgufTensor<'a>,
    place: &Placement,
    shape: &[i64],
) -> std::result::Result<GgufTensor<'a>, Option<Misshapen>> {
    let misshapen = |expected: Vec<i64>| Misshapen {
        name: whole.name().to_owned(),
        found: whole.shape().to_vec(),
        expected,
    };
    let Some((index, count)) = place.slice else {
        // To llama.cpp, a matrix of one row is a vector; its converter writes gates of shared experts as such matrices.
        let mut tensor = Some(*whole);
        while let Some(matrix) = tensor.filter(|tensor| {
            tensor.shape().len() > shape.len() && tensor.shape().first() == Some(&1)
        }) {
            tensor = matrix.slice(0);
        }
        return tensor
            .filter(|tensor| tensor.shape() == shape)
            .ok_or_else(|| Some(misshapen(shape.to_vec())));
    };
    let stack = [&[count], shape].concat();
    match whole.slice(index).filter(|_| whole.shape() == stack) {
        Some(slice) => Ok(slice),
        // Once for the stack, which is one tensor.
        None => Err((index == 0).then(|| misshapen(stack))),
    }
}
