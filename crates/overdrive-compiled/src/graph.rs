//! Work that is captured once and replayed.

use overdrive_sys::compiled::{CaptureError, Graph};
use tch::Device;

use crate::error::cuda_index;
use crate::{Error, Result};

/// What work may fail with: any error.
pub type WorkError = Box<dyn std::error::Error + Send + Sync>;

/// How work is captured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CaptureOptions {
    /// How often the work runs for real before it is captured: what a first run sets up cannot be
    /// captured. Default 3, as PyTorch advises.
    pub warm_ups: usize,
}

impl Default for CaptureOptions {
    fn default() -> Self {
        CaptureOptions { warm_ups: 3 }
    }
}

/// A piece of GPU work as one call: `torch.cuda.CUDAGraph`.
///
/// A replay launches every kernel that was captured with the arguments and addresses that it had then,
/// in one call: nothing of the host's share of the work (dispatch, allocation, launches) is left. It pays
/// where kernels are short, as in decoding. New inputs are copied into the tensors that the work read
/// when it was captured; results are found in the tensors that it made then, which each replay
/// overwrites.
///
/// ```
/// use overdrive_compiled::{CaptureOptions, CudaGraph, Error};
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
    // Before the graph, whose pool they lie in.
    outputs: T,
    graph: Graph,
    /// The work, for the tensors that it holds: a replay reads and writes where they were.
    _work: Option<Box<dyn Keep + 'w>>,
}

/// Anything that is only kept.
trait Keep {}
impl<T> Keep for T {}

impl<T: std::fmt::Debug> std::fmt::Debug for CudaGraph<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaGraph")
            .field("outputs", &self.outputs)
            .field("graph", &self.graph)
            .finish_non_exhaustive()
    }
}

impl<'w, T> CudaGraph<'w, T> {
    /// Runs `work` [`CaptureOptions::warm_ups`] times and captures it once more, on a stream of its own,
    /// with memory of its own. What it returns is kept: the tensors that each replay fills. The work is kept
    /// too: whatever tensors it reads must stay where they are as long as the graph is replayed.
    ///
    /// The work must not read what a kernel computes (`double_value`, a length, a choice), nor make a
    /// tensor from host memory: both wait for the device, which captured work cannot.
    ///
    /// # Errors
    /// [`Error::NeedsCuda`] on any other device, [`Error::Work`] if the work fails by itself,
    /// [`Error::CannotCapture`] if it fails only while it is captured.
    pub fn capture<E: Into<WorkError>>(
        device: Device,
        options: CaptureOptions,
        work: impl FnMut() -> std::result::Result<T, E> + 'w,
    ) -> Result<Self> {
        Self::capture_and_keep(device, options, None, work)
    }

    /// The same with memory from the pool of `other`, for graphs of which one runs at a time, such as one
    /// for each batch size: together they take what the largest does. Outputs of one are overwritten by
    /// replays of the other; `other` must live at least as long as this is replayed.
    ///
    /// # Errors
    /// As [`capture`](CudaGraph::capture).
    pub fn capture_in_pool_of<U, E: Into<WorkError>>(
        other: &CudaGraph<'_, U>,
        device: Device,
        options: CaptureOptions,
        work: impl FnMut() -> std::result::Result<T, E> + 'w,
    ) -> Result<Self> {
        Self::capture_and_keep(device, options, Some(&other.graph), work)
    }

    fn capture_and_keep<E: Into<WorkError>>(
        device: Device,
        options: CaptureOptions,
        pool: Option<&Graph>,
        mut work: impl FnMut() -> std::result::Result<T, E> + 'w,
    ) -> Result<Self> {
        let (outputs, graph) = captured(device, options, pool, &mut work)?;
        Ok(CudaGraph {
            outputs,
            graph,
            _work: Some(Box::new(work)),
        })
    }

    /// For work whose tensors the caller keeps beside the graph.
    pub(crate) fn capture_borrowed<E: Into<WorkError>>(
        device: Device,
        options: CaptureOptions,
        work: impl FnMut() -> std::result::Result<T, E>,
    ) -> Result<Self> {
        let (outputs, graph) = captured(device, options, None, work)?;
        Ok(CudaGraph {
            outputs,
            graph,
            _work: None,
        })
    }

    /// Does the work again. Returns before the device is done, as any operation on it does.
    ///
    /// # Errors
    /// libtorch's own.
    pub fn replay(&self) -> Result<&T> {
        self.graph.replay()?;
        Ok(&self.outputs)
    }

    /// What the work returned: tensors that each replay overwrites.
    pub fn outputs(&self) -> &T {
        &self.outputs
    }

    /// Bytes that the graph's pool took from the device. They stay taken as long as the graph lives; 0
    /// for one that found room in the pool of another.
    pub fn pool_bytes(&self) -> u64 {
        self.graph.pool_bytes()
    }

    /// Waits for the device.
    ///
    /// # Errors
    /// What went wrong on it.
    pub fn synchronize(&self) -> Result<()> {
        Ok(self.graph.synchronize()?)
    }
}

fn captured<T, E: Into<WorkError>>(
    device: Device,
    options: CaptureOptions,
    pool: Option<&Graph>,
    mut work: impl FnMut() -> std::result::Result<T, E>,
) -> Result<(T, Graph)> {
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
    Ok((outputs, graph))
}

fn torch_error<E: Into<WorkError>>(error: CaptureError<E>) -> Error {
    match error {
        CaptureError::Torch(source) => Error::Sys(source),
        CaptureError::Work(source) => Error::Work {
            source: source.into(),
        },
        // The enum may grow; what it says then is in its debug form only.
        _ => Error::Work {
            source: "a capture failed for an unknown reason".into(),
        },
    }
}
