//! Quantized weights in files, in the layouts of the Python libraries.
//!
//! [`QuantizationConfig`] is the object `quantization_config` of a model's `config.json`, which describes the
//! tensors of each weight. The layouts by `quant_method`:
//!
//! | `quant_method` | weights | read | written |
//! |---|---|---|---|
//! | `bitsandbytes` | NF4 and FP4 with or without double quantization; 8 bits by row (LLM.int8) | yes | yes |
//! | `compressed-tensors` | 8 bits by row, groups of 4 and 8 bits, 8-bit floats | yes | yes |
//! | `gptq` | groups of 4 and 8 bits, also reordered (`desc_act`) | yes | no |
//! | `awq` | groups of 4 bits (`gemm`) | yes | no |
//! | `mxfp4` | 4-bit floats in blocks of 32, the experts of gpt-oss | yes | yes |
//! | `fp8` | 8-bit floats with one scale for each block, DeepSeek-V3 | yes | yes |
//! | `fp8`, `fbgemm_fp8` | 8-bit floats with one scale for each weight or row, Ministral 3, AutoFP8 | yes | no |
//! | `modelopt` | 8-bit floats with one scale for each weight or row, and NVFP4 | yes | no |

mod awq;
mod bitsandbytes;
mod compressed_tensors;
mod config;
mod fp8;
mod gptq;
mod modelopt;
mod module_patterns;
mod mxfp4;
mod packed_words;
mod source;

pub use awq::AwqConfig;
pub use bitsandbytes::BitsAndBytesConfig;
pub use compressed_tensors::{CompressedTensorsConfig, ConfigGroup, QuantizationArgs};
pub use config::QuantizationConfig;
pub use fp8::Fp8Config;
pub use gptq::GptqConfig;
pub use modelopt::ModelOptConfig;
pub use module_patterns::skips_modules;
pub use mxfp4::Mxfp4Config;
pub use source::TensorSource;
