//! Products with weights of 4 bits (NF4, FP4, integers in groups) and of 8 bits in groups.
//!
//! Codes become words of 16 bits, activations are quantized on the fly to words of 13 to 16 bits with a
//! scale for each 64 inputs, and their products are summed exactly in 32 bits over what shares a scale.
//! That is as fast as memory gives the codes, and some four times as precise as activations in bf16: 8
//! bits would be no faster here, and twenty times as coarse.
//!
//! | module | what |
//! |---|---|
//! | `map` | the slices of a weight, and what its codes mean |
//! | `storage` | quantized weights as such slices |
//! | `scales` | the scales of one row, wherever they are kept |
//! | `words` | vectors of codes and words, for each instruction set |
//! | `activations` | rows of activations as words |
//! | `part` | a map among others of a product |
//! | `lines` | memory in whole lines of the cache |
//! | `prepare` | the scales of several rows of a weight |
//! | `along`, `tiles` | one to three rows of activations; more |
//! | `byte_rows`, `nibbles` | codes of 4 bits with one to three rows in bytes |
//! | `byte_units`, `byte_tiles` | the same with more rows, where bytes are asked for |
//! | `any` | exact weights in floats |

mod activations;
mod along;
mod any;
mod byte_rows;
mod byte_tiles;
mod byte_units;
mod coding;
mod lines;
mod map;
mod nibbles;
mod part;
mod prepare;
mod scales;
mod storage;
#[cfg(test)]
mod tests;
mod tiles;
mod words;

pub(crate) use any::dequantize_rows;
pub(crate) use map::CodedMap;
pub(crate) use part::{CodedPart, WordForms};
pub(crate) use scales::Magnitudes;
pub(crate) use storage::{coded_map, floats, of_blocks};
