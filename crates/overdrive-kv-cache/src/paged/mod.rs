//! Many texts in one pool of blocks.
//!
//! From below: [`pool`] counts the references to blocks, [`prefix`] knows which block holds which text,
//! [`ledger`] keeps the tables of all texts on top of both (plain Rust, no tensor), and [`cache`] and
//! [`batch`] put keys and values behind it.

mod batch;
mod cache;
mod config;
mod ledger;
mod pool;
mod prefix;

pub use batch::PagedBatch;
pub use cache::PagedCache;
pub use config::PagedCacheConfig;
pub use ledger::{PagedStatistics, SequenceId};
