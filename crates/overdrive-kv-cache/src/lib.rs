//! Key/value caches for autoregressive generation with any `tch` attention.
//!
//! A decoder that generates token by token attends to the keys and values of all earlier tokens;
//! a cache keeps them, so that a step computes one new row instead of the whole prefix again.
//! [`KvCache`] is the interface an attention layer sees; [`GrowingCache`] is the kind to start
//! with: it needs no size in advance and costs amortised O(1) copies a token (transformers'
//! `DynamicCache` concatenates, which copies the whole cache at every step).
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
