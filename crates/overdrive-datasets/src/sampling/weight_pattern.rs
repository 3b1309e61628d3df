//! The repeated pattern in which sources of a mixture follow each other.

use super::Permutation;

/// The length of the pattern: a compromise between exact weights and memory (128 KiB).
const PATTERN: usize = 1 << 14;
/// The smallest share that a pattern can represent.
pub(crate) const MIN_SHARE: f64 = 1.0 / PATTERN as f64;

/// The order in which the records of several sources follow each other: each [`PATTERN`] consecutive positions have
/// the same number of records of each source, so the source at a position is computed without the positions before it.
#[derive(Debug, Clone)]
pub(crate) struct WeightPattern {
    /// The source at each position of the pattern, and the number of its records before that position.
    slots: Vec<(u32, u32)>,
    /// The number of positions of each source in the pattern.
    counts: Vec<usize>,
}

impl WeightPattern {
    /// Returns the pattern of these weights, of which some are positive and none is negative; a positive one is at
    /// least [`MIN_SHARE`] of their sum. The order is drawn under the seed.
    pub(crate) fn new(weights: &[f64], seed: u64) -> Self {
        let counts = counts(weights);
        let numbers: Vec<u32> = (0..)
            .zip(&counts)
            .flat_map(|(number, &count)| std::iter::repeat_n(number, count))
            .collect();
        // The order is drawn once for all repetitions of the pattern, so that a position needs no draw of its own.
        let order = Permutation::new(PATTERN, seed, 0);
        let mut given = vec![0; counts.len()];
        let slots = (0..PATTERN).map(|position| {
            let number = numbers[order.apply(position)];
            let before = given[number as usize];
            given[number as usize] += 1;
            (number, before)
        });
        Self {
            slots: slots.collect(),
            counts,
        }
    }

    /// Returns the source at `position`, and the number of its records before that position.
    pub(crate) fn source(&self, position: usize) -> (usize, usize) {
        let (number, before) = self.slots[position % PATTERN];
        let number = number as usize;
        let whole = (position / PATTERN).saturating_mul(self.counts[number]);
        (number, whole.saturating_add(before as usize))
    }

    /// Returns the position of record `record` of a source with a positive weight; the largest number if it lies beyond.
    pub(crate) fn position(&self, number: usize, record: usize) -> usize {
        let (block, rank) = (record / self.counts[number], record % self.counts[number]);
        let slot = (number as u32, rank as u32);
        let at = self.slots.iter().position(|&other| other == slot);
        block
            .saturating_mul(PATTERN)
            .saturating_add(at.unwrap_or(0))
            .min(usize::MAX - 1)
    }

    /// Returns the number of records of each source before `position`.
    pub(crate) fn before(&self, position: usize) -> Vec<usize> {
        let blocks = position / PATTERN;
        let mut before: Vec<usize> = self
            .counts
            .iter()
            .map(|count| count.saturating_mul(blocks))
            .collect();
        for (number, _) in &self.slots[..position % PATTERN] {
            before[*number as usize] += 1;
        }
        before
    }
}

/// Returns the number of positions of each weight in the pattern: its share rounded down, and the remaining
/// positions by the largest remainders.
fn counts(weights: &[f64]) -> Vec<usize> {
    let sum: f64 = weights.iter().sum();
    let shares: Vec<f64> = weights
        .iter()
        .map(|weight| weight / sum * PATTERN as f64)
        .collect();
    let mut counts: Vec<usize> = shares
        .iter()
        .map(|&share| (share as usize).max(usize::from(share > 0.0)))
        .collect();
    let mut by_remainder: Vec<usize> = (0..shares.len())
        .filter(|&number| shares[number] > 0.0)
        .collect();
    by_remainder.sort_by(|&a, &b| shares[b].fract().total_cmp(&shares[a].fract()));
    let total: usize = counts.iter().sum();
    for number in by_remainder
        .iter()
        .cycle()
        .take(PATTERN.saturating_sub(total))
    {
        counts[*number] += 1;
    }
    // A share of exactly one that was computed slightly smaller has been rounded up, which can make the
    // total too large.
    for _ in PATTERN..total {
        if let Some(largest) = counts.iter_mut().max() {
            *largest -= 1;
        }
    }
    counts
}
