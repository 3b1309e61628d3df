use serde::{Deserialize, Serialize};
use serde_json::Value;
use tch::{Kind, Tensor};

use super::awq::AwqConfig;
use super::bitsandbytes::BitsAndBytesConfig;
use super::compressed_tensors::CompressedTensorsConfig;
use super::fp8::Fp8Config;
use super::gptq::GptqConfig;
use super::modelopt::ModelOptConfig;
use super::module_patterns::{any, covers_module, skips_module};
use super::mxfp4::Mxfp4Config;
use super::source::{Module, TensorSource};
use crate::{Error, GroupOptions, QuantizedWeight, Result, Scheme};

/// The layout of the quantized weights of a model: the object `quantization_config` of `config.json`.
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
#[serde(try_from = "Value", tag = "quant_method")]
#[non_exhaustive]
pub enum QuantizationConfig {
    /// The layouts of bitsandbytes: NF4, FP4 and LLM.int8.
    #[serde(rename = "bitsandbytes")]
    BitsAndBytes(BitsAndBytesConfig),
    /// The layouts of compressed-tensors: 8 bits by row, groups, and floats of 8 and 4 bits.
    #[serde(rename = "compressed-tensors")]
    CompressedTensors(CompressedTensorsConfig),
    /// Groups of integers, as GPTQ writes them.
    #[serde(rename = "gptq")]
    Gptq(GptqConfig),
    /// Groups of integers, as AWQ writes them.
    #[serde(rename = "awq")]
    Awq(AwqConfig),
    /// Experts in MXFP4, as gpt-oss is published.
    #[serde(rename = "mxfp4")]
    Mxfp4(Mxfp4Config),
    /// 8-bit floats with one scale for each weight or row, as Ministral 3 is published, or for each block, as DeepSeek-V3
    /// is.
    #[serde(rename = "fp8")]
    Fp8(Fp8Config),
    /// 8-bit floats with one scale for each weight or row, and NVFP4, as NVIDIA's ModelOpt writes them.
    #[serde(rename = "modelopt")]
    ModelOpt(ModelOptConfig),
}

impl QuantizationConfig {
    /// Returns the layout in which [`write_weight`](QuantizationConfig::write_weight) writes weights of this
    /// scheme: bitsandbytes for NF4, FP4 and LLM.int8, the layout of DeepSeek-V3 for FP8 by blocks, compressed-tensors
    /// for the others. `not_quantized` lists the linear layers that stay dense, such as `lm_head`.
    pub fn for_scheme(scheme: Scheme, not_quantized: Vec<String>) -> QuantizationConfig {
        if let Some(config) = Fp8Config::of(scheme, not_quantized.clone()) {
            return QuantizationConfig::Fp8(config);
        }
        match CompressedTensorsConfig::of(scheme, not_quantized.clone()) {
            Some(config) => QuantizationConfig::CompressedTensors(config),
            None => QuantizationConfig::BitsAndBytes(
                BitsAndBytesConfig::of(scheme, not_quantized).unwrap_or_default(),
            ),
        }
    }

    /// Reads the JSON object.
    ///
    /// # Errors
    /// [`Error::Common`] for an unknown method and for invalid keys.
    pub fn from_json(value: &Value) -> Result<QuantizationConfig> {
        let method = match value.get("quant_method").and_then(Value::as_str) {
            Some(method) => method,
            // Old versions of transformers did not write the method, since there was only this one.
            None if value
                .get("load_in_4bit")
                .or(value.get("load_in_8bit"))
                .is_some() =>
            {
                "bitsandbytes"
            }
            None => "",
        };
        let mut object = value.clone();
        if let Some(object) = object.as_object_mut() {
            // Removed, since the structs collect unknown keys in `other` and would write it twice.
            object.shift_remove("quant_method");
        }
        let config = match method {
            "bitsandbytes" => QuantizationConfig::BitsAndBytes(parsed(object)?),
            "compressed-tensors" => QuantizationConfig::CompressedTensors(parsed(object)?),
            "gptq" => QuantizationConfig::Gptq(parsed(object)?),
            "awq" => QuantizationConfig::Awq(parsed(object)?),
            "mxfp4" => QuantizationConfig::Mxfp4(parsed(object)?),
            "fp8" => QuantizationConfig::Fp8(parsed(object)?),
            // The same tensors as AutoFP8's; the bound of the scales of activations belongs to them.
            "fbgemm_fp8" => {
                if let Some(object) = object.as_object_mut() {
                    object.shift_remove("activation_scale_ub");
                }
                QuantizationConfig::Fp8(parsed(object)?)
            }
            "modelopt" => QuantizationConfig::ModelOpt(parsed(object)?),
            other => {
                let found = match other {
                    "" => "absent".to_owned(),
                    other => format!("`{other}`"),
                };
                let expected = "one of bitsandbytes, compressed-tensors, gptq, awq, mxfp4, fp8, modelopt; use a copy of \
                                the model in bf16";
                return Err(Error::option(
                    "quantization_config.quant_method",
                    found,
                    expected,
                ));
            }
        };
        match &config {
            QuantizationConfig::BitsAndBytes(config) => config.validate()?,
            QuantizationConfig::CompressedTensors(config) => config.validate()?,
            QuantizationConfig::Gptq(config) => config.validate()?,
            QuantizationConfig::Awq(config) => config.validate()?,
            QuantizationConfig::Mxfp4(_) => {}
            QuantizationConfig::Fp8(config) => config.validate()?,
            QuantizationConfig::ModelOpt(config) => config.validate()?,
        }
        Ok(config)
    }

