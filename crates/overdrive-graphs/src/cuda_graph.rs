//! A CUDA graph: work that is captured once and replayed.

use overdrive_sys::compiled::{CaptureError, Graph};
use tch::Device;

use crate::error::cuda_index;
use crate::{Error, Result};

/// The error of captured work: any error.
pub type WorkError = Box<dyn std::error::Error + Send + Sync>;

/// Options of a capture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CaptureOptions {
    /// The number of warm-up runs before the capture, since the setup of a first run cannot be captured. Default 3,
    /// as PyTorch recommends.
    pub warm_ups: usize,
}

impl Default for CaptureOptions {
    fn default() -> Self {
        CaptureOptions { warm_ups: 3 }
    }
}

/// GPU work that is replayed with one call: `torch.cuda.CUDAGraph`.
///
/// A replay launches every captured kernel with the arguments and addresses that it had in the capture. This saves the
/// host's overhead (dispatch, allocation, launches), which matters when kernels are short, as in decoding. Copy new
/// inputs into the tensors that the work read in the capture; each replay overwrites the tensors that the capture
/// returned.
///
/// ```
/// use overdrive_graphs::{CaptureOptions, CudaGraph, Error};
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = Device::cuda_if_available();
/// let mut input = Tensor::f_zeros([4], (Kind::Float, device))?;
/// let seen = input.shallow_clone();
/// match CudaGraph::capture(device, CaptureOptions::default(), || seen.f_mul_scalar(2.0)) {
///     Ok(graph) => {
///         input.f_fill_(21.0)?;
///         assert_eq!(graph.replay()?.double_value(&[0]), 42.0);
///     }
///     Err(error @ Error::NeedsCuda { .. }) => println!("{error}"),
///     Err(other) => return Err(other.into()),
/// }
/// # Ok(())
/// # }
/// ```
pub struct CudaGraph<'w, T> {
    // Fields are dropped in order: the graph before what it uses.
    graph: BareGraph<T>,
    /// The work, which keeps the tensors that a replay reads and writes alive.
    _work: Box<dyn KeepAlive + 'w>,
}

/// A value that is only kept alive. (`dyn Any` would need `'static`.)
trait KeepAlive {}
impl<T> KeepAlive for T {}

impl<T: std::fmt::Debug> std::fmt::Debug for CudaGraph<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaGraph")
            .field("graph", &self.graph)
            .finish_non_exhaustive()
    }
}

impl<'w, T> CudaGraph<'w, T> {
    /// Runs `work` [`CaptureOptions::warm_ups`] times, then captures it on a separate stream with a memory pool of its
    /// own. The graph keeps the result, whose tensors each replay fills, and the work itself: the tensors that the work
    /// reads must keep their memory as long as the graph is replayed.
    ///
    /// The work must not read the result of a kernel on the host (`double_value`, a length, a branch on a value), nor
    /// create a tensor from host memory: both wait for the device, which captured work cannot do.
    ///
    /// # Errors
    /// [`Error::NeedsCuda`] if `device` is not a CUDA device, [`Error::Work`] if the work fails in a warm-up,
    /// [`Error::CannotCapture`] if it fails only in the capture.
    pub fn capture<E: Into<WorkError>>(
        device: Device,
        options: CaptureOptions,
        work: impl FnMut() -> std::result::Result<T, E> + 'w,
    ) -> Result<Self> {
        Self::capture_and_keep(device, options, None, work)
    }

    /// Captures work like [`capture`](CudaGraph::capture), with memory from the pool of `other`. It is for graphs that
    /// never run at the same time, such as one for each batch size: together they take the memory of the largest. A
    /// replay of one overwrites the outputs of the other, and `other` must live as long as this graph is replayed.
    ///
    /// # Errors
    /// As for [`capture`](CudaGraph::capture).
    pub fn capture_in_pool_of<U, E: Into<WorkError>>(
        other: &CudaGraph<'_, U>,
        device: Device,
        options: CaptureOptions,
        work: impl FnMut() -> std::result::Result<T, E> + 'w,
    ) -> Result<Self> {
        Self::capture_and_keep(device, options, Some(&other.graph.graph), work)
    }

