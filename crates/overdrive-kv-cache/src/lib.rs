//! Key/value caches for autoregressive generation with any `tch` attention.
//!
//! A decoder that generates token by token attends to the keys and values of all earlier tokens;
//! a cache keeps them, so that a step computes one new row instead of the whole prefix again.
//!
//! [`KvCache`] is the interface an attention layer sees: [`attend`](KvCache::attend) appends and attends,
//! [`append`](KvCache::append) shows keys and values to an attention of the caller's own.
//!
//! | kind | bytes a token¹ | memory for `n` tokens | when |
//! |---|---|---|---|
//! | [`GrowingCache`] | 512 | at most twice what is held | the one to start with: no size in advance, amortised O(1) copies a token (transformers' `DynamicCache` copies everything at every step) |
//! | [`StaticCache`] | 512 | `max_len`, from the beginning | no allocation while serving; CUDA graphs, whose addresses must not move |
//! | [`SlidingCache`] | 512 | `sinks + window + slack`, however large `n` | models with windows (Mistral, Gemma, Qwen), layer by layer; endless text with attention sinks |
//! | [`QuantizedCache`], INT8 | 144 | codes, and the last 128 to 192 tokens in full | long texts: 1/3.6 of the memory, outputs of attention off by less than 2 % in the tests |
//! | [`QuantizedCache`], INT4 | 80 | the same | 1/6.4 of the memory, where some loss is allowed |
//! | [`PagedCache`] | 512 | whole blocks of 16 tokens, shared by equal prefixes | many texts at once, of any lengths |
//!
//! ¹ keys and values of one head of 64 channels in one layer, f32 (half of it in bf16 and f16, but for
//! the codes); [`KvCache::bytes_per_token`] says it for a whole model, and tests hold it to what is
//! allocated. Growing, static, sliding (to what its window shows) and paged caches are exact; the bound
//! of the quantized one is at [`QuantizedCache`].
//!
//! [`CacheImplementation`] makes one by its name; [`save`] and [`load`] keep one in a safetensors file.
//!
//! Shapes: `B` rows of the batch, `H` key/value heads, `T` tokens, `D` channels a head.
//!
//! ```
//! use overdrive_kv_cache::{GrowingCache, KvCache};
//! use tch::{Device, Kind, Tensor};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut cache = GrowingCache::new(1);
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
//! Caches are for inference: tensors that require a gradient are refused, because an entry that
//! is written in place cannot carry one.
#![deny(missing_docs)]

mod attend;
mod buffer;
mod cache;
mod copy;
mod entries;
mod error;
mod file;
mod growing;
mod implementation;
mod paged;
mod quantized;
mod saved;
mod sliding;
mod static_cache;

pub use attend::{AttendOptions, attend_to_view};
pub use cache::{KvCache, KvView};
pub use error::{Error, Result};
pub use file::{load, save};
pub use growing::{GrowingCache, GrowingCacheConfig};
pub use implementation::{CacheImplementation, CacheShape};
pub use paged::{PagedBatch, PagedCache, PagedCacheConfig, PagedStatistics, SequenceId};
pub use quantized::{QuantizationAxis, QuantizationBits, QuantizedCache, QuantizedCacheConfig};
pub use sliding::{SlidingCache, SlidingCacheConfig};
pub use static_cache::{StaticCache, StaticCacheConfig, StaticStep};
