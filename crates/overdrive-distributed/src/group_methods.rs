//! The collectives as methods of a group, under the names of `torch.distributed`.
//!
//! Each collective blocks until it is complete, for at most [`ProcessGroup::timeout`] or the time given to
//! [`ProcessGroup::with_timeout`]; those whose names end in `_async` return a [`Pending`] instead. All ranks
//! call the same collectives in the same order. Results are written into the memory of the given tensors; a
//! tensor that is not contiguous is copied in and out.

use std::time::Duration;

use tch::Tensor;

use crate::group_config::MAX_TIMEOUT;
use crate::{GroupCalls, Pending, ProcessGroup, ReduceOp, Result};

/// Declares the collectives once and forwards those of [`ProcessGroup`] to [`GroupCalls`].
macro_rules! collectives {
    ($($(#[$doc:meta])* fn $name:ident(&self $(, $argument:ident: $type:ty)*) -> $result:ty;)*) => {
        impl ProcessGroup {
            /// Returns the collectives of this group with `timeout` in place of the group's own.
            #[must_use]
            pub fn with_timeout(&self, timeout: Duration) -> GroupCalls<'_> {
                GroupCalls { group: self, timeout: Some(timeout.min(MAX_TIMEOUT)), unchecked: false }
            }

            fn with_default_timeout(&self) -> GroupCalls<'_> {
                GroupCalls { group: self, timeout: None, unchecked: false }
            }

            $($(#[$doc])*
            pub fn $name(&self $(, $argument: $type)*) -> $result {
                self.with_default_timeout().$name($($argument),*)
            })*
        }
    };
}

collectives! {
    /// Reduces the tensors of all ranks, in place; every rank gets the result.
    ///
    /// # Errors
    /// [`Error::Collective`](crate::Error::Collective) with the rank at fault; errors of libtorch about the tensor.
    ///
    /// ```
    /// use overdrive_distributed::{ProcessGroup, ReduceOp};
    /// use tch::Tensor;
    ///
    /// let group = ProcessGroup::single();
    /// let loss = Tensor::from(2.5);
    /// group.all_reduce(&loss, ReduceOp::Avg)?; // the mean over all ranks; here there is one
    /// assert_eq!(loss.double_value(&[]), 2.5);
    /// # Ok::<(), overdrive_distributed::Error>(())
    /// ```
    fn all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<()>;
    /// Starts an [`all_reduce`](Self::all_reduce) without waiting for it.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce); errors of the peers are returned by [`Pending::wait`].
    fn all_reduce_async(&self, tensor: &Tensor, op: ReduceOp) -> Result<Pending>;
    /// Copies the tensor of rank `root` into the tensors of all ranks.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<()>;
    /// Starts a [`broadcast`](Self::broadcast) without waiting for it.
    ///
    /// # Errors
    /// As [`all_reduce_async`](Self::all_reduce_async).
    fn broadcast_async(&self, tensor: &Tensor, root: usize) -> Result<Pending>;
    /// Reduces the tensors of all ranks into that of rank `root`; afterwards the values of the others are undefined.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    fn reduce(&self, tensor: &Tensor, op: ReduceOp, root: usize) -> Result<()>;
    /// Returns the tensors of all ranks, in rank order. All have the same shape and dtype.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    fn all_gather(&self, tensor: &Tensor) -> Result<Vec<Tensor>>;
    /// Reduces `(world_size × n, …)` tensors and returns this rank's `(n, …)` chunk.
    ///
    /// # Errors
    /// [`overdrive_core::Error::Shape`] if the first dimension is not a multiple of the world size; else as
    /// [`all_reduce`](Self::all_reduce).
    fn reduce_scatter(&self, tensor: &Tensor, op: ReduceOp) -> Result<Tensor>;
    /// Returns the tensors of all ranks at rank `root`, in rank order, and `None` on the other ranks.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    fn gather(&self, tensor: &Tensor, root: usize) -> Result<Option<Vec<Tensor>>>;
    /// Writes tensor k of rank `root` to `output` of rank k. The other ranks pass no tensors.
    ///
    /// # Errors
    /// [`overdrive_core::Error::InvalidOption`] if `root` does not have one tensor per rank; else as
    /// [`all_reduce`](Self::all_reduce).
    fn scatter(&self, tensors: &[Tensor], output: &Tensor, root: usize) -> Result<()>;
    /// Sends chunk k of `(world_size × n, …)` to rank k; the received chunks are in rank order.
    ///
    /// # Errors
    /// As [`reduce_scatter`](Self::reduce_scatter).
    fn all_to_all(&self, tensor: &Tensor) -> Result<Tensor>;
    /// Sends a tensor to rank `to`, which receives it with the same tag.
    ///
    /// # Errors
    /// [`overdrive_core::Error::InvalidOption`] if `to` is this rank; else as [`all_reduce`](Self::all_reduce).
    fn send(&self, tensor: &Tensor, to: usize, tag: i32) -> Result<()>;
    /// Receives from rank `from` into a tensor of the same shape and dtype.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    fn recv(&self, tensor: &Tensor, from: usize, tag: i32) -> Result<()>;
    /// Blocks until all ranks have called it.
    ///
    /// # Errors
    /// [`Error::Collective`](crate::Error::Collective) with the ranks that did not call it.
    fn barrier(&self) -> Result<()>;
    /// Returns the bytes of all ranks, in rank order; the lengths may differ.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>>;
    /// Returns the bytes of rank `root` on every rank.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    fn broadcast_bytes(&self, bytes: &[u8], root: usize) -> Result<Vec<u8>>;
}
