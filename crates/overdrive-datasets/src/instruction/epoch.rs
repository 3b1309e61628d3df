//! The order of rows in a pass over the data.

use super::dataset::permutation;
use crate::PackPlan;

/// The stream of random numbers that orders use (see [`crate::random::random_u64`]).
const ORDER_STREAM: u32 = 0x0EDE;

/// Batches whose rows are sorted together, as in transformers' `LengthGroupedSampler`.
const GROUPED_BATCHES: usize = 50;

/// Rows at random; which ones depends on seed and epoch alone.
pub(super) fn shuffled(plan: &PackPlan, seed: u64, epoch: u64) -> Vec<u32> {
    permutation(plan.len(), seed, ORDER_STREAM, epoch)
}

/// Rows at random, and inside each 50 batches from the longest to the shortest, so that the rows of a
/// batch are about as long as one another. The longest row of all comes first: what does not fit memory
/// is known at once.
pub(super) fn grouped_by_length(plan: &PackPlan, batch: usize, seed: u64, epoch: u64) -> Vec<u32> {
    let length = |row: u32| plan.row_tokens(row as usize);
    let mut order = shuffled(plan, seed, epoch);
    // No larger than a quarter of the data, or small data would lose its order.
    let batch = batch.max(1);
    let group = batch * (order.len() / (4 * batch)).clamp(1, GROUPED_BATCHES);
    for part in order.chunks_mut(group) {
        part.sort_by_key(|&row| std::cmp::Reverse(length(row)));
    }
    let starts = (0..order.len()).step_by(group);
    if let Some(longest) = starts.max_by_key(|&start| (length(order[start]), usize::MAX - start)) {
        order.swap(0, longest);
    }
    order
}
