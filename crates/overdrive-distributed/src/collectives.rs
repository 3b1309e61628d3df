//! The collectives of a group, by the names of `torch.distributed`.
//!
//! Each waits until it is done, at most [`ProcessGroup::timeout`] or the time given to
//! [`ProcessGroup::within`]; those whose name ends in `_async` return a [`Pending`] instead. All ranks call
//! the same collectives in the same order. Results are written into the tensors given, which keep their
//! memory; a tensor that is not contiguous is copied in and out.

use std::time::Duration;

use tch::Tensor;

use crate::{Pending, ProcessGroup, Result, Within};

/// How values of several ranks become one (`torch.distributed.ReduceOp`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReduceOp {
    /// Their sum.
    Sum,
    /// Their mean. Of whole numbers it is rounded towards nought.
    Avg,
    /// The least.
    Min,
    /// The greatest.
    Max,
    /// Their product.
    Product,
}

/// The collectives, written once for [`ProcessGroup`] and [`Within`].
macro_rules! collectives {
    ($($(#[$doc:meta])* fn $name:ident(&self $(, $argument:ident: $type:ty)*) -> $result:ty;)*) => {
        impl ProcessGroup {
            /// The same collectives, each of which may take `timeout`.
            #[must_use]
            pub fn within(&self, timeout: Duration) -> Within<'_> {
                Within { group: self, timeout: Some(timeout), unchecked: false }
            }

            fn by_default(&self) -> Within<'_> {
                Within { group: self, timeout: None, unchecked: false }
            }

            $($(#[$doc])*
            pub fn $name(&self $(, $argument: $type)*) -> $result {
                self.by_default().$name($($argument),*)
            })*
        }
    };
}

collectives! {
    /// Reduces a tensor of each rank into all of them, in place.
    ///
    /// # Errors
    /// [`Error::Collective`](crate::Error::Collective) naming the rank at fault; what libtorch says of the tensor.
    ///
    /// ```
    /// use overdrive_distributed::{ProcessGroup, ReduceOp};
    /// use tch::Tensor;
    ///
    /// let group = ProcessGroup::single();
    /// let loss = Tensor::from(2.5);
    /// group.all_reduce(&loss, ReduceOp::Avg)?; // the mean over all ranks: here there is one
    /// assert_eq!(loss.double_value(&[]), 2.5);
    /// # Ok::<(), overdrive_distributed::Error>(())
    /// ```
    fn all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<()>;
    /// [`all_reduce`](Self::all_reduce) without waiting.
    ///
    /// # Errors
    /// As there; those of the peers come from [`Pending::wait`].
    fn all_reduce_async(&self, tensor: &Tensor, op: ReduceOp) -> Result<Pending>;
    /// Copies the tensor of rank `root` into everyone's.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<()>;
    /// [`broadcast`](Self::broadcast) without waiting.
    ///
    /// # Errors
    /// As [`all_reduce_async`](Self::all_reduce_async).
    fn broadcast_async(&self, tensor: &Tensor, root: usize) -> Result<Pending>;
    /// Reduces a tensor of each rank into that of rank `root`; the others' values are worthless after.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    fn reduce(&self, tensor: &Tensor, op: ReduceOp, root: usize) -> Result<()>;
    /// Everyone's tensor, in the order of the ranks. All have the same shape and dtype.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    fn all_gather(&self, tensor: &Tensor) -> Result<Vec<Tensor>>;
    /// Reduces `(world_size × n, …)` tensors and gives each rank its `(n, …)` part.
    ///
    /// # Errors
    /// [`Error::InvalidTensor`](crate::Error::InvalidTensor) if the first dimension is not a multiple of the world size; else as
    /// [`all_reduce`](Self::all_reduce).
    fn reduce_scatter(&self, tensor: &Tensor, op: ReduceOp) -> Result<Tensor>;
    /// Everyone's tensor at rank `root`, in the order of the ranks; nothing elsewhere.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    fn gather(&self, tensor: &Tensor, root: usize) -> Result<Option<Vec<Tensor>>>;
    /// Gives rank k tensor k of rank `root`, written to `output`. The others pass no tensors.
    ///
    /// # Errors
    /// [`Error::InvalidTensor`](crate::Error::InvalidTensor) if `root` has another number of tensors than there are ranks; else as
    /// [`all_reduce`](Self::all_reduce).
    fn scatter(&self, tensors: &[Tensor], output: &Tensor, root: usize) -> Result<()>;
    /// Part k of `(world_size × n, …)` goes to rank k; the parts of all come in the order of the ranks.
    ///
    /// # Errors
    /// As [`reduce_scatter`](Self::reduce_scatter).
    fn all_to_all(&self, tensor: &Tensor) -> Result<Tensor>;
    /// Sends to rank `to`, which receives with the same tag.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for this rank itself; else as [`all_reduce`](Self::all_reduce).
    fn send(&self, tensor: &Tensor, to: usize, tag: i32) -> Result<()>;
    /// Receives from rank `from` into a tensor of the same shape and dtype.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    fn recv(&self, tensor: &Tensor, from: usize, tag: i32) -> Result<()>;
    /// Waits until all ranks are here.
    ///
    /// # Errors
    /// [`Error::Collective`](crate::Error::Collective) naming the ranks that did not come.
    fn barrier(&self) -> Result<()>;
    /// Everyone's bytes, in the order of the ranks; lengths may differ.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>>;
    /// The bytes of rank `root`, everywhere.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    fn broadcast_bytes(&self, bytes: &[u8], root: usize) -> Result<Vec<u8>>;
}
