//! Products that read weights packed: plain slices in, plain slices out.
//!
//! | module | what |
//! |---|---|
//! | `joint` | several weights in one parallel region: each kernel is a `Part` |
//! | `int8` | activations and weights in 8 bits |
//! | `simd` | vectors, written once and compiled for each instruction set |
//! | `threads` | parts of the work for each thread, and results that they share |
//! | `widen` | a few rows in full precision with a weight of 8 bits |
//! | `rows` | the activations of a product, in each form that a kernel takes |
//! | `activations` | rows of activations in 8 bits |
//! | `element` | f32, bf16 and f16 in slices |

pub(crate) mod activations;
pub(crate) mod element;
pub(crate) mod four_bit;
pub(crate) mod int8;
pub(crate) mod joint;
pub(crate) mod rows;
pub(crate) mod simd;
pub(crate) mod threads;
pub(crate) mod widen;

#[cfg(test)]
mod tests;
