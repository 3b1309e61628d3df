//! Work cut into blocks, on libtorch's threads.

use std::sync::{Mutex, PoisonError};

/// Bytes that a block should at least touch: some microseconds of work.
const MIN_BLOCK_BYTES: usize = 64 << 10;

/// More blocks than cores there may be, few enough that what a block keeps (a partial sum) is small.
const MAX_BLOCKS: usize = 128;

/// Rows of a block, when there are `rows` and each touches `bytes` of memory.
///
/// It does not look at the number of threads, so neither do sums that are made block by block.
pub(crate) fn block_rows(rows: usize, bytes: usize) -> usize {
    let enough = MIN_BLOCK_BYTES.div_ceil(bytes.max(1));
    rows.div_ceil(MAX_BLOCKS).max(enough).clamp(1, rows.max(1))
}

/// Runs `run` once with each job, several at a time.
///
/// A job owns the slices that it writes, so nothing here is unsafe; it is taken out of a mutex that
/// nobody else asks for, which costs some nanoseconds.
pub(crate) fn run_jobs<J: Send>(jobs: impl Iterator<Item = J>, run: impl Fn(J) + Sync) {
    let jobs: Vec<Mutex<Option<J>>> = jobs.map(|job| Mutex::new(Some(job))).collect();
    overdrive_sys::threads::parallel_for(jobs.len(), 1, |range| {
        for slot in &jobs[range] {
            let job = slot.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(job) = job {
                run(job);
            }
        }
    });
}
