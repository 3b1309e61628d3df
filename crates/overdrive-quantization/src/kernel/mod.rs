//! Products that read weights packed: plain slices in, plain slices out.
//!
//! | module | what |
//! |---|---|
//! | `simd` | vectors, written once and compiled for each instruction set |
//! | `threads` | parts of the work for each thread, and results that they share |
//! | `activations` | rows of activations in 8 bits |
//! | `element` | f32, bf16 and f16 in slices |

pub(crate) mod activations;
pub(crate) mod element;
pub(crate) mod simd;
pub(crate) mod threads;
