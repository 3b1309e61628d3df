use serde::{Deserialize, Serialize};
use serde_json::Value;
use tch::{Kind, Tensor};

use super::awq::AwqConfig;
use super::bitsandbytes::BitsAndBytesConfig;
use super::compressed_tensors::CompressedTensorsConfig;
use super::gptq::GptqConfig;
use super::module::{Module, TensorSource};
use super::patterns::{any, skips_module};
use crate::{Error, GroupOptions, QuantizedWeight, Result, Scheme};

/// How the weights of a model are kept in its files: the object `quantization_config` of `config.json`.
///
/// ```
/// use overdrive_quantization::{QuantizationConfig, QuantizedWeight, Scheme};
/// use overdrive_safetensors::{MappedFile, write};
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let scheme: Scheme = "nf4".parse()?;
/// let config = QuantizationConfig::for_scheme(scheme, vec!["lm_head".to_owned()]);
/// assert_eq!(config.to_json()?["quant_method"], "bitsandbytes");
///
/// let weight = Tensor::randn([64, 128], (Kind::Float, Device::Cpu));
/// let quantized = QuantizedWeight::quantize(&weight, scheme)?;
/// let path = std::env::temp_dir().join(format!("overdrive-nf4-{}.safetensors", std::process::id()));
/// write(&path, &config.write_weight(&quantized, "mlp.up_proj")?, &Default::default())?;
///
/// let back = config.read_weight(&MappedFile::open(&path)?, "mlp.up_proj")?;
/// assert_eq!(back.dequantize(Kind::Float)?, quantized.dequantize(Kind::Float)?);
/// # std::fs::remove_file(path)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Value", into = "Value")]
#[non_exhaustive]
pub enum QuantizationConfig {
    /// NF4, FP4 and LLM.int8.
    BitsAndBytes(BitsAndBytesConfig),
    /// Bytes by row, groups and 8-bit floats.
    CompressedTensors(CompressedTensorsConfig),
    /// Groups, found with second derivatives.
    Gptq(GptqConfig),
    /// Groups, scaled by activations.
    Awq(AwqConfig),
}

/// The names of `quant_method`.
const METHODS: [&str; 4] = ["bitsandbytes", "compressed-tensors", "gptq", "awq"];

impl QuantizationConfig {
    /// What [`write_weight`](QuantizationConfig::write_weight) needs for weights of this scheme: that of
    /// bitsandbytes for NF4, FP4 and LLM.int8, and of compressed-tensors for the others. `not_quantized`:
    /// the linear maps that are kept in full, by name, such as `lm_head`.
    pub fn for_scheme(scheme: Scheme, not_quantized: Vec<String>) -> QuantizationConfig {
        match CompressedTensorsConfig::of(scheme, not_quantized.clone()) {
            Some(config) => QuantizationConfig::CompressedTensors(config),
            None => QuantizationConfig::BitsAndBytes(
                BitsAndBytesConfig::of(scheme, not_quantized).unwrap_or_default(),
            ),
        }
    }

    /// Reads the object.
    ///
    /// # Errors
    /// [`Error::BadOption`] for a method that is not known and keys that do not fit it.
    pub fn from_json(value: &Value) -> Result<QuantizationConfig> {
        let method = match value.get("quant_method").and_then(Value::as_str) {
            Some(method) => method,
            // What transformers wrote before there were other methods.
            None if value
                .get("load_in_4bit")
                .or(value.get("load_in_8bit"))
                .is_some() =>
            {
                METHODS[0]
            }
            None => "",
        };
        let mut object = value.clone();
        if let Some(object) = object.as_object_mut() {
            object.shift_remove("quant_method");
        }
        let config = match method {
            "bitsandbytes" => QuantizationConfig::BitsAndBytes(parsed(object)?),
            "compressed-tensors" => QuantizationConfig::CompressedTensors(parsed(object)?),
            "gptq" => QuantizationConfig::Gptq(parsed(object)?),
            "awq" => QuantizationConfig::Awq(parsed(object)?),
            other => {
                return Err(Error::BadOption {
                    option: "quantization_config.quant_method",
                    found: match other {
                        "" => "absent".to_owned(),
                        other => format!("`{other}`"),
                    },
                    expected: format!("one of {}", METHODS.join(", ")),
                });
            }
        };
        match &config {
            QuantizationConfig::BitsAndBytes(config) => config.validate()?,
            QuantizationConfig::CompressedTensors(config) => config.validate()?,
            QuantizationConfig::Gptq(config) => config.validate()?,
            QuantizationConfig::Awq(config) => config.validate()?,
        }
        Ok(config)
    }

