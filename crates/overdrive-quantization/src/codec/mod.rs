//! The arithmetic of each storage on plain slices: from floats to codes and back.
//!
//! Loops are written so that the compiler turns them into vector instructions, and compiled for each
//! instruction set ([`overdrive_kernels::vectorized`]). They multiply, add and round in the same order
//! everywhere, never fused, so that every instruction set gives the same bits.

pub(crate) mod blocks;
pub(crate) mod code_book;
pub(crate) mod dynamic;
pub(crate) mod floats;
pub(crate) mod fp8;
pub(crate) mod grouped;
pub(crate) mod int8;
pub(crate) mod not_finite;
#[cfg(test)]
mod originals;
mod row_scale;

/// The number of elements of a job: some tens of microseconds of work.
const JOB_LEN: usize = 64 << 10;

/// Returns the number of units (rows, blocks) of `unit` elements in a job.
pub(crate) fn units_of_job(unit: usize) -> usize {
    JOB_LEN.div_ceil(unit.max(1))
}

/// The smallest scale of a codec: a row, group or block whose numbers need a smaller one (all below 2e-36)
/// becomes zeros. It is a normal number, so that `1 / scale` is one as well.
pub(crate) const LEAST_SCALE: f32 = f32::MIN_POSITIVE;
