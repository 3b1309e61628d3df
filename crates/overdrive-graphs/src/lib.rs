//! CUDA graphs: GPU work that is captured once and replayed with one call.
//!
//! * [`CudaGraph`] captures any work on a GPU;
//! * [`DecodeGraph`] captures a decoding step over a static cache;
//! * [`BackwardGraphs`] captures the forward and backward pass of a micro-batch, with any optimizer;
//! * [`TrainGraph`] captures a whole training step with gradient accumulation, clipping and a capturable
//!   [`AdamW`](overdrive_optim::AdamW).
//!
//! On a CPU the same steps run without a graph ([`DecodeStep`], [`TrainStep`]), and a capture returns
//! [`Error::NeedsCuda`]. No CUDA header is needed to build this crate; the feature `cuda` checks its assumptions about
//! libtorch against them.
//!
//! ```
//! use overdrive_accumulation::{AccumulationConfig, DeviceLoss};
//! use overdrive_graphs::{CaptureOptions, Error, TrainGraph, TrainStep};
//! use overdrive_optim::{AdamW, AdamWConfig, ParamGroup};
//! use tch::{Device, Kind, Tensor};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = Device::cuda_if_available();
//! let weight = Tensor::ones([3], (Kind::Float, device)).set_requires_grad(true);
//! let group = ParamGroup::new("all", vec![("weight".into(), weight.shallow_clone())]);
//! let config = AdamWConfig { capturable: true, ..AdamWConfig::default() };
//! let optimizer = AdamW::new(vec![group], config)?;
//!
//! let batch = Tensor::from_slice(&[1.0f32, 2.0, 3.0]).to_device(device);
//! let loss = move |inputs: &[Tensor]| -> Result<DeviceLoss, tch::TchError> {
//!     let errors = (&weight * &inputs[0]).f_square()?;
//!     Ok(DeviceLoss { sum: errors.f_sum(Kind::Float)?, count: errors.f_ones_like()?.f_sum(Kind::Int64)? })
//! };
//! let mut step = TrainStep::new(&[batch.shallow_clone()], loss, optimizer, AccumulationConfig::default())?;
//! step.load(0, &[batch])?;
//! println!("loss {}", step.run()?.mean_loss.double_value(&[])); // without a graph
//! match TrainGraph::capture(step, CaptureOptions::default()) {
//!     Ok(mut graph) => println!("loss {}", graph.step()?.mean_loss.double_value(&[])),
//!     Err(error @ Error::NeedsCuda { .. }) => println!("{error}"),
//!     Err(other) => return Err(other.into()),
//! }
//! # Ok(())
//! # }
//! ```
//!
//! Source: [CUDA graphs in PyTorch](https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs).
#![deny(missing_docs)]
#![forbid(unsafe_code)]

mod backward;
mod cuda_graph;
mod decode;
mod error;
mod train;

pub use backward::{BackwardGraphs, MicroBatchKey};
pub use cuda_graph::{BareGraph, CaptureOptions, CudaGraph, WorkError};
pub use decode::{DecodeGraph, DecodeStep, static_cache_of};
pub use error::{Error, Result};
pub use overdrive_accumulation::{AccumulationConfig, DeviceLoss, DeviceStep};
pub use train::{TrainGraph, TrainStep};
