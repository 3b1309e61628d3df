//! Key/value caches for autoregressive generation with any `tch` attention.
//!
//! A decoder that generates token by token attends to the keys and values of all earlier tokens. A
//! cache keeps them, so that a step computes one new row instead of the whole prefix again.
//!
//! [`KvCache`] is the interface that an attention layer sees: [`attend`](KvCache::attend) appends and
//! attends, and [`append`](KvCache::append) returns the keys and values for an attention of the
//! caller's own.
//!
//! | kind | bytes a token¹ | memory for `n` tokens | when |
//! |---|---|---|---|
//! | [`DynamicCache`] | 512 | at most twice what is held | the one to start with: no size in advance, amortised O(1) copies a token (transformers' `DynamicCache` copies everything at every step) |
//! | [`StaticCache`] | 512 | `max_len`, from the beginning | no allocation while serving; CUDA graphs, whose addresses must not move |
//! | [`SlidingCache`] | 512 | `sinks + window + slack`, however large `n` | models with windows (Mistral, Gemma, Qwen), layer by layer; endless text with attention sinks |
//! | [`QuantizedCache`], INT8 | 144 | codes, and the last 128 to 192 tokens in full | long texts: 1/3.6 of the memory, outputs of attention off by less than 2 % in the tests |
//! | [`QuantizedCache`], INT4 | 80 | the same | 1/6.4 of the memory, where some loss is allowed |
//! | [`PagedCache`] | 512 | whole blocks of 16 tokens, shared by equal prefixes | many texts at once, of any lengths |
//!
//! ¹ Keys and values of one head of 64 channels in one layer, in f32; bf16 and f16 take half of it,
//! except for quantized values. [`KvCache::bytes_per_token`] returns it for a whole model, and tests
//! hold it to the memory that is allocated. Dynamic, static, sliding (up to what its window shows) and
//! paged caches are exact; the error bound of the quantized one is at [`QuantizedCache`], whose kernels take
//! [numbers below 2⁻¹²⁶ for zero](overdrive_kernels#subnormal-numbers).
//!
//! [`CacheImplementation`] builds a cache by its name; [`save`] and [`load`] store one in a safetensors
//! file.
//!
//! Shapes: `B` is the batch size, `H` the number of key/value heads, `T` the number of tokens, `D` the
//! number of channels of a head.
//!
//! ```
//! use overdrive_kv_cache::{DynamicCache, KvCache};
//! use tch::{Device, Kind, Tensor};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut cache = DynamicCache::new(1);
//! let prompt = Tensor::f_randn([1, 2, 5, 8], (Kind::Float, Device::Cpu))?; // (B, H, T, D)
//! cache.append(0, &prompt, &prompt)?;
//!
//! let token = Tensor::f_randn([1, 2, 1, 8], (Kind::Float, Device::Cpu))?;
//! let held = cache.append(0, &token, &token)?;
//! assert_eq!(held.keys.size(), [1, 2, 6, 8]); // what attention reads: everything so far
//! assert_eq!(cache.len(), 6);
//! # Ok(())
//! # }
//! ```
//!
//! Caches are for inference: tensors that require a gradient are refused, because a cache writes them
//! in place, which autograd cannot follow.
#![deny(missing_docs)]

mod attend;
mod buffer;
mod cache;
mod cache_implementation;
mod copy;
mod dynamic_cache;
mod error;
mod file;
mod key_values;
mod paged;
mod quantized;
mod saved_state;
mod sliding;
mod static_cache;

pub use attend::{AttendOptions, attend_to_view};
pub use cache::{KvCache, KvView, QkvRows};
pub use cache_implementation::{CacheImplementation, CacheShape};
pub use dynamic_cache::{DynamicCache, DynamicCacheConfig};
pub use error::{Error, Result};
pub use file::{load, save};
pub use paged::{
    PagedBatch, PagedCache, PagedCacheConfig, PagedDecodeInputs, PagedDecodeStep, PagedStatistics,
    SequenceId,
};
pub use quantized::{QuantizationAxis, QuantizationBits, QuantizedCache, QuantizedCacheConfig};
pub use sliding::{SlidingCache, SlidingCacheConfig};
pub use static_cache::{StaticCache, StaticCacheConfig, StaticStep};
