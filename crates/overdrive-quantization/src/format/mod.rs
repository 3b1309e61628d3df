//! Quantized weights in files, in the layouts of the Python world.
//!
//! [`QuantizationConfig`] is the object `quantization_config` of a model's `config.json`: it says how a
//! file's tensors make a weight. Layouts by its `quant_method`:
//!
//! | `quant_method` | what is in it | read | written |
//! |---|---|---|---|
//! | `bitsandbytes` | NF4 and FP4 with or without double quantization; bytes by row (LLM.int8) | yes | yes |
//! | `compressed-tensors` | bytes by row, groups of 4 and 8 bits, 8-bit floats | yes | yes |
//! | `gptq` | groups of 4 and 8 bits, reordered ones (`desc_act`) too | yes | no |
//! | `awq` | groups of 4 bits (`gemm`) | yes | no |

mod awq;
mod bitsandbytes;
mod compressed_tensors;
mod config;
mod gptq;
mod module;
mod patterns;
mod words;

pub use awq::AwqConfig;
pub use bitsandbytes::BitsAndBytesConfig;
pub use compressed_tensors::{CompressedTensorsConfig, ConfigGroup, QuantizationArgs};
pub use config::QuantizationConfig;
pub use gptq::GptqConfig;
pub use module::TensorSource;