    /// The object.
    ///
    /// # Errors
    /// [`Error::BadOption`] for what JSON does not have, such as a threshold that is infinite.
    pub fn to_json(&self) -> Result<Value> {
        let value = match self {
            QuantizationConfig::BitsAndBytes(config) => serde_json::to_value(config),
            QuantizationConfig::CompressedTensors(config) => serde_json::to_value(config),
            QuantizationConfig::Gptq(config) => serde_json::to_value(config),
            QuantizationConfig::Awq(config) => serde_json::to_value(config),
        };
        let mut value = value.map_err(|error| not_an_object(&error))?;
        if let Some(object) = value.as_object_mut() {
            object.shift_insert(0, "quant_method".to_owned(), self.method().into());
        }
        Ok(value)
    }

    /// The `quant_method`.
    pub fn method(&self) -> &'static str {
        match self {
            QuantizationConfig::BitsAndBytes(_) => METHODS[0],
            QuantizationConfig::CompressedTensors(_) => METHODS[1],
            QuantizationConfig::Gptq(_) => METHODS[2],
            QuantizationConfig::Awq(_) => METHODS[3],
        }
    }

    /// What weights are quantized to; where modules differ, the first of them. A file's own word on a
    /// weight counts more: see [`QuantizedWeight::scheme`] of what is read.
    ///
    /// # Errors
    /// [`Error::BadOption`] for groups that are none.
    pub fn scheme(&self) -> Result<Option<Scheme>> {
        Ok(match self {
            QuantizationConfig::BitsAndBytes(config) => Some(config.scheme()),
            QuantizationConfig::CompressedTensors(config) => config.scheme(None)?,
            QuantizationConfig::Gptq(config) => {
                Some(grouped(config.bits, config.group_size, config.sym))
            }
            QuantizationConfig::Awq(config) => {
                Some(grouped(config.bits, config.group_size, !config.zero_point))
            }
        })
    }

    /// Whether the linear map of this name is quantized, as far as the lists of exceptions say. Those of
    /// bitsandbytes and GPTQ leave the head out unless they say otherwise. Whether a file really has it
    /// quantized says [`is_stored`](QuantizationConfig::is_stored).
    ///
    /// # Errors
    /// [`Error::BadOption`] for patterns that are none.
    pub fn is_quantized(&self, module: &str) -> Result<bool> {
        let is_head = || module == "lm_head" || module.ends_with(".lm_head");
        let skipped = match self {
            QuantizationConfig::BitsAndBytes(config) => match &config.llm_int8_skip_modules {
                Some(skip) => any(skip, module, skips_module)?,
                None => is_head(),
            },
            QuantizationConfig::CompressedTensors(config) => config.scheme(Some(module))?.is_none(),
            QuantizationConfig::Gptq(config) => !config.lm_head && is_head(),
            QuantizationConfig::Awq(config) => {
                let skip = config.modules_to_not_convert.as_deref().unwrap_or_default();
                is_head() || any(skip, module, |entry, module| Ok(module.contains(entry)))?
            }
        };
        Ok(!skipped)
    }

    /// Whether `source` has the weight of this module quantized, by its tensors' names and kinds. This is
    /// cheap: nothing is read.
    ///
    /// # Errors
    /// Errors of the source.
    pub fn is_stored(&self, source: &dyn TensorSource, module: &str) -> Result<bool> {
        let module = Module {
            source,
            name: module,
        };
        match self {
            QuantizationConfig::BitsAndBytes(_) => BitsAndBytesConfig::is_stored(module),
            QuantizationConfig::CompressedTensors(_) => CompressedTensorsConfig::is_stored(module),
            QuantizationConfig::Gptq(_) => GptqConfig::is_stored(module),
            QuantizationConfig::Awq(_) => AwqConfig::is_stored(module),
        }
    }

    /// The weight of the module (`model.layers.0.mlp.up_proj`, without `.weight`), on the CPU.
    ///
    /// # Errors
    /// [`Error::BadWeight`] for a weight that is not there, damaged, or not what the configuration or its
    /// own description says.
    pub fn read_weight(&self, source: &dyn TensorSource, module: &str) -> Result<QuantizedWeight> {
        let module = Module {
            source,
            name: module,
        };
        match self {
            QuantizationConfig::BitsAndBytes(config) => config.read(module),
            QuantizationConfig::CompressedTensors(config) => config.read(module),
            QuantizationConfig::Gptq(config) => config.read(module),
            QuantizationConfig::Awq(config) => config.read(module),
        }
    }

    /// The tensors of a weight, by the names that they have in a file. Codes share the weight's memory
    /// where the file has them as they are.
    ///
    /// # Errors
    /// [`Error::BadOption`] for a weight that the layout does not hold, and for GPTQ and AWQ, which are
    /// only read; [`Error::BadWeight`] for zero points that are no integers (some of GGUF's).
    pub fn write_weight(
        &self,
        weight: &QuantizedWeight,
        module: &str,
    ) -> Result<Vec<(String, Tensor)>> {
        match self {
            QuantizationConfig::BitsAndBytes(config) => {
                let kind = match config.bnb_4bit_compute_dtype.as_deref() {
                    Some("bfloat16") => Kind::BFloat16,
                    Some("float16") => Kind::Half,
                    _ => Kind::Float,
                };
                config.write(weight, module, kind)
            }
            QuantizationConfig::CompressedTensors(config) => config.write(weight, module),
            _ => Err(Error::BadOption {
                option: "quantization_config.quant_method",
                found: format!("{}, to write", self.method()),
                expected: "bitsandbytes or compressed-tensors; others are read only".to_owned(),
            }),
        }
    }

    /// The names of all tensors that a file may have for the weight of this module; a file has some of
    /// them. `{module}.weight` may also be one that is not quantized.
    pub fn tensor_names(&self, module: &str) -> Vec<String> {
        let parts = match self {
            QuantizationConfig::BitsAndBytes(_) => BitsAndBytesConfig::PARTS,
            QuantizationConfig::CompressedTensors(_) => CompressedTensorsConfig::PARTS,
            QuantizationConfig::Gptq(_) => GptqConfig::PARTS,
            QuantizationConfig::Awq(_) => AwqConfig::PARTS,
        };
        parts
            .iter()
            .map(|part| format!("{module}.{part}"))
            .collect()
    }
}

fn grouped(bits: u8, group_size: i64, symmetric: bool) -> Scheme {
    Scheme::Grouped(GroupOptions {
        bits,
        group_size: usize::try_from(group_size).unwrap_or(GroupOptions::default().group_size),
        symmetric,
    })
}

fn parsed<T: serde::de::DeserializeOwned>(object: Value) -> Result<T> {
    serde_json::from_value(object).map_err(|error| not_an_object(&error))
}

fn not_an_object(error: &serde_json::Error) -> Error {
    Error::BadOption {
        option: "quantization_config",
        found: error.to_string(),
        expected: "the keys of its quant_method".to_owned(),
    }
}

impl TryFrom<Value> for QuantizationConfig {
    type Error = Error;

    fn try_from(value: Value) -> Result<QuantizationConfig> {
        QuantizationConfig::from_json(&value)
    }
}

impl From<QuantizationConfig> for Value {
    fn from(config: QuantizationConfig) -> Value {
        config.to_json().unwrap_or_default()
    }
}
