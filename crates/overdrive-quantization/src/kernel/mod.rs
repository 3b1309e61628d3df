//! GEMM kernels that read weights packed: plain slices in, plain slices out.
//!
//! | module | content |
//! |---|---|
//! | `joint_gemm` | several weights in one parallel region; each kernel is a `Gemm` |
//! | `int8` | activations and weights in 8 bits |
//! | `four_bit` | weights in groups and blocks of 4 bits, and in groups of 8 bits |
//! | `dequantizing_gemm` | a few rows in f32 with a weight of 8 bits |
//! | `input_rows` | the activations of a GEMM, in each form that a kernel takes |
//! | `int8_rows` | rows of activations in 8 bits |

pub(crate) mod dequantizing_gemm;
pub(crate) mod four_bit;
pub(crate) mod input_rows;
pub(crate) mod int8;
pub(crate) mod int8_rows;
pub(crate) mod joint_gemm;

#[cfg(test)]
mod tests;
