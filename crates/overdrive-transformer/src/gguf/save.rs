//! Models as GGUF files.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use overdrive_quantization::{GgufTensorInfo, GgufValue, GgufWriter, QuantizedWeight};
use overdrive_sys::engine;
use tch::{Kind, Tensor};

use super::file_type::{GgufFileType, Mixture};
use super::metadata::metadata;
use super::names::{gguf_name, gguf_shape};
use super::placement::{inverse, placements};
use crate::checkpoint::CheckpointConfig;
use crate::model_parts::ModelParts;
use crate::parameters::{ParameterRole, ParameterSpec};
use crate::{CausalLm, LoadProgress, ModelConfig, Result};

/// The options of [`CausalLm::save_gguf`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct GgufOptions {
    /// The type of the matrices.
    pub file_type: GgufFileType,
    /// Metadata besides those of the configuration: the name, the tokenizer, the chat template.
    pub metadata: BTreeMap<String, GgufValue>,
    /// Receives the bytes that have been written, and their total. Default: nothing.
    pub progress: Option<LoadProgress>,
}

impl GgufOptions {
    /// Returns the options for a type, without metadata.
    pub fn new(file_type: GgufFileType) -> GgufOptions {
        GgufOptions {
            file_type,
            metadata: BTreeMap::new(),
            progress: None,
        }
    }
}

/// A tensor of the file, and the parameters that lie in it: one, some rows of one, or the matrices of all experts.
struct Planned {
    info: GgufTensorInfo,
    parts: Vec<ParameterSpec>,
    /// The shape of a part in the file.
    shape: Vec<i64>,
    /// The first stored row of the part.
    first: i64,
}

impl CausalLm {
    /// Writes the model as a GGUF file, as llama.cpp's `convert_hf_to_gguf.py` and `llama-quantize` do. The file gets its
    /// name when it is complete; in memory is one matrix at a time besides the model. Quantized weights are dequantized
    /// one by one.
    ///
    /// A file without a tokenizer is one for other programs to complete: `export_gguf` of overdrive-generation writes a
    /// whole model.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) for an option of the configuration that llama.cpp does not have,
    /// and for a model with adapters; [`Error::Quantization`](crate::Error::Quantization) for elements that are not finite,
    /// and if the file cannot be written.
    pub fn save_gguf(&self, path: impl AsRef<Path>, options: &GgufOptions) -> Result<()> {
        if let Some(name) = self.adapter_names().first() {
            return Err(crate::Error::unsupported(
                "adapter",
                name,
                "none; merge it into the weights first (`merge_and_unload`)",
            ));
        }
        let config = self.config();
        let mut own = metadata(config)?;
        let text = |text: &str| GgufValue::String(text.to_owned());
        own.values.insert("general.type".to_owned(), text("model"));
        own.values.insert(
            "general.file_type".to_owned(),
            GgufValue::U32(options.file_type.id()),
        );
        own.values.extend(options.metadata.clone());
        let planned = plan(config, options.file_type)?;
        let mut infos: Vec<GgufTensorInfo> =
            planned.iter().map(|tensor| tensor.info.clone()).collect();
        infos.extend(own.rope.iter().map(|(name, divisors)| GgufTensorInfo {
            name: (*name).to_owned(),
            shape: vec![divisors.len() as i64],
            tensor_type: overdrive_quantization::GgufType::F32,
        }));
        let mut writer = GgufWriter::create(path, &own.values, infos)?;
        let weights = Weights::of(self);
        let total: i64 = planned
            .iter()
            .flat_map(|tensor| &tensor.parts)
            .map(ParameterSpec::numel)
            .sum();
        let mut done = 0;
        let mut report = |elements: i64| {
            done += elements;
            if let Some(progress) = &options.progress {
                progress.report(done.unsigned_abs() * 4, total.unsigned_abs() * 4);
            }
        };
        report(0);
        // Trained parameters would build a graph.
        let _no_grad = engine::GradMode::new(false);
        for tensor in &planned {
            for part in &tensor.parts {
                let stored = weights.stored(part, config)?;
                let stored = match tensor.shape.first() {
                    Some(&rows) if rows < stored.size()[0] => {
                        stored.f_narrow(0, tensor.first, rows)?
                    }
                    _ => stored,
                };
                writer.write(&stored.f_reshape(tensor.shape.as_slice())?)?;
                report(tensor.shape.iter().product());
            }
        }
        for (_, divisors) in &own.rope {
            writer.write(&Tensor::f_from_slice(divisors)?)?;
        }
        Ok(writer.finish()?)
    }
}

