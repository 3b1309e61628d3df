//! Flash attention for tch: one function over libtorch's kernels and a blockwise one of our own.
//!
//! Attention as two matmuls and a softmax holds T · S scores for each head in memory, and in training it holds
//! them until backward. The kernels here hold a block of them at a time.
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
//! heads, dropout, attention sinks of both kinds, ALiBi and softcap. On a CPU every option works in
//! O(T) memory, forward and backward; on CUDA the options that libtorch's kernels lack run on [`Backend::Math`],
//! and [`explain`] says so. A [`Backend`] that is asked for runs or fails with the reasons.
//! A `tracing` event (level debug) names the one that runs.
//!
//! In the blockwise kernel numbers below 2⁻¹²⁶ (2⁻¹⁰²² in f64) are zero, in its inputs, its weights, its results and their
//! gradients: peaked attention makes many, and each takes Intel's processors a hundred cycles
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
//! Method: [FlashAttention-2](https://arxiv.org/abs/2307.08691) (Dao 2023). The originals:
//! [flash-attn](https://github.com/Dao-AILab/flash-attention),
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
pub use paged_layout::PagedLayout;
pub use paged_write::{PagedSlots, paged_write, paged_write_pair};
pub use selection::{Explanation, Verdict, explain, explain_varlen};
pub use varlen::{PackedLengths, attention_varlen, attention_varlen_with_lse};
