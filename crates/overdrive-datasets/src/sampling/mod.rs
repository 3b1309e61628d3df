//! In which order records are read, and which of them make a batch.
//!
//! All of it is a pure function of an epoch and a place: nothing has a state to save, any worker
//! computes its own part, and a run continues at any place at once.

mod batches;
mod length_grouped;
mod lengths;
mod permutation;
mod sampler;
mod shard;
mod token_budget;

pub use batches::{BatchSampler, ConsecutiveBatches, SampledBatches, ShardedBatches};
pub use length_grouped::LengthGroupedBatches;
#[cfg(feature = "speech")]
pub(crate) use lengths::LastFew;
pub use lengths::Lengths;
pub use permutation::Permutation;
pub use sampler::{RandomSampler, Sampler, SequentialSampler};
pub use shard::{LastShare, Shard};
pub use token_budget::{TokenBudgetBatches, TokenBudgetOptions};
