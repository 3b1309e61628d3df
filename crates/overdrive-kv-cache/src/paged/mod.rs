//! Many sequences in one pool of blocks.
//!
//! [`block_pool`] counts the references to blocks, [`eviction`] orders those without any, [`prefix_index`] finds the block
//! that holds given tokens, [`block_tables`] keeps the tables of all sequences on top of these (plain Rust, without tensors),
//! [`cache`] and [`batch`] store keys and values in the blocks of a [`layer_pool`], and [`decode_inputs`] holds what a
//! captured step reads.

mod batch;
mod block_pool;
mod block_tables;
mod cache;
mod config;
mod decode_inputs;
mod dtype;
mod eviction;
mod layer_pool;
mod prefix_index;

pub use batch::PagedBatch;
use batch::PagedStep;
pub use block_tables::{PagedStatistics, SequenceId};
pub use cache::PagedCache;
pub use config::PagedCacheConfig;
pub use decode_inputs::{PagedDecodeInputs, PagedDecodeStep};
pub use dtype::KvCacheDtype;
