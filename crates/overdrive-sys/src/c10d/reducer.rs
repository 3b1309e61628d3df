//! The reducer that averages gradients over the ranks while backward runs.

use std::ptr;
use std::sync::Arc;

use tch::{Kind, Tensor};

use super::{Group, c_strings, ffi, handles, pointers};
use crate::device;
use crate::error::{Error, Result, check};

/// The options of a [`Reducer`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReducerOptions {
    /// The bytes of gradients that are reduced together.
    pub bucket_bytes: usize,
    /// The bytes of the first bucket. A small one lets the first reduction start early.
    pub first_bucket_bytes: usize,
    /// If `true`, the reducer searches the graph for parameters that a backward pass will not reach.
    pub find_unused_parameters: bool,
    /// If `true`, every backward pass uses the same parameters as often as the first one.
    pub static_graph: bool,
    /// If `true`, gradients share memory with the buckets.
    pub gradient_as_bucket_view: bool,
    /// The dtype in which gradients are sent; `None` for their own.
    pub compression: Option<Kind>,
}

/// libtorch's `c10d::Reducer`: hooks on parameters that reduce each bucket of gradients as soon as
/// backward has filled it.
#[derive(Debug)]
pub struct Reducer {
    raw: *mut ffi::RawReducer,
    parameters: usize,
    /// The hooks use the group until the reducer is freed.
    _group: Arc<Group>,
}

// SAFETY: libtorch's reducer has a lock, and its hooks already run on the threads of backward.
unsafe impl Send for Reducer {}

impl Reducer {
    /// Registers hooks on the parameters. All ranks must pass the same shapes in the same order.
    ///
    /// # Errors
    /// [`Error::BadArgument`] if the numbers of names and parameters differ; [`Error::Common`] for a
    /// compression dtype that is not a floating-point one; [`Error::Torch`] for parameters that libtorch
    /// cannot put into buckets.
    pub fn new(
        group: Arc<Group>,
        names: &[String],
        parameters: &[Tensor],
        options: ReducerOptions,
    ) -> Result<Self> {
        let operation = "creating a gradient reducer";
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
            static_graph: i32::from(options.static_graph),
            gradient_as_bucket_view: i32::from(options.gradient_as_bucket_view),
            compression: match options.compression {
                None => 0,
                Some(kind) => device::scalar_type(kind).ok_or_else(|| {
                    let given = format!("{kind:?}");
                    overdrive_core::Error::option("compression", given, "a floating-point dtype")
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

    /// Must be called before a forward pass whose gradients will be reduced.
    ///
    /// # Errors
    /// [`Error::Torch`] if libtorch throws.
    pub fn prepare_for_forward(&self) -> Result<()> {
        // SAFETY: the reducer is alive.
        let status = unsafe { ffi::od_reducer_prepare_for_forward(self.raw) };
        check(status, "preparing the reducer for forward")
    }

    /// Assigns gradients to buckets in the order in which backward produced them, once, after the first
    /// backward pass. All ranks must call this at the same point. Returns `true` if the buckets were
    /// rebuilt now.
    ///
    /// # Errors
    /// [`Error::Torch`] if the last backward pass did not reduce all parameters; its message names them.
    pub fn rebuild_buckets(&self) -> Result<bool> {
        let mut rebuilt = 0;
        // SAFETY: the reducer is alive.
        let status = unsafe { ffi::od_reducer_rebuild_buckets(self.raw, &raw mut rebuilt) };
        check(status, "rebuilding the buckets of gradients")?;
        Ok(rebuilt != 0)
    }

    /// Must be called after a forward pass whose gradients will be reduced. `outputs` are the tensors
    /// from which backward starts; they are used only with `find_unused_parameters` and
    /// `static_graph`.
    ///
    /// # Errors
    /// [`Error::Torch`] if the last backward pass did not reduce all parameters; its message names them.
    pub fn prepare_for_backward(&self, outputs: &[Tensor]) -> Result<()> {
        let outputs = handles(outputs);
        // SAFETY: the reducer and the outputs are alive.
        let status = unsafe {
            ffi::od_reducer_prepare_for_backward(self.raw, outputs.as_ptr(), outputs.len())
        };
        check(status, "preparing the reducer for backward")
    }

    /// Returns the bytes of each bucket, in the order in which the buckets are reduced.
    ///
    /// # Errors
    /// [`Error::Torch`] if libtorch throws.
    pub fn bucket_bytes(&self) -> Result<Vec<usize>> {
        let mut sizes = vec![0i64; self.parameters];
        let mut count = 0;
        // SAFETY: a reducer has at most as many buckets as parameters, for which `sizes` has room.
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
        // SAFETY: owned by `self`, freed once; its hooks are removed first.
        unsafe { ffi::od_reducer_free(self.raw) }
    }
}
