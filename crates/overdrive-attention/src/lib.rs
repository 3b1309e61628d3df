//! Flash attention for tch: one function over libtorch's kernels and this crate's blockwise kernel.
//!
//! Attention as two matmuls and a softmax stores T · S scores for each head, in training until the backward pass. The
//! kernels of this crate store one block of scores at a time.
//!
//! | function | counterpart |
//! |---|---|
//! | [`attention`], [`attention_with_lse`] | `flash_attn_func`, `scaled_dot_product_attention`: padded batches |
//! | [`attention_varlen`] | `flash_attn_varlen_func`: packed sequences, forward and backward |
//! | [`attention_decode`] | `flash_attn_with_kvcache`: few queries over a long cache |
//! | [`attention_paged`], [`paged_write`] | `flash_attn_varlen_func` with a `block_table`: keys in the blocks of a pool |
//! | [`merge`] | combines results over splits of the keys |
//! | [`explain`], [`explain_varlen`] | returns the back end that would run, and the reasons against the others |
//!
//! [`AttentionOptions`] has causality (either [`Alignment`]), sliding [`Window`]s, mask or bias, grouped
//! heads, dropout, attention sinks of both kinds, ALiBi and softcap. On a CPU, every option works in
//! O(T) memory, forward and backward. On CUDA, options that libtorch's kernels lack run on [`Backend::Math`],
//! as [`explain`] reports. An explicit [`Backend`] either runs or fails with the reasons against it.
//! A `tracing` event (level debug) names the back end that runs.
//!
//! The blockwise kernel treats numbers below 2⁻¹²⁶ (2⁻¹⁰²² in f64) as zero, in its inputs, weights, results and
//! gradients: peaked attention produces many of them, and each takes Intel processors about a hundred cycles
//! ([`overdrive_kernels`](overdrive_kernels#subnormal-numbers)).
//!
//! ```
//! use overdrive_attention::{AttentionOptions, Backend, Window, attention, explain};
//! use tch::{Device, Kind, Tensor};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let random = |heads: i64| Tensor::randn([2, heads, 100, 64], (Kind::Float, Device::Cpu)).set_requires_grad(true);
//! // Eight query heads over two key heads, each query over its own key and the 31 before it.
//! let (query, key, value) = (random(8), random(2), random(2));
//! let options = AttentionOptions { causal: true, window: Window::sliding(32), ..Default::default() };
//! let output = attention(&query, &key, &value, &options)?;
//! output.sum(Kind::Float).f_backward()?;
//! assert_eq!(key.grad().size(), key.size());
//!
//! let explanation = explain(&query, &key, &value, &options)?;
//! assert_eq!(explanation.backend, Some(Backend::Blockwise));
//! let forced = AttentionOptions { backend: Backend::Flash, ..options };
//! let refused = attention(&query, &key, &value, &forced).unwrap_err();
//! assert!(refused.to_string().contains("it has no window"));
//! # Ok(())
//! # }
//! ```
//!
//! Method: [FlashAttention-2](https://arxiv.org/abs/2307.08691) (Dao 2023). Reference implementations:
//! [flash-attn](https://github.com/Dao-AILab/flash-attention) and
//! [`scaled_dot_product_attention`](https://docs.pytorch.org/docs/2.11/generated/torch.nn.functional.scaled_dot_product_attention.html).
#![deny(missing_docs)]

mod attention;
mod blockwise;
mod call;
mod cuda_flash;
mod decode;
mod device_lengths;
mod error;
mod gpu;
mod gpu_preference;
mod kernel;
mod libtorch;
mod math;
mod merge;
mod options;
mod paged;
mod paged_blocks;
mod paged_layout;
mod paged_packed;
mod paged_write;
pub mod rows;
mod selection;
mod varlen;

pub use attention::{attention, attention_with_lse};
pub use decode::attention_decode;
pub use device_lengths::{DeviceLengths, attention_at_lengths};
pub use error::{Error, Result};
pub use merge::merge;
pub use options::{Alignment, AttentionOptions, Backend, Layout, Window};
pub use paged::attention_paged;
pub use paged_blocks::PagedBlocks;
pub use paged_layout::PagedLayout;
pub use paged_write::{PagedSlots, paged_write, paged_write_pair, paged_write_quantized};
pub use selection::{Explanation, Verdict, explain, explain_varlen};
pub use varlen::{PackedLengths, attention_varlen, attention_varlen_with_lse};
