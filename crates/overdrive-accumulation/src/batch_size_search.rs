//! The search for a batch size that fits into memory.

use std::any::Any;
use std::error::Error as StdError;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use overdrive_core::{check_at_least, panic_text};
use overdrive_sys::{is_out_of_memory, memory};
use tch::{Device, TchError};

use crate::BatchPlan;

/// The error of a search for a batch size.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SearchError<E> {
    /// Memory ran out at every size down to the smallest.
    #[error(
        "no batch size fits into memory: tried {tried:?}, the last of which failed with: {last}; use a smaller model or context, a lower precision, or activation checkpointing"
    )]
    NothingFits {
        /// The sizes that were tried, in order.
        tried: Vec<usize>,
        /// The message of the last out-of-memory error.
        last: String,
    },

    /// The starting batch size is 0.
    #[error(transparent)]
    Common(#[from] overdrive_core::Error),

    /// The reduction did not return a smaller size, so the search would never end.
    #[error("the reduction of batch size {from} returned {to}; it must return a smaller size")]
    NotReduced {
        /// The size that did not fit.
        from: usize,
        /// The size that the reduction returned.
        to: usize,
    },

    /// The function failed for another reason than memory.
    #[error(transparent)]
    Failed(E),
}

/// The result of a search: a batch that fits, and the value of the function for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExecutableBatch<B, T> {
    /// The batch size, or the plan, that fits.
    pub batch: B,
    /// The value that the function returned for it.
    pub value: T,
}

/// Calls `function` with `starting_batch_size` and, each time memory runs out, with half of the previous size
/// (Accelerate's `find_executable_batch_size`, which reduces by a tenth).
///
/// An error is recognized as out of memory by [`overdrive_sys::is_out_of_memory`] (on CUDA, on a CPU, and
/// under [`overdrive_sys::memory::set_limit`]), and a panic by libtorch's message, because most calls of
/// tch panic. Other errors are returned, and other panics resume. The caches of all devices are emptied
/// between tries. Memory that `function` leaves allocated, gradients above all, stays allocated, so
/// `function` should create or clear what it uses.
///
/// # Errors
/// [`SearchError`].
///
/// ```
/// use overdrive_accumulation::find_executable_batch_size;
/// use tch::TchError;
///
/// let found = find_executable_batch_size(48, |batch_size| {
///     if batch_size > 20 {
///         return Err(TchError::Torch("CUDA out of memory.".into()));
///     }
///     Ok("trained")
/// })?;
/// assert_eq!((found.batch, found.value), (12, "trained"));
/// # Ok::<(), overdrive_accumulation::SearchError<TchError>>(())
/// ```
pub fn find_executable_batch_size<T, E: StdError + 'static>(
    starting_batch_size: usize,
    function: impl FnMut(usize) -> Result<T, E>,
) -> Result<ExecutableBatch<usize, T>, SearchError<E>> {
    find_executable_batch_size_with(
        starting_batch_size,
        |size| size / 2,
        out_of_memory,
        function,
    )
}

/// As [`find_executable_batch_size`], with a custom reduction, and for error types that do not implement
/// [`std::error::Error`] (`anyhow::Error`).
///
/// `out_of_memory` returns the message of an error that a smaller batch would avoid, and `None` for other
/// errors.
///
/// # Errors
/// [`SearchError`].
pub fn find_executable_batch_size_with<T, E>(
    starting_batch_size: usize,
    mut reduce: impl FnMut(usize) -> usize,
    out_of_memory: impl Fn(&E) -> Option<String>,
    function: impl FnMut(usize) -> Result<T, E>,
) -> Result<ExecutableBatch<usize, T>, SearchError<E>> {
    check_at_least("starting_batch_size", starting_batch_size, 1)?;
    let next = |size| {
        let smaller = reduce(size);
        if smaller >= size {
            return Err(SearchError::NotReduced {
                from: size,
                to: smaller,
            });
        }
        Ok((smaller > 0).then_some(smaller))
    };
    search(
        starting_batch_size,
        next,
        |size| size,
        out_of_memory,
        function,
    )
}