/// Assigns every parameter to a tensor of the file.
fn plan(config: &ModelConfig, file_type: GgufFileType) -> Result<Vec<Planned>> {
    let experts = match config {
        ModelConfig::Llama(config) => config
            .experts
            .as_ref()
            .map_or(0, |experts| experts.num_experts),
        ModelConfig::Gpt2(_) => 0,
    };
    let mixture = Mixture {
        layers: usize::try_from(config.layers().1).unwrap_or(0),
        experts,
        tied: config.tie_word_embeddings(),
    };
    let mut planned: Vec<Planned> = Vec::new();
    let mut stacks: HashMap<String, usize> = HashMap::new();
    for spec in config.parameters() {
        let mut first = 0;
        for (name, shape) in stored_tensors(&spec, config)? {
            if let Some(&index) = stacks.get(&name) {
                let stack: &mut Planned = &mut planned[index];
                stack.info.shape[0] += 1;
                stack.parts.push(spec.clone());
                continue;
            }
            let mut whole = shape.clone();
            if crate::moe::expert_of(spec.module()).is_some() {
                whole.insert(0, 1);
                stacks.insert(name.clone(), planned.len());
            }
            let tensor_type = file_type.type_of(&name, &whole, mixture);
            let rows = shape.first().copied().unwrap_or(0);
            planned.push(Planned {
                info: GgufTensorInfo {
                    name,
                    shape: whole,
                    tensor_type,
                },
                parts: vec![spec.clone()],
                shape,
                first,
            });
            first += rows;
        }
    }
    Ok(planned)
}

/// Returns the tensors that hold a parameter, one behind the other, with their shapes.
fn stored_tensors(spec: &ParameterSpec, config: &ModelConfig) -> Result<Vec<(String, Vec<i64>)>> {
    let place = match config {
        ModelConfig::Llama(config) => placements(spec, config).into_iter().next(),
        ModelConfig::Gpt2(_) => None,
    };
    if let Some(place) = place {
        return Ok(place.tensors);
    }
    let name = gguf_name(&spec.name, config).ok_or_else(|| {
        overdrive_core::Error::internal(format!("`{}` has no name in GGUF files", spec.name))
    })?;
    Ok(vec![(name, gguf_shape(spec))])
}

/// The weights of a model by name.
struct Weights {
    dense: HashMap<String, Tensor>,
    quantized: HashMap<String, QuantizedWeight>,
}

impl Weights {
    fn of(model: &CausalLm) -> Weights {
        Weights {
            dense: model.named_parameters().into_iter().collect(),
            quantized: model.quantized_weights(),
        }
    }

    /// Returns a parameter in fp32 as llama.cpp stores it.
    fn stored(&self, spec: &ParameterSpec, config: &ModelConfig) -> Result<Tensor> {
        let mut weight = match (
            self.dense.get(&spec.name),
            self.quantized.get(spec.module()),
        ) {
            (Some(dense), _) => {
                let dense = dense.f_to_kind(Kind::Float)?;
                match spec.role {
                    ParameterRole::Conv1d => dense.f_transpose(0, 1)?,
                    _ => dense,
                }
            }
            // A quantized weight is `(O, I)` whatever its role.
            (None, Some(quantized)) => quantized.dequantize(Kind::Float)?,
            (None, None) => {
                return Err(
                    overdrive_core::Error::internal(format!("no weight `{}`", spec.name)).into(),
                );
            }
        };
        if let ModelConfig::Llama(config) = config
            && let Some(place) = placements(spec, config).into_iter().next()
        {
            weight = place.form.written(weight)?;
            for (dimension, order) in [(0, place.rows), (1, place.columns)] {
                if let Some(order) = order {
                    let order = Tensor::f_from_slice(&inverse(&order))?;
                    let order = order.f_to_device(weight.device())?;
                    weight = weight.f_index_select(dimension, &order)?;
                }
            }
        }
        Ok(weight)
    }
}
