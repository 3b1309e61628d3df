//! The thread counts of libtorch's CPU kernels, and loops on their threads.
//!
//! Overdrive's own kernels run through [`parallel_for`], on the threads that libtorch's kernels use: a second
//! thread pool beside OpenMP's would compete with it for the same cores.

use std::any::Any;
use std::ffi::c_void;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Mutex, PoisonError};

use crate::denormals::flushing_denormals;
use crate::error::Result;
use crate::ffi;

mod team;

pub use team::with_team;

/// Returns the number of threads inside one operator (OpenMP's; `torch.get_num_threads`).
pub fn intra_op() -> usize {
    usize::try_from(tch::get_num_threads()).unwrap_or(1)
}

/// Sets the number of threads inside one operator.
///
/// # Errors
/// [`crate::Error::Common`] for 0 or more than `i32::MAX`.
pub fn set_intra_op(threads: usize) -> Result<()> {
    match i32::try_from(threads) {
        Ok(count) if count > 0 => {
            tch::set_num_threads(count);
            Ok(())
        }
        _ => Err(overdrive_core::Error::option(
            "threads",
            threads,
            "at least 1, and should be at most the number of cores",
        )
        .into()),
    }
}

/// Returns the number of threads across independent operators (`torch.get_num_interop_threads`).
pub fn inter_op() -> usize {
    usize::try_from(tch::get_num_interop_threads()).unwrap_or(1)
}

/// Splits `0..len` into one contiguous range per thread and runs `body` on each of them, on libtorch's
/// threads (the counterpart of `at::parallel_for`).
///
/// Ranges have at least `grain` elements, so short loops run on the calling thread only; so does every
/// loop inside another parallel region. Many short loops in a row take less time in [`with_team`]. The split
/// depends only on `len`, `grain` and [`intra_op`]. The other threads do not have the thread-local modes of the
/// caller (autocast, no-grad), so `body` must not call operators. In `body` subnormal numbers are treated as zero
/// ([`flushing_denormals`]), on every thread, including the calling one.
///
/// A panic in `body` resumes in the caller once all threads have finished.
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
    // For each range, because the mode belongs to the thread that runs it.
    let body = |range: Range<usize>| flushing_denormals(|| body(range));
    // A grain of 0 means "no minimum".
    let most = len.div_ceil(grain.max(1));
    if most == 1 {
        return body(0..len);
    }
    let work = Loop {
        body: &body,
        len,
        panic: Mutex::new(None),
    };
    if !team::run(&work, most) {
        let threads = thread_limit().min(most);
        if threads == 1 {
            return body(0..len);
        }
        // SAFETY: `work` outlives the call, which returns when every thread has; the work is told apart by
        // the thread's number, and `run` lets no panic out.
        unsafe {
            let work = (&raw const work).cast_mut().cast();
            ffi::od_parallel(i32::try_from(threads).unwrap_or(1), run, work);
        }
    }
    let panic = work
        .panic
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner);
    if let Some(payload) = panic {
        resume_unwind(payload);
    }
}

/// Runs `body` once on this thread, and once on each of the others that run libtorch's operators for it.
///
/// Inside of a parallel region it runs on this thread alone.
pub(crate) fn on_each_thread(body: &(dyn Fn() + Sync)) {
    unsafe extern "C" fn run(body: *mut c_void, _thread: i32, _threads: i32) {
        // SAFETY: `on_each_thread` passes its own body, alive until all threads return.
        let body = unsafe { *body.cast::<&(dyn Fn() + Sync)>() };
        // No panic may get out. The bodies read and write a register.
        let _panicked = catch_unwind(AssertUnwindSafe(body));
    }
    let threads = i32::try_from(thread_limit()).unwrap_or(1);
    // SAFETY: `body` outlives the call, which returns when every thread has, and `run` lets no panic out.
    unsafe { ffi::od_parallel(threads, run, (&raw const body).cast_mut().cast()) };
}

/// Returns the number of threads that a parallel region may have here: one inside of another region.
fn thread_limit() -> usize {
    // SAFETY: reads settings.
    usize::try_from(unsafe { ffi::od_parallel_threads() })
        .unwrap_or(1)
        .max(1)
}

/// A loop that threads run together.
struct Loop<'a> {
    body: &'a (dyn Fn(Range<usize>) + Sync),
    len: usize,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl Loop<'_> {
    /// Runs one of `shares` ranges.
    fn run_share(&self, share: usize, shares: usize) {
        let count = self.len.div_ceil(shares.max(1));
        let range = (share * count).min(self.len)..((share + 1) * count).min(self.len);
        if range.is_empty() {
            return;
        }
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| (self.body)(range))) {
            // Only the first panic is kept: the caller can resume one.
            let mut first = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
            first.get_or_insert(payload);
        }
    }
}

/// Runs one thread's range.
unsafe extern "C" fn run(work: *mut c_void, thread: i32, threads: i32) {
    // SAFETY: `parallel_for` passes its own loop, alive until all threads return.
    let work = unsafe { &*work.cast::<Loop<'_>>().cast_const() };
    // OpenMP may start fewer threads than were asked for (OMP_THREAD_LIMIT, OMP_DYNAMIC): the split is by the
    // real number, so that every index is still visited.
    if let (Ok(thread), Ok(threads)) = (usize::try_from(thread), usize::try_from(threads)) {
        work.run_share(thread, threads);
    }
}
