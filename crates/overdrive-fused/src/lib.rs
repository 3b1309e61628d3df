//! Fused operators of decoders for tch: one pass over memory where libtorch needs several.
//!
//! A training step on a CPU consists of matmuls and of memory-bound element-wise operators between them. The
//! functions of this crate fuse consecutive operators, each with its backward pass, into
//! vectorized loops on libtorch's own threads:
//!
//! | function | fused operators |
//! |---|---|
//! | [`linear_cross_entropy`] | the output layer, softmax and loss, without storing all logits |
//! | [`cross_entropy`] | log-softmax and loss |
//! | [`rms_norm`], [`add_rms_norm`] | square, mean, root, two multiplications; the addition of the residual |
//! | [`split_qkv_rotary`], [`rotary`] | the split of a joint projection, rotary embedding, layout |
//! | [`swiglu`], [`swiglu_pair`], [`glu`], [`glu_pair`] | activation and multiplication, also from a joint projection |
//! | [`bias_activation`] | addition and activation |
//!
//! They are plain functions on tensors. There are CPU kernels for f32, bf16 and f16 (arithmetic in f32, results rounded
//! once, [numbers below 2⁻¹²⁶ treated as zero](overdrive_kernels#subnormal-numbers)), compiled for AVX-512, AVX2 and
//! the target's baseline and chosen at run time ([`overdrive_kernels::instruction_set`]). [overdrive-gpu] has kernels
//! for NVIDIA GPUs, which are used by default on Hopper and elsewhere with `OVERDRIVE_GPU_KERNELS=1`. Otherwise (f64,
//! other devices) the functions run libtorch's operators. Results do not depend on the number of threads, except for
//! the matmuls of `linear` and `linear_cross_entropy`. Functions that ran a kernel can be differentiated once: a second
//! derivative returns an error.
//!
//! ```
//! use overdrive_fused::{LinearCrossEntropyOptions, add_rms_norm, linear_cross_entropy, swiglu};
//! use tch::{Device, Kind, Tensor};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let f32 = (Kind::Float, Device::Cpu);
//! let weight = |shape: &[i64]| (Tensor::randn(shape, f32) * 0.1).set_requires_grad(true);
//! let (norm, gate_up, down, head) = (weight(&[32]), weight(&[96, 32]), weight(&[32, 48]), weight(&[100, 32]));
//!
//! // A block's feed-forward half, and the loss of a vocabulary of 100.
//! let (stream, mixed) = (Tensor::randn([2, 7, 32], f32), Tensor::randn([2, 7, 32], f32));
//! let (normalised, stream) = add_rms_norm(&mixed, &stream, &norm, 1e-6)?;
//! let fed = swiglu(&normalised.f_linear(&gate_up, None::<&Tensor>)?)?.f_linear(&down, None::<&Tensor>)?;
//! let labels = Tensor::randint(100, [2, 7], (Kind::Int64, Device::Cpu));
//! let output = linear_cross_entropy(&(stream + fed), &head, &labels, &LinearCrossEntropyOptions::default())?;
//! output.loss.f_backward()?;
//! assert_eq!(norm.grad().size(), [32]);
//! # Ok(())
//! # }
//! ```
//!
//! [overdrive-gpu]: ../overdrive_gpu/index.html
#![deny(missing_docs)]

mod chunk;
mod composed;
mod cross_entropy;
mod error;
mod fp8;
mod gated_activation;
mod gpu;
mod kernel;
mod linear;
mod linear_cross_entropy;
mod loss_options;
mod rms_norm;
mod rotary;
pub mod rows;
mod tensors;

#[doc(hidden)]
pub use chunk::{ChunkDevice, auto_rows};
#[doc(hidden)]
pub use composed::BYTES_PER_LOGIT;
pub use cross_entropy::cross_entropy;
pub use error::{Error, Result};
pub use gated_activation::{bias_activation, glu, glu_pair, swiglu, swiglu_pair};
#[doc(hidden)]
pub use gpu::has_loss_kernel;
pub use linear::{FEW_ROWS, adjacent, joint_linear, linear};
pub use linear_cross_entropy::{LinearCrossEntropyOptions, linear_cross_entropy};
pub use loss_options::{CrossEntropyOptions, CrossEntropyOutput, Reduction};
pub use overdrive_gpu::Activation;
pub use rms_norm::{add_rms_norm, rms_norm};
pub use rotary::{
    Convention, Layout, QkvShape, RotaryOptions, rotary, rotary_single, split_qkv_rotary,
};
