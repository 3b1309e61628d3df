//! Key/value caches for autoregressive generation with any `tch` attention.
//!
//! A decoder that generates token by token attends to the keys and values of all earlier tokens. A
//! cache keeps them, so that each step computes one new row instead of the whole prefix.
//!
//! [`KvCache`] is the interface for attention layers: [`attend`](KvCache::attend) appends and attends, and
//! [`append`](KvCache::append) returns the keys and values for the caller's own attention.
//!
//! | kind | bytes per token¹ | memory for `n` tokens | use |
//! |---|---|---|---|
//! | [`DynamicCache`] | 512 | at most twice the contents | the default choice: no size in advance, amortized O(1) copies per token (transformers' `DynamicCache` copies everything at every step) |
//! | [`StaticCache`] | 512 | `max_len`, from the beginning | no allocation while serving; CUDA graphs, which need fixed addresses |
//! | [`SlidingCache`] | 512 | `sinks + window + slack`, for any `n` | models with sliding windows (Mistral, Gemma, Qwen), layer by layer; unbounded generation with attention sinks |
//! | [`QuantizedCache`], INT8 | 144 | codes, plus the last 128 to 192 tokens in full precision | long sequences: 1/3.6 of the memory, attention outputs within 2 % in the tests |
//! | [`QuantizedCache`], INT4 | 80 | as INT8 | 1/6.4 of the memory, if some loss of accuracy is acceptable |
//! | [`PagedCache`] | 512 | whole blocks of 16 tokens, shared by equal prefixes | many sequences at once, of any lengths |
//! | [`PagedCache`], INT8 or FP8 | 136 | as above, in codes | more or longer sequences in the same memory: 1/3.8 |
//!
//! A model whose layers partly have a state of fixed size in place of keys and values uses any of these within a
//! [`HybridCache`], or a [`PagedCache`] with [`PagedCacheConfig::recurrent`].
//!
//! ¹ Keys and values of one head of 64 channels in one layer, in f32; bf16 and f16 take half, except for
//! quantized values. [`KvCache::bytes_per_token`] returns it for a whole model, and tests compare it with
//! the allocated memory. Dynamic, static, sliding (within its window) and paged caches are exact; see
//! [`QuantizedCache`] for the error bound of quantized values. Its kernels treat
//! [numbers below 2⁻¹²⁶ as zero](overdrive_kernels#subnormal-numbers).
//!
//! [`CacheImplementation`] creates a cache by name; [`save`] and [`load`] write and read safetensors files.
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
//! Caches are for inference: tensors that require a gradient are refused, because a cache writes in
//! place, which autograd does not support.
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
mod layer_heads;
mod paged;
mod quantized;
mod recurrent;
mod saved_state;
mod sliding;
mod static_cache;

pub use attend::{AttendOptions, attend_to_view};
pub use cache::{KvCache, KvView, QkvRows};
pub use cache_implementation::{CacheImplementation, CacheShape};
pub use dynamic_cache::{DynamicCache, DynamicCacheConfig};
pub use error::{Error, Result};
pub use file::{load, save};
pub use layer_heads::LayerHeads;
pub use paged::{
    KvCacheDtype, PagedBatch, PagedCache, PagedCacheConfig, PagedDecodeInputs, PagedDecodeStep,
    PagedStatistics, SequenceId,
};
pub use quantized::{QuantizationAxis, QuantizationBits, QuantizedCache, QuantizedCacheConfig};
pub use recurrent::{DeltaRuleHeads, DeltaRuleStep, HybridCache};
pub use sliding::{SlidingCache, SlidingCacheConfig};
pub use static_cache::{StaticCache, StaticCacheConfig, StaticStep};
