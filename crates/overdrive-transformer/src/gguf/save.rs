//! Models as GGUF files.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use overdrive_quantization::{GgufTensorInfo, GgufValue, GgufWriter, QuantizedWeight};
use overdrive_sys::engine;
use tch::{Kind, Tensor};

use super::file_type::{GgufFileType, Mixture};
use super::metadata::metadata;
use super::names::{gguf_name, gguf_shape, stored_rows};
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

/// A tensor of the file, and the parameters that lie in it: one, or the matrices of all experts.
struct Planned {
    info: GgufTensorInfo,
    parts: Vec<ParameterSpec>,
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
            return Err(crate::Error::Unsupported {
                key: "adapter".to_owned(),
                found: name.clone(),
                supported: "none; merge it into the weights first (`merge_and_unload`)".to_owned(),
            });
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
                writer.write(&stored.f_reshape(gguf_shape(part))?)?;
                report(part.numel());
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
        let name = gguf_name(&spec.name, config).ok_or_else(|| {
            overdrive_core::Error::internal(format!("`{}` has no name in GGUF files", spec.name))
        })?;
        if let Some(&index) = stacks.get(&name) {
            let stack: &mut Planned = &mut planned[index];
            stack.info.shape[0] += 1;
            stack.parts.push(spec);
            continue;
        }
        let mut shape = gguf_shape(&spec);
        if crate::moe::expert_of(spec.module()).is_some() {
            shape.insert(0, 1);
            stacks.insert(name.clone(), planned.len());
        }
        let tensor_type = file_type.type_of(&name, &shape, mixture);
        planned.push(Planned {
            info: GgufTensorInfo {
                name,
                shape,
                tensor_type,
            },
            parts: vec![spec],
        });
    }
    Ok(planned)
}

/// The weights of a model by name.
struct Weights {
    dense: HashMap<String, Tensor>,
    quantized: HashMap<String, QuantizedWeight>,
}

impl Weights {
    fn of(model: &CausalLm) -> Weights {
        let mut quantized = HashMap::new();
        model.for_each_quantized(&mut |name, weight| {
            quantized.insert(name.to_owned(), weight.shallow_clone());
        });
        Weights {
            dense: model.named_parameters().into_iter().collect(),
            quantized,
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
        if let ModelConfig::Llama(config) = config {
            if config.norm_adds_one() && spec.name.ends_with("norm.weight") {
                // llama.cpp stores what these norms multiply by, transformers what they add to one.
                weight = weight.f_add_scalar(1.0)?;
            }
            if let Some(rows) = stored_rows(&spec.name, config) {
                let rows = Tensor::f_from_slice(&rows)?.f_to_device(weight.device())?;
                weight = weight.f_index_select(0, &rows)?;
            }
        }
        Ok(weight)
    }
}
