//! Random permutations of any length, without a list of the elements.

use overdrive_core::random::random_u64;

/// The number of rounds of the network. Four are the proven minimum for an ideal round function (Luby and Rackoff
/// 1988); eight cover a weaker one, and each takes about two nanoseconds.
const ROUNDS: usize = 8;
/// The smallest size of the network in bits: a smaller one has too few functions to choose from. Elements beyond
/// the length are skipped by repetition.
const MIN_BITS: u32 = 8;
/// The stream of random numbers that permutations use (see [`overdrive_core::random::random_u64`]).
const STREAM: u32 = 0x5045_524d;

/// A permutation of `0..len`, computed one element at a time: constant memory for any length.
///
/// A Feistel network permutes the numbers of as many bits as `len` needs. If the result is outside `0..len`, the
/// network is applied again (cycle walking; Black and Rogaway, "Ciphers with arbitrary finite domains", 2002),
/// less than twice on average from 256 elements on. The same `len`, `seed` and `number` give the same permutation
/// on every machine and in every release.
///
/// ```
/// let order = overdrive_datasets::Permutation::new(1_000_000_000_000, 42, 0);
/// assert_eq!(order.invert(order.apply(123_456_789_012)), 123_456_789_012);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Permutation {
    len: u64,
    /// The number of bits of the left half; the right one has as many or one more.
    left_bits: u32,
    right_bits: u32,
    keys: [u64; ROUNDS],
}

impl Permutation {
    /// Returns permutation `number`, for example that of an epoch, under `seed`.
    pub fn new(len: usize, seed: u64, number: u64) -> Self {
        let len = len as u64;
        let bits = (u64::BITS - len.saturating_sub(1).leading_zeros()).max(MIN_BITS);
        let mut keys = [0; ROUNDS];
        for (round, key) in (0..).zip(&mut keys) {
            // The keys of different permutations are drawn from different sequences.
            let seed = random_u64(seed, STREAM, number);
            *key = random_u64(seed, STREAM, round);
        }
        Self {
            len,
            left_bits: bits / 2,
            right_bits: bits - bits / 2,
            keys,
        }
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Returns `true` if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the element at `position`. A position outside `0..len` is mapped to itself.
    pub fn apply(&self, position: usize) -> usize {
        self.walk(position, |mut left, mut right| {
            for (round, key) in self.keys.iter().enumerate() {
                self.step(round, *key, &mut left, &mut right);
            }
            (left, right)
        })
    }

    /// Returns the position of `element`; the inverse of [`Permutation::apply`].
    pub fn invert(&self, element: usize) -> usize {
        self.walk(element, |mut left, mut right| {
            for (round, key) in self.keys.iter().enumerate().rev() {
                self.step(round, *key, &mut left, &mut right);
            }
            (left, right)
        })
    }

    fn walk(&self, start: usize, network: impl Fn(u64, u64) -> (u64, u64)) -> usize {
        let mut at = start as u64;
        if at >= self.len {
            return start;
        }
        // The loop ends: the network permutes a finite set, so repetition returns to the start at the latest,
        // which is inside.
        loop {
            let (left, right) = network(at >> self.right_bits, at & mask(self.right_bits));
            at = left << self.right_bits | right;
            if at < self.len {
                return at as usize;
            }
        }
    }

    /// Mixes one half into the other, alternating by round. It is its own inverse.
    fn step(&self, round: usize, key: u64, left: &mut u64, right: &mut u64) {
        if round.is_multiple_of(2) {
            *left ^= mix(*right ^ key) & mask(self.left_bits);
        } else {
            *right ^= mix(*left ^ key) & mask(self.right_bits);
        }
    }
}

fn mask(bits: u32) -> u64 {
    // A half has at most 32 bits, so the shift does not overflow.
    (1 << bits) - 1
}

/// Returns the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
/// generators", 2014), in Stafford's variant 13.
fn mix(mut x: u64) -> u64 {
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_element_appears_once_and_the_inverse_leads_back(
            len in 0_usize..3000, seed in any::<u64>(), number in 0_u64..4,
        ) {
            let order = Permutation::new(len, seed, number);
            let mut seen = vec![false; len];
            for position in 0..len {
                let element = order.apply(position);
                prop_assert!(!std::mem::replace(&mut seen[element], true));
                prop_assert_eq!(order.invert(element), position);
            }
            prop_assert_eq!(order.apply(len), len);
        }

        #[test]
        fn positions_of_any_length_are_inverted(len in 1_usize.., position in any::<usize>(), seed in any::<u64>()) {
            let order = Permutation::new(len, seed, 0);
            let position = position % len;
            prop_assert!(order.apply(position) < len);
            prop_assert_eq!(order.invert(order.apply(position)), position);
        }
    }

    #[test]
    fn all_orders_of_five_are_equally_likely() {
        let mut counts = std::collections::HashMap::new();
        let draws = 24_000;
        for seed in 0..draws {
            let order = Permutation::new(5, seed, 7);
            let key: Vec<usize> = (0..5).map(|position| order.apply(position)).collect();
            *counts.entry(key).or_insert(0_u32) += 1;
        }
        assert_eq!(counts.len(), 120);
        // Chi-square with 119 degrees of freedom: 180 is exceeded once in 4,000 times.
        let expected = draws as f64 / 120.0;
        let chi: f64 = counts
            .values()
            .map(|&n| (f64::from(n) - expected).powi(2) / expected)
            .sum();
        assert!(chi < 180.0, "{chi}");
    }

    #[test]
    fn neighbours_are_separated_and_positions_are_evenly_filled() {
        let len = 100_000;
        let order = Permutation::new(len, 3, 0);
        let elements: Vec<usize> = (0..len).map(|position| order.apply(position)).collect();
        // Correlation of neighbours: the standard deviation is 1 / sqrt(len) = 0.003.
        let mean = (len - 1) as f64 / 2.0;
        let variance: f64 = elements.iter().map(|&e| (e as f64 - mean).powi(2)).sum();
        let product: f64 = elements
            .windows(2)
            .map(|w| (w[0] as f64 - mean) * (w[1] as f64 - mean))
            .sum();
        assert!((product / variance).abs() < 0.016, "{}", product / variance);
        // Where the first hundredth of the records goes: 100 bins of 10 on average.
        let mut bins = [0_u32; 100];
        for element in 0..1000 {
            bins[order.invert(element) / 1000] += 1;
        }
        let chi: f64 = bins
            .iter()
            .map(|&n| (f64::from(n) - 10.0).powi(2) / 10.0)
            .sum();
        assert!(chi < 160.0, "{chi}");
    }

    #[test]
    fn seeds_and_numbers_give_different_orders() {
        let take = |seed, number| {
            let order = Permutation::new(1000, seed, number);
            (0..6)
                .map(|position| order.apply(position))
                .collect::<Vec<_>>()
        };
        assert_ne!(take(1, 0), take(2, 0));
        assert_ne!(take(1, 0), take(1, 1));
        assert_eq!(take(1, 1), take(1, 1));
    }
}
