//! Gradients averaged over the ranks while backward runs.

use std::ptr;
use std::sync::Arc;

use tch::{Kind, Tensor};

use super::{Group, c_strings, ffi, handles, pointers};
use crate::device;
use crate::error::{Error, Result, check};

/// How a [`Reducer`] works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReducerOptions {
    /// Bytes of gradients that are reduced together.
    pub bucket_bytes: usize,
    /// Bytes of the first bucket.
    pub first_bucket_bytes: usize,
    /// Looks for parameters that a backward will not reach.
    pub find_unused_parameters: bool,
    /// Gradients share memory with the buckets.
    pub gradient_as_bucket_view: bool,
    /// The dtype that gradients travel in, if not their own.
    pub compression: Option<Kind>,
}

/// libtorch's `c10d::Reducer`: hooks on parameters that reduce each bucket of gradients as soon as
/// backward has filled it.
#[derive(Debug)]
pub struct Reducer {
    raw: *mut ffi::RawReducer,
    parameters: usize,
    /// Backward uses the group as long as the hooks are there.
    _group: Arc<Group>,
}

// SAFETY: libtorch's reducer has a lock, and its hooks run on whichever thread backward does.
unsafe impl Send for Reducer {}

impl Reducer {
    /// Puts hooks on the parameters. All ranks do so with the same shapes in the same order.
    ///
    /// # Errors
    /// [`Error::BadArgument`] for another number of names than of parameters; [`Error::Torch`] for
    /// parameters that no bucket can hold.
    pub fn new(
        group: Arc<Group>,
        names: &[String],
        parameters: &[Tensor],
        options: ReducerOptions,
    ) -> Result<Self> {
        let operation = "making a reducer of gradients";
        if names.len() != parameters.len() {
            return Err(Error::BadArgument {
                operation: operation.to_owned(),
                message: format!("{} names for {} parameters", names.len(), parameters.len()),
            });
        }
        let names = c_strings(names, operation)?;
        let pointers = pointers(&names);
        let tensors = handles(parameters);
        let bytes = |size: usize| i64::try_from(size).unwrap_or(i64::MAX);
        let raw_options = ffi::RawReducerOptions {
            bucket_bytes: bytes(options.bucket_bytes),
            first_bucket_bytes: bytes(options.first_bucket_bytes),
            find_unused_parameters: i32::from(options.find_unused_parameters),
            gradient_as_bucket_view: i32::from(options.gradient_as_bucket_view),
            compression: match options.compression {
                None => 0,
                Some(kind) => device::scalar_type(kind).ok_or_else(|| Error::BadArgument {
                    operation: operation.to_owned(),
                    message: format!("gradients cannot travel in {kind:?}"),
                })?,
            },
        };
        let mut raw = ptr::null_mut();
        // SAFETY: group, tensors and names are alive during the call; the shim copies what it keeps.
        let status = unsafe {
            ffi::od_reducer_new(
                group.raw,
                tensors.as_ptr(),
                pointers.as_ptr(),
                tensors.len(),
                &raw const raw_options,
                &raw mut raw,
            )
        };
        check(status, operation)?;
        Ok(Self {
            raw,
            parameters: parameters.len(),
            _group: group,
        })
    }

    /// Before a forward whose gradients will be reduced.
    ///
    /// # Errors
    /// [`Error::Torch`] if libtorch refuses.
    pub fn prepare_for_forward(&self) -> Result<()> {
        // SAFETY: the reducer is alive.
        let status = unsafe { ffi::od_reducer_prepare_for_forward(self.raw) };
        check(status, "preparing the reducer for forward")
    }

    /// Sorts gradients into buckets in the order in which they came, once, after the first backward. All
    /// ranks call this at the same point. Whether it was done now.
    ///
    /// # Errors
    /// [`Error::Torch`] if the last backward did not reduce all parameters: its words name them.
    pub fn rebuild_buckets(&self) -> Result<bool> {
        let mut rebuilt = 0;
        // SAFETY: the reducer is alive.
        let status = unsafe { ffi::od_reducer_rebuild_buckets(self.raw, &raw mut rebuilt) };
        check(status, "rebuilding the buckets of gradients")?;
        Ok(rebuilt != 0)
    }

    /// After a forward whose gradients will be reduced. `outputs` are what backward starts from; they are
    /// looked at only where unused parameters are looked for.
    ///
    /// # Errors
    /// [`Error::Torch`] if the last backward did not reduce all parameters: its words name them.
    pub fn prepare_for_backward(&self, outputs: &[Tensor]) -> Result<()> {
        let outputs = handles(outputs);
        // SAFETY: the reducer and the outputs are alive.
        let status = unsafe {
            ffi::od_reducer_prepare_for_backward(self.raw, outputs.as_ptr(), outputs.len())
        };
        check(status, "preparing the reducer for backward")
    }

    /// Bytes of each bucket, in the order in which they are reduced.
    ///
    /// # Errors
    /// [`Error::Torch`] if libtorch refuses.
    pub fn bucket_bytes(&self) -> Result<Vec<usize>> {
        let mut sizes = vec![0i64; self.parameters];
        let mut count = 0;
        // SAFETY: no reducer has more buckets than parameters; the place has that many.
        let status = unsafe {
            ffi::od_reducer_buckets(self.raw, sizes.as_mut_ptr(), sizes.len(), &raw mut count)
        };
        check(status, "reading the buckets of gradients")?;
        sizes.truncate(count);
        Ok(sizes
            .into_iter()
            .map(|size| usize::try_from(size).unwrap_or(0))
            .collect())
    }
}

impl Drop for Reducer {
    fn drop(&mut self) {
        // SAFETY: owned by `self`, freed once; its hooks go first.
        unsafe { ffi::od_reducer_free(self.raw) }
    }
}
