//! Thread counts of libtorch's CPU kernels.
//!
//! Rule for kernels of Overdrive's own that run inside a step: they run through [`parallel_for`], on
//! the threads that libtorch's kernels have, because a second full set beside OpenMP's halves both.

use std::any::Any;
use std::ffi::c_void;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Mutex, PoisonError};

use crate::error::{Error, Result};
use crate::ffi;

/// Threads inside one operator (OpenMP's; `torch.get_num_threads`).
pub fn intra_op() -> usize {
    usize::try_from(tch::get_num_threads()).unwrap_or(1)
}

/// Sets the threads inside one operator.
///
/// # Errors
/// [`Error::BadArgument`] for 0 or more than `i32::MAX`.
pub fn set_intra_op(threads: usize) -> Result<()> {
    match i32::try_from(threads) {
        Ok(count) if count > 0 => {
            tch::set_num_threads(count);
            Ok(())
        }
        _ => Err(Error::BadArgument {
            operation: "setting the number of threads".to_owned(),
            message: format!("{threads} threads; give at least 1 and no more than the machine has"),
        }),
    }
}

/// Threads across independent operators (`torch.get_num_interop_threads`).
pub fn inter_op() -> usize {
    usize::try_from(tch::get_num_interop_threads()).unwrap_or(1)
}

/// Splits `0..len` into one contiguous range a thread and runs `body` on each, on libtorch's own
/// threads (what `at::parallel_for` is to its kernels).
///
/// Ranges have at least `grain` elements, so that short work stays on this thread; inside another
/// parallel region everything does. The split depends only on `len`, `grain` and [`intra_op`]. Other
/// threads do not see this one's thread-local modes (autocast, no-grad): call no operator in `body`.
///
/// A panic in `body` goes on in the caller once all threads are done.
///
/// ```
/// let sum = std::sync::atomic::AtomicUsize::new(0);
/// overdrive_sys::threads::parallel_for(1000, 100, |range| {
///     sum.fetch_add(range.sum(), std::sync::atomic::Ordering::Relaxed);
/// });
/// assert_eq!(sum.into_inner(), 499_500);
/// ```
pub fn parallel_for(len: usize, grain: usize, body: impl Fn(Range<usize>) + Sync) {
    if len == 0 {
        return;
    }
    let most = len.div_ceil(grain.max(1));
    // SAFETY: reads settings.
    let threads = usize::try_from(unsafe { ffi::od_parallel_threads() })
        .unwrap_or(1)
        .clamp(1, most);
    if threads == 1 {
        return body(0..len);
    }
    let team = Team {
        body: &body,
        len,
        panic: Mutex::new(None),
    };
    // SAFETY: `team` outlives the call, which returns when every thread has; the work is told apart by
    // the thread's number, and `run` lets no panic out.
    unsafe {
        ffi::od_parallel(
            i32::try_from(threads).unwrap_or(1),
            run,
            (&raw const team).cast_mut().cast(),
        );
    }
    let panic = team
        .panic
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner);
    if let Some(payload) = panic {
        resume_unwind(payload);
    }
}

struct Team<'a> {
    body: &'a (dyn Fn(Range<usize>) + Sync),
    len: usize,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// One thread's share: the team may be smaller than asked for, so the split is by its real size.
unsafe extern "C" fn run(team: *mut c_void, thread: i32, threads: i32) {
    // SAFETY: `parallel_for` passes its own team, alive until all threads return.
    let team = unsafe { &*team.cast::<Team<'_>>().cast_const() };
    let (Ok(thread), Ok(threads)) = (usize::try_from(thread), usize::try_from(threads)) else {
        return;
    };
    let share = team.len.div_ceil(threads.max(1));
    let range = (thread * share).min(team.len)..((thread + 1) * share).min(team.len);
    if range.is_empty() {
        return;
    }
    if let Err(payload) = catch_unwind(AssertUnwindSafe(|| (team.body)(range))) {
        let mut first = team.panic.lock().unwrap_or_else(PoisonError::into_inner);
        first.get_or_insert(payload);
    }
}
