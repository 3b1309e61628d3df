use std::marker::PhantomData;
use std::ptr;
use std::sync::atomic::Ordering;

use super::ffi;
use crate::cuda::CAPTURES;
use crate::error::{Error, Result, check};

/// A CUDA graph (`at::cuda::CUDAGraph`) with its own stream.
///
/// Captured work does not run: its kernels are recorded with their arguments and addresses, and a replay
/// launches all of them with one call. Tensors that captured work creates are allocated in the graph's pool.
#[derive(Debug)]
pub struct Graph {
    raw: *mut ffi::RawGraph,
    pool_bytes: u64,
}

// SAFETY: the graph is not bound to a thread, because each call restores the thread's stream. It is not
// `Sync`, because libtorch's graph has no lock.
unsafe impl Send for Graph {}

/// The error of a capture.
#[derive(Debug)]
#[non_exhaustive]
pub enum CaptureError<E> {
    /// The work returned an error. libtorch reports operations that cannot be captured in this way.
    Work(E),
    /// CUDA or libtorch failed outside of the work.
    Torch(Error),
}

impl<E> From<Error> for CaptureError<E> {
    fn from(error: Error) -> Self {
        CaptureError::Torch(error)
    }
}

impl Graph {
    /// Creates an empty graph for the CUDA device `device`.
    ///
    /// # Errors
    /// [`Error::NotFound`] if there is no such device; [`Error::Torch`] if the loaded libtorch_cuda has
    /// another version than the one that this crate was built for.
    pub fn new(device: usize) -> Result<Self> {
        let index = i32::try_from(device).unwrap_or(i32::MAX);
        let mut raw = ptr::null_mut();
        // SAFETY: written only on success.
        let status = unsafe { ffi::od_graph_new(index, &raw mut raw) };
        check(status, "creating a CUDA graph")?;
        Ok(Graph { raw, pool_bytes: 0 })
    }

    /// Runs `work` on the graph's stream without capturing it. A first run is needed, because the set-up of
    /// libraries and their workspaces cannot be captured.
    ///
    /// # Errors
    /// As [`Graph::capture`].
    pub fn warm_up<T, E>(
        &mut self,
        work: impl FnOnce() -> std::result::Result<T, E>,
    ) -> std::result::Result<T, CaptureError<E>> {
        let stream = StreamGuard::enter(self.raw)?;
        let done = work().map_err(CaptureError::Work)?;
        stream.leave()?;
        Ok(done)
    }

    /// Captures one run of `work`. With `pool_of`, memory comes from that graph's pool: the two graphs
    /// must be replayed in the order of their captures and never at the same time.
    ///
    /// # Errors
    /// The error of `work`, which is CUDA's for an operation that cannot be captured;
    /// [`CaptureError::Torch`] if the graph cannot be instantiated. The graph is empty after an error.
    pub fn capture<T, E>(
        &mut self,
        pool_of: Option<&Graph>,
        work: impl FnOnce() -> std::result::Result<T, E>,
    ) -> std::result::Result<T, CaptureError<E>> {
        let operation = "capturing a CUDA graph";
        let stream = StreamGuard::enter(self.raw)?;
        let pool = pool_of.map_or(ptr::null(), |graph| graph.raw.cast_const());
        // SAFETY: both graphs are alive.
        check(unsafe { ffi::od_graph_begin(self.raw, pool) }, operation)?;
        let capture = CaptureGuard::enter(self.raw);
        let done = work().map_err(CaptureError::Work)?;
        // SAFETY: the graph is alive; the bytes are written only on success.
        let status = unsafe { ffi::od_graph_end(self.raw, &raw mut self.pool_bytes) };
        check(status, operation)?;
        drop(capture);
        stream.leave()?;
        Ok(done)
    }

    /// Launches the captured work on this thread's current stream. Returns before the work is done.
    ///
    /// # Errors
    /// [`Error::BadArgument`] if nothing was captured; [`Error::Torch`] with CUDA's error.
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
    /// [`Error::Torch`] with the error of the device.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the graph is alive.
        let status = unsafe { ffi::od_graph_synchronize(self.raw) };
        check(status, "waiting for a CUDA graph")
    }

    /// Returns the bytes that the graph's pool took from the device during the capture. They are reserved as
    /// long as the graph or one of its tensors lives.
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

/// Checks that the loaded CUDA library has every function that a [`Graph`] calls.
///
/// # Errors
/// [`Error::Torch`] with the name of the first missing function; without a CUDA library all are missing.
pub fn graph_functions() -> Result<()> {
    // SAFETY: no arguments.
    check(unsafe { ffi::od_graph_symbols() }, "looking up CUDA graphs")
}

/// A guard that makes the graph's stream the current stream of this thread. The previous stream is
/// restored when it is dropped, also by a panic.
struct StreamGuard {
    raw: *mut ffi::RawGraph,
    /// Makes the guard `!Send`: the current stream is thread-local.
    _thread: PhantomData<*const ()>,
}

impl StreamGuard {
    fn enter(raw: *mut ffi::RawGraph) -> Result<Self> {
        // SAFETY: the graph is alive, and outlives the guard in the functions above.
        check(unsafe { ffi::od_graph_enter(raw) }, "changing the stream")?;
        Ok(StreamGuard {
            raw,
            _thread: PhantomData,
        })
    }

    fn leave(self) -> Result<()> {
        let raw = self.raw;
        // `Drop` would leave the stream a second time, and without reporting an error.
        std::mem::forget(self);
        // SAFETY: as in `enter`.
        check(
            unsafe { ffi::od_graph_leave(raw) },
            "changing the stream back",
        )
    }
}

impl Drop for StreamGuard {
    fn drop(&mut self) {
        // The guard is dropped because of an error or a panic, which is the one to report.
        // SAFETY: as in `enter`.
        let _ = check(
            unsafe { ffi::od_graph_leave(self.raw) },
            "changing the stream back",
        );
    }
}

/// A guard that ends a capture whose work failed.
struct CaptureGuard(*mut ffi::RawGraph);

impl CaptureGuard {
    fn enter(raw: *mut ffi::RawGraph) -> Self {
        CAPTURES.fetch_add(1, Ordering::SeqCst);
        Self(raw)
    }
}

impl Drop for CaptureGuard {
    fn drop(&mut self) {
        CAPTURES.fetch_sub(1, Ordering::SeqCst);
        // SAFETY: the graph is alive; the call has no effect after a capture that has ended.
        unsafe { ffi::od_graph_abort(self.0) }
    }
}
