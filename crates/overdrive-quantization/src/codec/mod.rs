//! The arithmetic of each storage on plain slices: from floats to codes and back.
//!
//! Loops are written so that the compiler turns them into vector instructions, and compiled once for
//! each instruction set ([`vectors`]). They multiply, add and round in the same order everywhere, never
//! fused, so that every instruction set gives the same bits.

pub(crate) mod blocks;
pub(crate) mod book;
pub(crate) mod dynamic;
pub(crate) mod floats;
pub(crate) mod fp8;
pub(crate) mod grouped;
pub(crate) mod int8;
pub(crate) mod jobs;
#[cfg(test)]
mod originals;
mod row;
mod vectors;

/// The smallest scale that a codec makes: a row, group or block whose numbers need a smaller one (all
/// below 2e-36) is zeros. It is a normal number, so that `1 / scale` is one as well.
pub(crate) const LEAST_SCALE: f32 = f32::MIN_POSITIVE;
