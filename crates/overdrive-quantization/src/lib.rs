//! 8- and 4-bit quantized weights for tch. They take a quarter to an eighth of the memory, and decoding reads as much
//! less, with the codes and file formats of the Python libraries.
//!
//! [`QuantizedWeight`] is the weight of a linear layer in one of the schemes of [`Scheme`]:
//!
//! | name | codes | one scale for | bits per element | as in |
//! |---|---|---|---|---|
//! | `int8`, `int8-weight`, `llm-int8` | bytes | an output | 8.0 | `quantize_dynamic`, LLM.int8 |
//! | `int4`, `int4-g32`, `int4-asym`, `int8-g32`, … | integers of 4 or 8 bits | a group of inputs | 4.13 to 8.5 | compressed-tensors, GPTQ, AWQ, GGUF |
//! | `nf4`, `fp4`, `nf4-single`, … | a code book of 16 values | 64 elements | 4.13, 4.5 | bitsandbytes (QLoRA) |
//! | `fp8` | e4m3 floats | an output | 8.0 | compressed-tensors, vLLM |
//! | `fp8-blocks`, from files only | e4m3 floats | 128 outputs and 128 inputs | 8.25 | DeepSeek-V3, Qwen 3 |
//! | `mxfp4`, `nvfp4` | e2m1 floats | 32 or 16 inputs, in 8 bits | 4.25, 4.5 | compressed-tensors, gpt-oss, GGUF |
//!
//! The CPU kernels treat [numbers below 2⁻¹²⁶ as zero](overdrive_kernels#subnormal-numbers), in inputs, scales and
//! results.
//!
//! [`QuantizationConfig`] reads and writes weights in model files; [`GgufFile`] reads GGUF
//! files; [`quantize_checkpoint`] quantizes a Hugging Face folder.
//!
//! ```
//! use overdrive_quantization::{QuantizedWeight, Scheme, linear};
//! use tch::{Device, Kind, Tensor};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let weight = Tensor::randn([96, 64], (Kind::Float, Device::Cpu));
//! let packed = QuantizedWeight::quantize(&weight, "int8".parse()?)?;
//! let x = Tensor::randn([3, 64], (Kind::Float, Device::Cpu));
//! assert_eq!(linear(&x, &packed, None)?.size(), [3, 96]);
//! # Ok(())
//! # }
//! ```
#![deny(missing_docs)]

mod activations;
mod adjacent;
mod arrange;
mod calibrate;
mod checkpoint;
mod codec;
mod composed;
mod constructors;
mod dequantize;
mod device_dequantize;
mod error;
mod format;
mod gguf;
mod gpu;
mod kernel;
mod linear;
mod quantize;
mod report;
mod scheme;
mod tensors;
mod tiles;
mod weight;

pub use activations::Activations;
pub use adjacent::adjacent;
pub use calibrate::{
    CalibrationOptions, ClipOptions, GptqOptions, InputCollector, InputObserver, InputStatistics,
    Migration, Moments, fold_into_columns, fold_into_rows, is_observed, migration_scales,
    observe_input, observe_inputs, quantize_calibrated,
};
pub use checkpoint::{
    CheckpointOptions, CheckpointReport, Filter, Progress, TensorReport, check_checkpoint,
    quantize_checkpoint,
};
pub use constructors::GroupedParts;
pub use error::{Error, Result};
pub use format::{
    AwqConfig, BitsAndBytesConfig, CompressedTensorsConfig, ConfigGroup, Fp8Config, GptqConfig,
    ModelOptConfig, Mxfp4Config, QuantizationArgs, QuantizationConfig, TensorSource, skips_modules,
};
pub use gguf::{GgufArray, GgufFile, GgufTensor, GgufTensorInfo, GgufType, GgufValue, GgufWriter};
pub use linear::{joint_linear, joint_linear_into, linear};
pub use overdrive_kernels::instruction_set;
pub use report::WeightError;
pub use scheme::{BlockOptions, GroupOptions, GroupScales, Scheme};
pub use weight::{Magnitudes, QuantizedWeight};
