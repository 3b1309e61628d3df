//! Transforms: datasets made from other datasets.

mod batched_map;
mod cached_map;
mod dataset_ext;
mod deduplicate;
mod interleave;
mod iter;
mod map;
mod selection;

pub use batched_map::{BatchedIter, BatchedMap};
pub use cached_map::{CacheOptions, MapCache};
pub use dataset_ext::DatasetExt;
pub use deduplicate::{DeduplicateOptions, Deduplicated};
pub use interleave::{Exhausted, Interleave};
pub use iter::DatasetIter;
pub use map::{Concat, Map};
#[cfg(any(feature = "speech", feature = "tokenizers"))]
pub(crate) use selection::SortedIndices;
#[cfg(feature = "tokenizers")]
pub(crate) use selection::SortedIndicesWriter;
pub use selection::{Selection, Split};
pub(crate) use selection::{split_indices, test_len};
