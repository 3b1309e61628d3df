//! Work on libtorch's threads.
//!
//! Callers need no unsafe code: a job owns the slices that it writes. Unless a function's documentation says otherwise,
//! the split of a slice does not depend on the number of threads, and neither do sums that are computed block by block.
//! Subnormal numbers are treated as zero in each job, on any thread ([crate](crate#subnormal-numbers)).

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use overdrive_sys::denormals::flushing_denormals;
use overdrive_sys::threads::{intra_op, parallel_for};

use crate::ColumnsMut;

/// The minimum number of bytes that a block should access, a few microseconds of work.
const MIN_BLOCK_BYTES: usize = 64 << 10;

/// The maximum number of blocks: more than the number of cores, and few enough that the partial sums of all blocks
/// stay small.
const MAX_BLOCKS: usize = 128;

/// Returns the number of rows in a block, for `rows` rows that access `bytes` bytes of memory each.
pub fn block_rows(rows: usize, bytes: usize) -> usize {
    let enough = MIN_BLOCK_BYTES.div_ceil(bytes.max(1));
    // Depends only on the sizes and not on the threads, so that sums computed block by block are always the same.
    rows.div_ceil(MAX_BLOCKS).max(enough).clamp(1, rows.max(1))
}

/// Returns the length of chunks of `len` elements that gives each thread one chunk of at least `grain` elements.
///
/// It depends on the number of threads, so it is for work whose result does not depend on the chunks.
pub fn chunk_len(len: usize, grain: usize) -> usize {
    let grain = grain.max(1);
    let threads = intra_op().clamp(1, len.div_ceil(grain).max(1));
    len.div_ceil(threads).max(1)
}

/// Runs `run` once with each job, several at a time. Each thread takes neighbouring jobs in order, then jobs that other
/// threads have not begun, so that memory is read as a stream and a slow thread does not delay the others.
pub fn run_jobs<J: Send>(jobs: impl Iterator<Item = J>, run: impl Fn(J) + Sync) {
    // A job is taken out of an uncontended mutex, which takes a few nanoseconds.
    let jobs: Vec<Mutex<Option<J>>> = jobs.map(|job| Mutex::new(Some(job))).collect();
    run_numbers(jobs.len(), |index| {
        let job = locked(&jobs[index]).take();
        if let Some(job) = job {
            run(job);
        }
    });
}

/// Runs `run` with the numbers `0..count` as [`run_jobs`] does.
fn run_numbers(count: usize, run: impl Fn(usize) + Sync) {
    let threads = intra_op().min(count);
    if threads <= 1 {
        return flushing_denormals(|| (0..count).for_each(run));
    }
    let share = |thread: usize| thread * count / threads..(thread + 1) * count / threads;
    let shares: Vec<Mutex<Range<usize>>> = (0..threads).map(|t| Mutex::new(share(t))).collect();
    parallel_for(threads, 1, |own| {
        for own in own {
            while let Some(index) = next(&shares[own], Range::next) {
                run(index);
            }
            // From the end, since the owners of the shares proceed from the beginning.
            for other in (0..threads).map(|distance| (own + distance) % threads) {
                while let Some(index) = next(&shares[other], Range::next_back) {
                    run(index);
                }
            }
        }
    });
}

