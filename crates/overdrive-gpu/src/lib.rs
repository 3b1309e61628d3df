//! Kernels for NVIDIA GPUs, compiled ahead of time and embedded in the program.
//!
//! The kernels are written in Triton (`kernels/*.py`). `cargo xtask kernels` compiles them for each architecture and
//! writes `kernels/kernels.bin.zst` and `kernels/kernels.json`, which are part of the repository, so building and
//! running Overdrive requires neither Python nor a CUDA toolkit. At run time this crate opens the CUDA driver, loads
//! the code for the GPU, and launches it on libtorch's current stream, with results from libtorch's allocator. Launches
//! can therefore be captured in a CUDA graph, and tensors can be used on several streams as usual.
//!
//! Programs use it through [overdrive-fused], [overdrive-attention], [overdrive-linear-attention],
//! [overdrive-kv-cache], [overdrive-quantization] and [overdrive-optim], which call these kernels where possible and
//! libtorch's operators elsewhere.
//!
//! | type | from | operations |
//! |---|---|---|
//! | [`RmsNorm`] | [`Kernels::rms_norm`] | RMSNorm, also of a sum with a residual, and its gradients |
//! | [`Gate`] | [`Kernels::gate`] | gated activations, from one projection or two, and their gradients |
//! | [`Rotary`] | [`Kernels::rotary`] | rotary embedding, with the split of a joint projection, and its gradient |
//! | [`CrossEntropy`] | [`Kernels::cross_entropy`] | the loss of logits, and their gradient in place |
//! | [`FourBit`] | [`Kernels::four_bit`] | matmuls of up to 64 rows with 4-bit weights, and their dequantization |
//! | [`EightBit`] | [`Kernels::eight_bit`] | the same with 8-bit integers and floats, scaled by output or by group |
//! | [`Fp8Matrix`] | [`Kernels::to_fp8`] | a matrix and its transpose in 8-bit floats, for the products of training |
//! | [`Adam8`] | [`Kernels::adam8`] | a step of AdamW with averages of 8 bits |
//! | [`Decode`] | [`Kernels::decode`] | attention of a few queries over dense, paged or 8-bit keys and values |
//! | [`PagedWrite`] | [`Kernels::paged_write`] | new keys and values to their rows in the blocks of a pool |
//! | [`DeltaRule`] | [`Kernels::delta_rule`] | the gated delta rule of packed sequences, with states in a pool |
//! | [`CausalConv1d`] | [`Kernels::causal_conv1d`] | the short convolution before it |
//!
//! Dtypes are f32, bf16 and f16; sums are in f32, and results are rounded once.
//!
//! # Supported GPUs
//!
//! | compute capability | code |
//! |---|---|
//! | 8.0, 8.6, 8.9 | a cubin for 8.0 |
//! | 9.0, 10.0, 12.0 | a cubin for each |
//! | other, above 8.0 | PTX, which the driver compiles at its first use |
//! | below 8.0 | none: libtorch's operators |
//!
//! **On Hopper (9.0) the kernels are on by default.** `cargo xtask gpu-check` ran them on an H200 on 27 and 28 November
//! 2026: all were correct, and each was faster than libtorch's operators or within 4 % of them
//! (docs/benchmarks/gpu_h200_2026-11-27.md), except matmuls of 64 rows with 4-bit weights
//! (docs/benchmarks/gpu-training-decoding_h200_2026-11-28.md). On other GPUs, for which there is no report yet, they are off
//! unless `OVERDRIVE_GPU_KERNELS=1` is set; there, only Triton's interpreter has checked their results, and a stand-in for
//! the driver their launches. The kernels of the gated delta rule, its convolution and [`Kernels::to_fp8`], and the decode
//! kernel that writes a single split directly, are newer than the reports, and are off in the same way on all GPUs. Newer,
//! but on, is the launch of up to three 4-bit weights with double quantization. `OVERDRIVE_GPU_KERNELS=0` turns all of them
//! off everywhere. A `tracing` event logs which kernels are used, and why.
//!
//! A kernel is loaded when an operation first needs it. Nothing can be loaded in a capture: an operation that did not
//! run before the capture is captured as libtorch's operators, with a warning.
//!
//! ```
//! use overdrive_gpu::kernels;
//! use tch::{Cuda, Device, Kind, Tensor};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // There are none for the CPU.
//! assert!(kernels(Device::Cpu)?.is_none());
//! if Cuda::is_available()
//!     && let Some(kernels) = kernels(Device::Cuda(0))?
//!     && let Some(norm) = kernels.rms_norm(Kind::BFloat16, 4096, false)?
//! {
//!     let on_gpu = (Kind::BFloat16, Device::Cuda(0));
//!     let (x, weight) = (Tensor::randn([8, 4096], on_gpu), Tensor::ones([4096], on_gpu));
//!     assert_eq!(norm.forward(&x, None, &weight, 1e-6)?.y.size(), [8, 4096]);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! [overdrive-attention]: ../overdrive_attention/index.html
//! [overdrive-fused]: ../overdrive_fused/index.html
//! [overdrive-kv-cache]: ../overdrive_kv_cache/index.html
//! [overdrive-linear-attention]: ../overdrive_linear_attention/index.html
//! [overdrive-optim]: ../overdrive_optim/index.html
//! [overdrive-quantization]: ../overdrive_quantization/index.html
#![deny(missing_docs)]

mod adam;
mod choice;
mod counters;
mod decode;
mod delta_rule;
mod driver;
mod eight_bit;
mod embedded;
mod error;
mod few_bits;
mod fp8;
mod gate;
mod kernels;
mod loss;
mod norm;
mod paged_write;
mod quantized;
mod rotary;
mod verified;

pub use adam::{Adam8, AdamFactors, CodedAverage};
pub use choice::{EnabledGuard, kernels, opened, override_enabled, serve_cpu_with};
pub use decode::{CodedHeads, Decode, DecodeLayout, MOST_QUERIES, report_fallback};
pub use delta_rule::{CausalConv1d, DeltaRule, StatePlan};
pub use eight_bit::{EightBit, EightBitNumbers, EightBitWeight};
pub use error::{Error, Result};
pub use fp8::{Fp8Format, Fp8Matrix};
pub use gate::{Activation, Gate};
pub use kernels::{Kernels, dense};
pub use loss::{CrossEntropy, LossTerms};
pub use norm::{NormGradients, Normalized, RmsNorm};
pub use paged_write::PagedWrite;
pub use quantized::{
    FOUR_BIT_GROUPS, FourBit, FourBitNumbers, FourBitScales, FourBitWeight, MOST_OFFSETS, MOST_ROWS,
};
pub use rotary::{Rotary, RotaryTables};

#[cfg(test)]
mod tests;
