//! GEMM and GEMV with weights of 4 bits (NF4, FP4, integers in groups) and of 8 bits in groups.
//!
//! Codes are unpacked to bytes, activations are quantized on the fly to bytes with one scale for each 32 to 128 inputs
//! (32 for 8-bit codes), and their products are summed exactly in 32 bits over the inputs that share a scale. If the
//! layout of the weight does not allow this, both are words of 13 to 16 bits. The choice does not depend on the number
//! of rows. With bytes, neither does any bit of a row's result: the kernels for few and for many rows add the groups in
//! the same order.
//!
//! | module | content |
//! |---|---|
//! | `coded_weight` | the slices of a weight, and the numbers of its codes |
//! | `storage` | quantized weights as such slices |
//! | `scales`, `scale_rows` | the scales of a weight; those of several rows at once |
//! | `unpack` | the unpacking of codes to words |
//! | `word_rows`, `byte_rows`, `byte_panels` | rows of activations as words and as bytes |
//! | `gemm` | the choice of the kernel |
//! | `word_gemm` | activations in words |
//! | `byte_gemv`, `byte_gemm` | one to three rows of activations in bytes; more rows |
//! | `dequantize` | dequantized rows, and the GEMM in floats |
//! | `aligned` | memory that is aligned to cache lines |

mod aligned;
mod byte_gemm;
mod byte_gemv;
mod byte_panels;
mod byte_rows;
mod coded_weight;
mod dequantize;
mod gemm;
mod scale_rows;
mod scales;
mod storage;
#[cfg(test)]
mod tests;
mod unpack;
mod word_gemm;
mod word_rows;

pub(crate) use coded_weight::CodedWeight;
pub(crate) use dequantize::dequantize_rows;
pub(crate) use gemm::{CodedGemm, QuantizedInputs};
pub(crate) use scales::MagnitudeSlices;
pub(crate) use storage::{coded_weight, floats, of_blocks};