/// Takes one number of a share.
// A function, so that the lock is released before the number is processed.
fn next(
    share: &Mutex<Range<usize>>,
    take: impl Fn(&mut Range<usize>) -> Option<usize>,
) -> Option<usize> {
    take(&mut locked(share))
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls `body` with the index of each chunk of `chunk` elements and the chunk; the last chunk may be shorter.
pub fn parallel_chunks_mut<T: Send>(
    slice: &mut [T],
    chunk: usize,
    body: impl Fn(usize, &mut [T]) + Sync,
) {
    let jobs = slice.chunks_mut(chunk.max(1)).enumerate();
    run_jobs(jobs, |(index, chunk)| body(index, chunk));
}

/// Calls `body` with ranges of length `chunk` in `0..len` (the last may be shorter), which threads take like the jobs
/// of [`run_jobs`]. If `parallel` is false, it runs on this thread only.
pub fn parallel_ranges(
    len: usize,
    chunk: usize,
    parallel: bool,
    body: impl Fn(Range<usize>) + Sync,
) {
    let chunk = chunk.max(1);
    let count = len.div_ceil(chunk);
    let run = |index: usize| body(index * chunk..((index + 1) * chunk).min(len));
    if parallel {
        run_numbers(count, run);
    } else {
        flushing_denormals(|| (0..count).for_each(run));
    }
}

/// Calls `body` with the columns of `matrix (…, width)`, `chunk` at a time (the last may be fewer), which threads
/// take like the jobs of [`run_jobs`]. If `parallel` is false, it runs on this thread only.
#[allow(unsafe_code, reason = "threads that write disjoint columns")]
pub fn parallel_columns<T: Copy + Send>(
    matrix: &mut [T],
    width: usize,
    chunk: usize,
    parallel: bool,
    body: impl Fn(ColumnsMut<'_, T>) + Sync,
) {
    let all = ColumnsMut::new(matrix, width);
    parallel_ranges(width, chunk, parallel, |columns| {
        // SAFETY: each range is given out once, and they do not overlap.
        body(unsafe { all.part(columns) });
    });
}

/// Like [`parallel_columns`], but with the columns of each of `blocks`; other columns are left unchanged.
///
/// # Panics
/// If blocks overlap or are not in ascending order.
#[allow(unsafe_code, reason = "threads that write disjoint columns")]
pub fn parallel_column_blocks<T: Copy + Send>(
    matrix: &mut [T],
    width: usize,
    blocks: &[Range<usize>],
    parallel: bool,
    body: impl Fn(ColumnsMut<'_, T>) + Sync,
) {
    let rise = blocks.iter().all(|block| block.start <= block.end)
        && blocks.is_sorted_by(|before, after| before.end <= after.start);
    assert!(rise, "blocks of columns must be in ascending order");
    let all = ColumnsMut::new(matrix, width);
    parallel_ranges(blocks.len(), 1, parallel, |indices| {
        for columns in &blocks[indices] {
            // SAFETY: each block is given out once, and they do not overlap.
            body(unsafe { all.part(columns.clone()) });
        }
    });
}

/// Runs tasks `0..count`, which threads take in order as they become free. Each task gets its thread's share of
/// `workspace`, which is divided equally among the [`workers`] (or the tasks, if there are fewer).
///
/// The share of a task differs from call to call, so results must not depend on its contents. If `parallel` is false,
/// the tasks run on this thread only, with a share of the same length.
pub fn for_each_task<T: Send>(
    count: usize,
    parallel: bool,
    workspace: &mut [T],
    run: impl Fn(usize, &mut [T]) + Sync,
) {
    // If there are fewer tasks than threads, each share may be larger.
    let workers = workers().min(count);
    if workers == 0 {
        return;
    }
    let share = workspace.len() / workers;
    if !parallel || workers == 1 {
        let tasks = || (0..count).for_each(|task| run(task, &mut workspace[..share]));
        return flushing_denormals(tasks);
    }
    // In order instead of in shares, since callers put the longest first.
    let next = AtomicUsize::new(0);
    let mut rest = workspace;
    let shares = (0..workers).map(move |_| {
        let (first, others) = std::mem::take(&mut rest).split_at_mut(share);
        rest = others;
        first
    });
    run_jobs(shares, |share| {
        loop {
            let task = next.fetch_add(1, Ordering::Relaxed);
            if task >= count {
                break;
            }
            run(task, share);
        }
    });
}

/// Returns the number of tasks that can run at once.
pub fn workers() -> usize {
    // At least one, because workspaces are divided by it.
    intra_op().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use overdrive_sys::denormals::flushes_denormals;

    #[test]
    fn every_chunk_and_every_column_is_visited_once() {
        let mut x = vec![0; 1003];
        parallel_chunks_mut(&mut x, 100, |index, chunk| {
            chunk.iter_mut().for_each(|x| *x += index + 1);
        });
        assert!(x.iter().enumerate().all(|(at, x)| *x == at / 100 + 1));
        for parallel in [false, true] {
            let mut matrix = vec![0; 3 * 70];
            parallel_columns(&mut matrix, 70, 8, parallel, |mut columns| {
                for column in columns.range() {
                    for row in 0..3 {
                        columns.set(row, column, 100 * row + column);
                    }
                }
            });
            let expected = |at: usize| at / 70 * 100 + at % 70;
            assert!(matrix.iter().enumerate().all(|(at, x)| *x == expected(at)));
            let blocks = [0..8, 8..9, 20..70];
            parallel_column_blocks(&mut matrix, 70, &blocks, parallel, |mut columns| {
                assert!(blocks.contains(&columns.range()));
                for row in 0..3 {
                    columns.row_mut(row).iter_mut().for_each(|x| *x += 1000);
                }
            });
            let left_alone = |at: usize| (9..20).contains(&(at % 70));
            let expected = |at: usize| expected(at) + 1000 * usize::from(!left_alone(at));
            assert!(matrix.iter().enumerate().all(|(at, x)| *x == expected(at)));
        }
    }

    #[test]
    fn every_job_runs_once() {
        for count in [0, 1, 2, 57] {
            let runs: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
            run_jobs(runs.iter(), |runs| {
                runs.fetch_add(1, Ordering::Relaxed);
            });
            assert!(runs.iter().all(|runs| runs.load(Ordering::Relaxed) == 1));
        }
    }

    #[test]
    fn jobs_of_a_thread_that_is_held_up_are_taken_by_others() {
        let started = AtomicUsize::new(0);
        parallel_for(intra_op(), 1, |_| {
            started.fetch_add(1, Ordering::Relaxed);
        });
        // Nobody could take them: one core, or a limit of OpenMP's.
        if started.into_inner() == 1 {
            return;
        }
        // The first job ends when all others have, so that some thread must take what is left of its share.
        let done = AtomicUsize::new(0);
        run_jobs(0..40, |job| {
            if job > 0 {
                done.fetch_add(1, Ordering::Relaxed);
                return;
            }
            while done.load(Ordering::Relaxed) < 39 {
                std::thread::yield_now();
            }
        });
        assert_eq!(done.into_inner(), 39);
    }

    #[test]
    fn subnormal_numbers_are_zero_in_the_jobs_of_each_loop_on_whatever_thread() {
        let has_mode = flushing_denormals(flushes_denormals);
        let check = || assert_eq!(flushes_denormals(), has_mode);
        let mut slice = [0; 100];
        for count in [1, 57] {
            run_jobs(0..count, |_| check());
            parallel_chunks_mut(&mut slice[..count], 1, |_, _| check());
            for parallel in [false, true] {
                parallel_ranges(count, 1, parallel, |_| check());
                parallel_columns(&mut slice[..count], count, 1, parallel, |_| check());
                let column = 0..count;
                parallel_column_blocks(&mut slice[..count], count, &[column], parallel, |_| {
                    check()
                });
                for_each_task(count, parallel, &mut slice, |_, _| check());
            }
            assert!(!flushes_denormals());
        }
    }

    #[test]
    fn every_task_runs_once_with_a_share_of_the_workspace() {
        for (count, len) in [(0, 10), (1, 10), (57, 64), (57, 0)] {
            let mut workspace = vec![0_usize; len];
            let runs: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
            // Asked outside: within a parallel region libtorch may say 1.
            let workers = workers().min(count);
            for_each_task(count, true, &mut workspace, |task, share| {
                assert_eq!(share.len(), len / workers);
                share.fill(task);
                runs[task].fetch_add(1, Ordering::Relaxed);
            });
            assert!(runs.iter().all(|runs| runs.load(Ordering::Relaxed) == 1));
        }
    }
}
