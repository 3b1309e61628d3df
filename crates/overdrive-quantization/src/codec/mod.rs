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
pub(crate) mod microscaling;
pub(crate) mod not_finite;
#[cfg(test)]
mod originals;
mod row_scale;

use overdrive_sys::denormals::keeping_denormals;

/// The number of elements of a job: some tens of microseconds of work.
const JOB_LEN: usize = 64 << 10;

/// Returns the number of units (rows, blocks) of `unit` elements in a job.
pub(crate) fn units_of_job(unit: usize) -> usize {
    JOB_LEN.div_ceil(unit.max(1))
}

/// Calls `run` with each job, on several threads. Subnormal numbers keep their values in it: codes and scales are those of
/// other libraries bit for bit.
pub(crate) fn run_jobs<J: Send>(jobs: impl Iterator<Item = J>, run: impl Fn(J) + Sync) {
    overdrive_kernels::threads::run_jobs(jobs, |job| keeping_denormals(|| run(job)));
}

/// The smallest scale of a codec: a row, group or block whose numbers need a smaller one (all below 2e-36)
/// becomes zeros. It is a normal number, so that `1 / scale` is one as well.
pub(crate) const LEAST_SCALE: f32 = f32::MIN_POSITIVE;