/// As [`find_executable_batch_size`], over plans of the same effective batch: each try has a micro-batch
/// of at most half the size, and correspondingly more accumulation steps.
///
/// # Errors
/// [`SearchError`].
///
/// ```
/// use overdrive_accumulation::{BatchPlan, find_executable_batch_plan};
/// use tch::TchError;
///
/// let plan = BatchPlan::new(24, 1, 1)?;
/// let found = find_executable_batch_plan(plan, |plan| {
///     if plan.micro_batch() > 10 {
///         return Err(TchError::Torch("CUDA out of memory.".into()));
///     }
///     Ok(())
/// })?;
/// assert_eq!((found.batch.micro_batch(), found.batch.accumulation_steps()), (6, 4));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn find_executable_batch_plan<T, E: StdError + 'static>(
    plan: BatchPlan,
    function: impl FnMut(BatchPlan) -> Result<T, E>,
) -> Result<ExecutableBatch<BatchPlan, T>, SearchError<E>> {
    let size = |plan: BatchPlan| usize::try_from(plan.micro_batch()).unwrap_or(usize::MAX);
    search(
        plan,
        |plan| Ok(plan.halved()),
        size,
        out_of_memory,
        function,
    )
}

/// Tries `batch`, and then the results of `next` until it returns `None`.
fn search<B: Copy, T, E>(
    mut batch: B,
    mut next: impl FnMut(B) -> Result<Option<B>, SearchError<E>>,
    size: impl Fn(B) -> usize,
    out_of_memory: impl Fn(&E) -> Option<String>,
    mut function: impl FnMut(B) -> Result<T, E>,
) -> Result<ExecutableBatch<B, T>, SearchError<E>> {
    let mut tried = Vec::new();
    loop {
        tried.push(size(batch));
        let last = match attempt(|| function(batch)) {
            Ok(Ok(value)) => return Ok(ExecutableBatch { batch, value }),
            Ok(Err(error)) => match out_of_memory(&error) {
                Some(message) => message,
                None => return Err(SearchError::Failed(error)),
            },
            Err(message) => message,
        };
        empty_caches();
        match next(batch)? {
            Some(smaller) => batch = smaller,
            None => return Err(SearchError::NothingFits { tried, last }),
        }
    }
}

/// Calls `function`, which starts over at each call: it must not rely on state that a panic has left behind. Panics of tch
/// because memory ran out, such as those of `Tensor::zeros`, become errors; other panics resume.
///
/// # Errors
/// The message of the panic. An error of `function` is in the value.
///
/// ```
/// use overdrive_accumulation::attempt;
/// use tch::TchError;
///
/// let trained = attempt(|| Err::<(), _>(TchError::Torch("a matrix is singular".into())));
/// assert!(matches!(trained, Ok(Err(_))));
/// ```
pub fn attempt<T, E>(function: impl FnOnce() -> Result<T, E>) -> Result<Result<T, E>, String> {
    catch_unwind(AssertUnwindSafe(function)).map_err(|payload| {
        panicked_out_of_memory(payload.as_ref()).unwrap_or_else(|| resume_unwind(payload))
    })
}

/// Returns the message of an error that says that memory ran out, itself or in one of its sources.
fn out_of_memory<E: StdError + 'static>(error: &E) -> Option<String> {
    is_out_of_memory(error).then(|| first_line(&error.to_string()))
}

/// Returns the message of a panic of tch because memory ran out.
fn panicked_out_of_memory(payload: &(dyn Any + Send)) -> Option<String> {
    // A panic carries only the text of tch's error, which `is_out_of_memory` recognizes in an error.
    out_of_memory(&TchError::Torch(panic_text(payload).to_owned()))
}

/// Returns the message without the C++ stack that libtorch appends.
fn first_line(message: &str) -> String {
    message.lines().next().unwrap_or_default().to_string()
}

/// Returns cached memory to the system, so that the next try starts without fragmentation.
fn empty_caches() {
    // Errors are ignored: if memory is short nevertheless, the next try fails and reports it.
    let _ = memory::empty_cache(Device::Cpu);
    if tch::Cuda::is_available() {
        // Empties the caches of all CUDA devices, whatever the index.
        let _ = memory::empty_cache(Device::Cuda(0));
    }
}
