//! Finding the batch size that fits memory.

use std::any::Any;
use std::error::Error as StdError;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use overdrive_sys::{is_out_of_memory, memory};
use tch::{Device, TchError};

use crate::BatchPlan;

/// Why no batch size was found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SearchError<E> {
    /// Memory ran out at every size down to the smallest.
    #[error(
        "no batch size fits in memory: tried {tried:?}, the last failed with: {last}; use a smaller model or context, lower precision, or activation checkpointing"
    )]
    NothingFits {
        /// The sizes tried, in order.
        tried: Vec<usize>,
        /// The last out-of-memory message.
        last: String,
    },

    /// The search was started at 0.
    #[error("the starting batch size is 0, expected at least 1")]
    StartsAtZero,

    /// The reduction did not reduce, so that the search would never end.
    #[error(
        "the reduction went from batch size {from} to {to}; it has to return less than it was given"
    )]
    NotReduced {
        /// The size that did not fit.
        from: usize,
        /// What the reduction made of it.
        to: usize,
    },

    /// The function failed for another reason than memory.
    #[error(transparent)]
    Failed(E),
}

/// The outcome of a search: what fits, and what the function returned for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found<B, T> {
    /// The batch size, or plan, that fits.
    pub batch: B,
    /// What the function returned for it.
    pub value: T,
}

/// Calls `function` with `starting_batch_size` and, each time that memory runs out, with half of
/// the size before (Accelerate's `find_executable_batch_size`, which takes off a tenth).
///
/// Memory running out is told by the error ([`overdrive_sys::is_out_of_memory`], on CUDA, on a CPU,
/// and under [`overdrive_sys::memory::set_limit`]), by its text, or by a panic with libtorch's
/// message, since most calls of tch panic. Other errors and panics pass through. Between tries the caches of all
/// devices are emptied; what `function` left allocated outside itself, gradients above all, stays,
/// so let it make, or clear, what it needs.
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
) -> Result<Found<usize, T>, SearchError<E>> {
    find_executable_batch_size_with(
        starting_batch_size,
        |size| size / 2,
        out_of_memory,
        function,
    )
}

/// [`find_executable_batch_size`] with a reduction of the caller's, and for error types that are
/// no [`std::error::Error`] (`anyhow::Error`).
///
/// `out_of_memory` returns the message of an error that a smaller batch would cure.
///
/// # Errors
/// [`SearchError`].
pub fn find_executable_batch_size_with<T, E>(
    starting_batch_size: usize,
    mut reduce: impl FnMut(usize) -> usize,
    out_of_memory: impl Fn(&E) -> Option<String>,
    function: impl FnMut(usize) -> Result<T, E>,
) -> Result<Found<usize, T>, SearchError<E>> {
    if starting_batch_size == 0 {
        return Err(SearchError::StartsAtZero);
    }
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

/// [`find_executable_batch_size`] over plans of the same effective batch: each try has a
/// micro-batch of at most half, and correspondingly more accumulation steps.
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
) -> Result<Found<BatchPlan, T>, SearchError<E>> {
    let size = |plan: BatchPlan| usize::try_from(plan.micro_batch()).unwrap_or(usize::MAX);
    search(
        plan,
        |plan| Ok(plan.halved()),
        size,
        out_of_memory,
        function,
    )
}

/// Tries `batch`, then whatever `next` makes of it until it says `None`.
fn search<B: Copy, T, E>(
    mut batch: B,
    mut next: impl FnMut(B) -> Result<Option<B>, SearchError<E>>,
    size: impl Fn(B) -> usize,
    out_of_memory: impl Fn(&E) -> Option<String>,
    mut function: impl FnMut(B) -> Result<T, E>,
) -> Result<Found<B, T>, SearchError<E>> {
    let mut tried = Vec::new();
    loop {
        tried.push(size(batch));
        // What a caught panic leaves behind is the function's own; it starts over with less.
        let last = match catch_unwind(AssertUnwindSafe(|| function(batch))) {
            Ok(Ok(value)) => return Ok(Found { batch, value }),
            Ok(Err(error)) => match out_of_memory(&error) {
                Some(message) => message,
                None => return Err(SearchError::Failed(error)),
            },
            Err(payload) => match panicked_out_of_memory(payload.as_ref()) {
                Some(message) => message,
                None => resume_unwind(payload),
            },
        };
        empty_caches();
        match next(batch)? {
            Some(smaller) => batch = smaller,
            None => return Err(SearchError::NothingFits { tried, last }),
        }
    }
}

/// The message of an error that says memory ran out, itself or by an error it came from.
fn out_of_memory<E: StdError + 'static>(error: &E) -> Option<String> {
    // Wrappers marked `transparent` hide the error in them from the chain of sources, but not its
    // text.
    let message = error.to_string();
    if is_out_of_memory(error) {
        Some(first_line(&message))
    } else {
        in_words(&message)
    }
}

/// The message of a panic that tch raised because memory ran out.
fn panicked_out_of_memory(payload: &(dyn Any + Send)) -> Option<String> {
    let message = payload
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| payload.downcast_ref::<&str>().copied())?;
    in_words(message)
}

/// Whether a message has libtorch's words for memory running out.
fn in_words(message: &str) -> Option<String> {
    let as_error = TchError::Torch(message.to_string());
    is_out_of_memory(&as_error).then(|| first_line(message))
}

/// Without the C++ stack that libtorch appends.
fn first_line(message: &str) -> String {
    message.lines().next().unwrap_or_default().to_string()
}

/// Gives cached memory back, so that the next try starts unfragmented. It can only help: where it
/// fails (a device that was never used), the next try tells.
fn empty_caches() {
    let _ = memory::empty_cache(Device::Cpu);
    if tch::Cuda::is_available() {
        let _ = memory::empty_cache(Device::Cuda(0));
    }
}