    fn capture_and_keep<E: Into<WorkError>>(
        device: Device,
        options: CaptureOptions,
        pool: Option<&Graph>,
        mut work: impl FnMut() -> std::result::Result<T, E> + 'w,
    ) -> Result<Self> {
        Ok(CudaGraph {
            graph: captured(device, options, pool, &mut work)?,
            _work: Box::new(work),
        })
    }

    /// Replays the work. Returns before the device has finished it, like any operation on a GPU.
    ///
    /// # Errors
    /// Errors of libtorch.
    pub fn replay(&self) -> Result<&T> {
        self.graph.replay()
    }

    /// Returns the result of the work, whose tensors each replay overwrites.
    pub fn outputs(&self) -> &T {
        &self.graph.outputs
    }

    /// Returns the number of bytes that the graph's pool allocated on the device and holds as long as the graph lives;
    /// 0 for a graph that fits into the pool of another.
    pub fn pool_bytes(&self) -> u64 {
        self.graph.pool_bytes()
    }

    /// Waits for the device.
    ///
    /// # Errors
    /// Errors of the work on the device.
    pub fn synchronize(&self) -> Result<()> {
        Ok(self.graph.graph.synchronize()?)
    }
}

/// A [`CudaGraph`] without the work that it was captured from, which can be stored beside what the work borrows. Its
/// owner must keep every tensor that the work reads or writes alive as long as the graph is replayed: otherwise a
/// replay would use memory that was freed. Unlike a `CudaGraph`, it can be sent to another thread.
#[derive(Debug)]
pub struct BareGraph<T> {
    // Fields are dropped in order: the outputs before the graph that owns their memory pool.
    outputs: T,
    graph: Graph,
}

impl<T> BareGraph<T> {
    /// Captures work like [`CudaGraph::capture`], or like [`CudaGraph::capture_in_pool_of`] another graph.
    ///
    /// # Errors
    /// As for [`CudaGraph::capture`].
    pub fn capture<E: Into<WorkError>>(
        device: Device,
        options: CaptureOptions,
        pool_of: Option<&BareGraph<T>>,
        work: impl FnMut() -> std::result::Result<T, E>,
    ) -> Result<Self> {
        captured(device, options, pool_of.map(|other| &other.graph), work)
    }

    /// Replays the work. Returns before the device has finished it.
    ///
    /// # Errors
    /// Errors of libtorch.
    pub fn replay(&self) -> Result<&T> {
        self.graph.replay()?;
        Ok(&self.outputs)
    }

    /// Returns the number of bytes that the graph's pool allocated on the device; 0 if it fits into another's pool.
    pub fn pool_bytes(&self) -> u64 {
        self.graph.pool_bytes()
    }
}

fn captured<T, E: Into<WorkError>>(
    device: Device,
    options: CaptureOptions,
    pool: Option<&Graph>,
    mut work: impl FnMut() -> std::result::Result<T, E>,
) -> Result<BareGraph<T>> {
    let mut graph = Graph::new(cuda_index(device)?)?;
    for _ in 0..options.warm_ups {
        graph.warm_up(&mut work).map_err(|error| match error {
            CaptureError::Work(source) => Error::Work {
                source: source.into(),
            },
            other => torch_error(other),
        })?;
    }
    let outputs = graph.capture(pool, work).map_err(|error| match error {
        CaptureError::Work(source) => Error::CannotCapture {
            source: source.into(),
        },
        CaptureError::Torch(source) => Error::CannotCapture {
            source: Box::new(source),
        },
        other => torch_error(other),
    })?;
    Ok(BareGraph { outputs, graph })
}

fn torch_error<E: Into<WorkError>>(error: CaptureError<E>) -> Error {
    match error {
        CaptureError::Torch(source) => Error::Sys(source),
        CaptureError::Work(source) => Error::Work {
            source: source.into(),
        },
        // `CaptureError` is non-exhaustive.
        _ => Error::Work {
            source: "a capture failed for an unknown reason".into(),
        },
    }
}