    /// Returns the JSON object.
    ///
    /// # Errors
    /// [`Error::Common`] if serialization fails, which no value of these layouts causes.
    pub fn to_json(&self) -> Result<Value> {
        serde_json::to_value(self).map_err(|error| not_an_object(&error))
    }

    /// Returns the `quant_method`.
    pub fn method(&self) -> &'static str {
        match self {
            QuantizationConfig::BitsAndBytes(_) => "bitsandbytes",
            QuantizationConfig::CompressedTensors(_) => "compressed-tensors",
            QuantizationConfig::Gptq(_) => "gptq",
            QuantizationConfig::Awq(_) => "awq",
            QuantizationConfig::Mxfp4(_) => "mxfp4",
            QuantizationConfig::Fp8(_) => "fp8",
            QuantizationConfig::ModelOpt(_) => "modelopt",
        }
    }

    /// Returns the scheme of the weights; if modules differ, that of the first group. The exact scheme of each
    /// weight is in the file: see [`QuantizedWeight::scheme`] of a weight that was read.
    ///
    /// # Errors
    /// [`Error::Common`] for `config_groups` that do not parse.
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
            QuantizationConfig::Mxfp4(_) => Some(Scheme::Mxfp4),
            QuantizationConfig::Fp8(config) => Some(config.scheme()),
            QuantizationConfig::ModelOpt(config) => config.scheme(),
        })
    }

    /// Returns `true` if the linear layer `module` is not on the list of exceptions. bitsandbytes and GPTQ
    /// exclude the output head by default. [`is_stored`](QuantizationConfig::is_stored) checks the file
    /// instead.
    ///
    /// # Errors
    /// [`Error::Common`] for patterns that are not regular expressions.
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
            QuantizationConfig::Mxfp4(config) => {
                let skip = config.modules_to_not_convert.as_deref().unwrap_or_default();
                is_head() || any(skip, module, skips_module)?
            }
            QuantizationConfig::Fp8(config) => {
                is_head() || any(config.not_quantized(), module, skips_module)?
            }
            QuantizationConfig::ModelOpt(config) => any(&config.ignore, module, covers_module)?,
        };
        Ok(!skipped)
    }

    /// Returns `true` if `source` has a quantized weight of this module, by the names and dtypes of its tensors.
    /// No tensor is read.
    ///
    /// # Errors
    /// An error of the source.
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
            QuantizationConfig::Mxfp4(_) => Mxfp4Config::is_stored(module),
            QuantizationConfig::Fp8(_) => Fp8Config::is_stored(module),
            QuantizationConfig::ModelOpt(_) => ModelOptConfig::is_stored(module),
        }
    }

    /// Reads the weight of the module (`model.layers.0.mlp.up_proj`, without `.weight`) to the CPU.
    ///
    /// # Errors
    /// [`Error::BadWeight`] for a weight that is missing or damaged, or does not match the configuration or its own
    /// description.
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
            QuantizationConfig::Mxfp4(_) => Mxfp4Config::read(module),
            QuantizationConfig::Fp8(config) => config.read(module),
            QuantizationConfig::ModelOpt(_) => ModelOptConfig::read(module),
        }
    }

    /// Returns the tensors of a weight with their names in a file. Codes share the memory of the weight if the
    /// layout has the same codes.
    ///
    /// # Errors
    /// [`Error::Common`] for a weight that the layout does not support, and for GPTQ, AWQ, ModelOpt and FP8 with one scale
    /// for each weight or row, which cannot be written; [`Error::BadWeight`] for zero points that are not integers (some weights from
    /// GGUF files).
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
            QuantizationConfig::Mxfp4(_) => Mxfp4Config::write(weight, module),
            QuantizationConfig::Fp8(config) => config.write(weight, module),
            _ => {
                let expected = "bitsandbytes, compressed-tensors, mxfp4 or fp8 for writing";
                let option = "quantization_config.quant_method";
                Err(Error::option(option, self.method(), expected))
            }
        }
    }

    /// Returns the names of the static scales that a file may have for the activations of this module and for
    /// the queries, keys and values of its attention layer. They are not used: activations are quantized
    /// dynamically for each token, and caches according to their own options.
    pub fn static_scale_names(&self, module: &str) -> Vec<String> {
        let of = |module: &str, parts: &[&str]| -> Vec<String> {
            parts
                .iter()
                .map(|part| format!("{module}.{part}"))
                .collect()
        };
        let (of_module, of_attention) = match self {
            QuantizationConfig::CompressedTensors(_) => (
                CompressedTensorsConfig::STATIC_ACTIVATIONS,
                CompressedTensorsConfig::STATIC_ATTENTION,
            ),
            QuantizationConfig::Fp8(_) => {
                (Fp8Config::STATIC_ACTIVATIONS, Fp8Config::STATIC_ATTENTION)
            }
            QuantizationConfig::ModelOpt(_) => (ModelOptConfig::STATIC, &[][..]),
            _ => return Vec::new(),
        };
        let mut names = of(module, of_module);
        if let Some((attention, _)) = module.rsplit_once('.') {
            names.extend(of(attention, of_attention));
        }
        names
    }

    /// Returns the configuration for writing weights that were read with this one: without the static scales, which are
    /// not read, and for compressed-tensors with a scale for each row where a weight had one for all of them.
    pub fn for_writing(self) -> QuantizationConfig {
        match self {
            QuantizationConfig::CompressedTensors(config) => {
                QuantizationConfig::CompressedTensors(config.for_writing())
            }
            QuantizationConfig::Fp8(config) => {
                QuantizationConfig::Fp8(config.without_static_scales())
            }
            other => other,
        }
    }

    /// Returns the layout of compressed-tensors for weights that were read in groups with this one, which cannot be
    /// written: GPTQ and AWQ. `None` for other layouts. Its groups are those of the file, although the weights have
    /// smaller ones of equal scales where a size is not supported. `symmetric` if no weight has zero points.
    pub fn regrouped(
        &self,
        symmetric: bool,
        not_quantized: Vec<String>,
    ) -> Option<QuantizationConfig> {
        let (bits, size) = match self {
            QuantizationConfig::Gptq(config) => (config.bits, config.group_size),
            QuantizationConfig::Awq(config) => (config.bits, config.group_size),
            _ => return None,
        };
        CompressedTensorsConfig::of_groups(bits, size, symmetric, not_quantized)
            .map(QuantizationConfig::CompressedTensors)
    }

    /// Returns the configuration for the same modules under other names, such as those of the text model in the folder of
    /// a multimodal model: `names` has the name of each module in the lists of this configuration, and its new name.
    ///
    /// An entry of compressed-tensors' `targets` and `ignore` that matches the same modules by both names stays as it is;
    /// another one is replaced by the new names of the modules that it matches. The lists of other layouts stay as they
    /// are: a file says itself which of its weights are quantized.
    ///
    /// # Errors
    /// [`Error::Common`] for patterns that are not regular expressions.
    pub fn renamed(self, names: &[(String, String)]) -> Result<QuantizationConfig> {
        match self {
            QuantizationConfig::CompressedTensors(config) => Ok(
                QuantizationConfig::CompressedTensors(config.renamed(names)?),
            ),
            other => Ok(other),
        }
    }

    /// Returns the names of all tensors that a file may have for the weight of this module; a file has some of
    /// them. `{module}.weight` may also be a dense weight.
    pub fn tensor_names(&self, module: &str) -> Vec<String> {
        let parts = match self {
            QuantizationConfig::BitsAndBytes(_) => BitsAndBytesConfig::PARTS,
            QuantizationConfig::CompressedTensors(_) => CompressedTensorsConfig::PARTS,
            QuantizationConfig::Gptq(_) => GptqConfig::PARTS,
            QuantizationConfig::Awq(_) => AwqConfig::PARTS,
            QuantizationConfig::Mxfp4(_) => Mxfp4Config::PARTS,
            QuantizationConfig::Fp8(_) => Fp8Config::PARTS,
            QuantizationConfig::ModelOpt(_) => ModelOptConfig::PARTS,
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
    let expected = "an object with the keys of its `quant_method`";
    Error::option(
        "quantization_config",
        format!("invalid ({error})"),
        expected,
    )
}

impl TryFrom<Value> for QuantizationConfig {
    type Error = Error;

    fn try_from(value: Value) -> Result<QuantizationConfig> {
        QuantizationConfig::from_json(&value)
    }
}
