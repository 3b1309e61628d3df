//! Safe wrappers around the parts of libtorch that `tch` does not bind.
//!
//! This is the only crate of Overdrive that contains C++, or calls libtorch other than through `tch`. (overdrive-gpu
//! calls the CUDA driver.) The shim (`shim/`) has a C interface in which every C++ exception becomes an error value
//! with its message; the wrappers here turn those into [`Error`]. The other crates are built on these modules:
//!
//! * [`op`] – operators of libtorch by their schema names, also the ones tch does not generate;
//! * [`memory`] – the current and the peak memory of tensors on every device, and a limit for the CPU;
//! * [`autocast`] – the raw autocast state of any device type ([overdrive-precision] has the guards);
//! * [`amp`] – the non-finite check and the scale update of gradient scaling;
//! * [`grad`] – setting and clearing `tensor.grad`;
//! * [`gemm`] – matrix products by the faster of the GEMM libraries inside libtorch;
//! * [`matmul`] – TF32 and the precision of fp32 matrix products;
//! * [`profiler`] – device events, named ranges, the Kineto profiler, the memory of the process;
//! * [`cuda`] – the state of the CUDA back end, and the reason if it was not loaded;
//! * [`function`], [`hook`], [`engine`], [`random`] – the mechanisms under [overdrive-autograd];
//! * [`saved_tensors`], [`dispatch_mode`], [`named_operator`], [`scoped_closure`], [`storage`],
//!   [`transfer`] – the mechanisms under [overdrive-checkpointing];
//! * [`threads`] – thread counts, and loops on libtorch's threads; [`raw`] – the elements of CPU tensors as
//!   slices for such loops;
//! * [`denormals`] – flushing of subnormal numbers to zero;
//! * `c10d`, with the feature of that name – stores, process groups and the gradient reducer under
//!   [overdrive-distributed];
//! * `compiled`, with the feature of that name – packages of AOTInductor and CUDA graphs, under
//!   [overdrive-packages] and [overdrive-graphs];
//! * [`process`] – what the standard library has no safe call for: the signal of a lost parent, ignored signals;
//! * [`build_info`] – libtorch's version and CPU capability.
//!
//! In every program that uses this crate, three things happen before `main`: the CUDA back end is loaded if its
//! library lies beside `libtorch_cpu` (`OVERDRIVE_NO_CUDA=1` leaves it out, and hides the GPUs if it is linked), the
//! log of libtorch's profiler is silenced unless `KINETO_LOG_LEVEL` is set, and libtorch's CPU allocator is replaced
//! by one that counts and caches (`OVERDRIVE_CPU_ALLOCATOR=uncached` only counts, `=libtorch` keeps libtorch's own).
//!
//! ```
//! use overdrive_sys::{memory, op};
//! use tch::{Device, Kind, Tensor};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let weights = [Tensor::ones([3], (Kind::Float, Device::Cpu)), Tensor::ones([4], (Kind::Float, Device::Cpu))];
//! let norms = op::call("aten::_foreach_norm", "Scalar", &[op::Value::Tensors(&weights)])?;
//! let norms = norms.into_iter().next().unwrap().into_tensors()?;
//! assert_eq!(norms[1].double_value(&[]), 2.0);
//! assert!(memory::stats(Device::Cpu)?.peak_allocated_bytes > 0);
//! # Ok(())
//! # }
//! ```
//!
//! [overdrive-autograd]: ../overdrive_autograd/index.html
//! [overdrive-checkpointing]: ../overdrive_checkpointing/index.html
//! [overdrive-graphs]: ../overdrive_graphs/index.html
//! [overdrive-packages]: ../overdrive_packages/index.html
//! [overdrive-distributed]: ../overdrive_distributed/index.html
//! [overdrive-precision]: ../overdrive_precision/index.html
#![allow(unsafe_code)]
#![deny(missing_docs)]

pub mod amp;
pub mod autocast;
pub mod build_info;
#[cfg(feature = "c10d")]
pub mod c10d;
mod callback;
#[cfg(feature = "compiled")]
pub mod compiled;
pub mod cuda;
pub mod denormals;
mod device;
pub mod dispatch_mode;
pub mod engine;
mod error;
mod exclusive;
mod ffi;
pub mod function;
pub mod gemm;
pub mod grad;
pub mod hook;
mod located_tensor;
pub mod matmul;
pub mod memory;
mod mode_stack;
pub mod named_operator;
pub mod op;
pub mod process;
pub mod profiler;
pub mod random;
pub mod raw;
pub mod saved_tensors;
mod scalar_type;
pub mod scoped_closure;
pub mod storage;
pub mod threads;
pub mod transfer;

pub use callback::{CallbackError, CallbackResult};
pub use error::{Error, Result, is_out_of_memory, without_backtrace};
pub use scalar_type::ScalarType;
