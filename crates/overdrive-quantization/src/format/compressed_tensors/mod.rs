//! The layouts of compressed-tensors (vLLM, LLM Compressor): `int-quantized`, `pack-quantized`,
//! `float-quantized`, `mxfp4-pack-quantized`, `nvfp4-pack-quantized`.
//!
//! `int-quantized`: `weight` (i8), `weight_scale` `(O, 1)`. `pack-quantized`: `weight_packed` (codes
//! counted from 0, the first in the low bits of an i32), `weight_scale` `(O, G)`, `weight_zero_point`
//! (packed along the outputs), `weight_shape`. `float-quantized`: `weight` (e4m3), `weight_scale`, of blocks
//! `(⌈O/128⌉, ⌈I/128⌉)`.
//! `mxfp4-pack-quantized` and `nvfp4-pack-quantized`: `weight_packed` (u8 `(O, I/2)`, the first of two floats in the low half),
//! `weight_scale` (u8 exponents, or e4m3), and for NVFP4 `weight_global_scale`, by which scales are divided.

mod args;
mod config;
mod read;
mod renamed;
mod write;

pub use args::{ConfigGroup, QuantizationArgs};
pub use config::CompressedTensorsConfig;
pub(super) use write::low_half_first;
