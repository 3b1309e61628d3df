use std::marker::PhantomData;
use std::ptr;

use super::ffi;
use crate::error::{Error, Result, check};

/// A CUDA graph: `at::cuda::CUDAGraph`, with a stream of its own.
///
/// Work that is captured is not done, but recorded, kernel by kernel with their arguments and addresses;
/// a replay does all of it with one call. Tensors that captured work makes lie in a pool of the graph's.
#[derive(Debug)]
pub struct Graph {
    raw: *mut ffi::RawGraph,
    pool_bytes: u64,
}

// SAFETY: the graph belongs to no thread: streams are put back within each call. It is not `Sync`:
// libtorch's graph has no lock.
unsafe impl Send for Graph {}

/// Why a capture failed.
#[derive(Debug)]
#[non_exhaustive]
pub enum CaptureError<E> {
    /// The work itself returned an error. During a capture libtorch fails so for what cannot be
    /// captured.
    Work(E),
    /// CUDA or libtorch refused.
    Torch(Error),
}

impl<E> From<Error> for CaptureError<E> {
    fn from(error: Error) -> Self {
        CaptureError::Torch(error)
    }
}

impl Graph {
    /// An empty graph for the CUDA device `device`.
    ///
    /// # Errors
    /// [`Error::NotFound`] where there is no such device; [`Error::Torch`] for another libtorch_cuda
    /// than the one this was built for.
    pub fn new(device: usize) -> Result<Self> {
        let index = i32::try_from(device).unwrap_or(i32::MAX);
        let mut raw = ptr::null_mut();
        // SAFETY: written only on success.
        let status = unsafe { ffi::od_graph_new(index, &raw mut raw) };
        check(status, "making a CUDA graph")?;
        Ok(Graph { raw, pool_bytes: 0 })
    }

    /// Runs `work` on the graph's stream, as for a capture, but for real: what a first run sets up
    /// (libraries, their workspaces) cannot be captured.
    ///
    /// # Errors
    /// As [`Graph::capture`].
    pub fn warm_up<T, E>(
        &mut self,
        work: impl FnOnce() -> std::result::Result<T, E>,
    ) -> std::result::Result<T, CaptureError<E>> {
        let stream = OnStream::enter(self.raw)?;
        let done = work().map_err(CaptureError::Work)?;
        stream.leave()?;
        Ok(done)
    }

    /// Captures `work`, once. With `pool_of`, memory comes out of that graph's pool: the two must be
    /// replayed in this order and never at the same time.
    ///
    /// # Errors
    /// What `work` returned, which for an operation that cannot be captured is CUDA's error; or
    /// [`CaptureError::Torch`] if the graph cannot be made of what was captured. The graph is empty then.
    pub fn capture<T, E>(
        &mut self,
        pool_of: Option<&Graph>,
        work: impl FnOnce() -> std::result::Result<T, E>,
    ) -> std::result::Result<T, CaptureError<E>> {
        let operation = "capturing a CUDA graph";
        let stream = OnStream::enter(self.raw)?;
        let pool = pool_of.map_or(ptr::null(), |graph| graph.raw.cast_const());
        // SAFETY: both graphs are alive.
        check(unsafe { ffi::od_graph_begin(self.raw, pool) }, operation)?;
        let open = Open(self.raw);
        let done = work().map_err(CaptureError::Work)?;
        // SAFETY: the graph is alive; the bytes are written only on success.
        let status = unsafe { ffi::od_graph_end(self.raw, &raw mut self.pool_bytes) };
        check(status, operation)?;
        drop(open);
        stream.leave()?;
        Ok(done)
    }

    /// Does the captured work again, on this thread's current stream. Returns before it is done.
    ///
    /// # Errors
    /// [`Error::BadArgument`] if nothing was captured; [`Error::Torch`] if CUDA refuses.
    pub fn replay(&self) -> Result<()> {
        // SAFETY: the graph is alive.
        check(
            unsafe { ffi::od_graph_replay(self.raw) },
            "replaying a CUDA graph",
        )
    }

    /// Waits for all work of the device.
    ///
    /// # Errors
    /// [`Error::Torch`] with what went wrong on the device.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the graph is alive.
        let status = unsafe { ffi::od_graph_synchronize(self.raw) };
        check(status, "waiting for a CUDA graph")
    }

    /// Bytes that the graph's pool took from the device when it was captured. They stay taken as long as
    /// the graph or a tensor of it lives.
    pub fn pool_bytes(&self) -> u64 {
        self.pool_bytes
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: owned by `self`, freed once.
        unsafe { ffi::od_graph_free(self.raw) }
    }
}

/// Whether the CUDA library that is loaded has every function that a [`Graph`] calls.
///
/// # Errors
/// [`Error::Torch`] naming the first that is missing; without a CUDA library that is the first of all.
pub fn graph_functions() -> Result<()> {
    // SAFETY: no arguments.
    check(unsafe { ffi::od_graph_symbols() }, "looking up CUDA graphs")
}

/// While it lives, the graph's stream is this thread's. The stream before comes back also when the work
/// panics.
struct OnStream {
    raw: *mut ffi::RawGraph,
    /// Streams belong to threads.
    _thread: PhantomData<*const ()>,
}

impl OnStream {
    fn enter(raw: *mut ffi::RawGraph) -> Result<Self> {
        // SAFETY: the graph is alive, and outlives the guard within the functions above.
        check(unsafe { ffi::od_graph_enter(raw) }, "changing the stream")?;
        Ok(OnStream {
            raw,
            _thread: PhantomData,
        })
    }

    fn leave(self) -> Result<()> {
        let raw = self.raw;
        std::mem::forget(self);
        // SAFETY: as in `enter`.
        check(
            unsafe { ffi::od_graph_leave(raw) },
            "changing the stream back",
        )
    }
}

impl Drop for OnStream {
    fn drop(&mut self) {
        // An error is under way already, or a panic: this one has no one to go to.
        // SAFETY: as in `enter`.
        let _ = check(
            unsafe { ffi::od_graph_leave(self.raw) },
            "changing the stream back",
        );
    }
}

/// A capture that has begun; ends it if the work failed.
struct Open(*mut ffi::RawGraph);

impl Drop for Open {
    fn drop(&mut self) {
        // SAFETY: the graph is alive; nothing happens after a capture that has ended.
        unsafe { ffi::od_graph_abort(self.0) }
    }
}
