//! Samplers: the order of records, and the records of each batch.
//!
//! All of them are pure functions of an epoch and a position: they have no state to save, any worker computes its
//! own share, and a run resumes at any position at once.

mod batches;
mod length_grouped;
mod lengths;
mod permutation;
mod sampler;
mod shard;
mod token_budget;
mod weight_pattern;

pub use batches::{BatchSampler, ConsecutiveBatches, SampledBatches, ShardedBatches};
pub use length_grouped::LengthGroupedBatches;
pub use lengths::Lengths;
pub(crate) use lengths::RecentValues;
pub use permutation::Permutation;
pub use sampler::{RandomSampler, Sampler, SequentialSampler};
pub use shard::{LastShare, Shard};
pub use token_budget::{TokenBudgetBatches, TokenBudgetOptions};
pub(crate) use weight_pattern::{MIN_SHARE, WeightPattern};
