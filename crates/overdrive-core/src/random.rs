//! Random numbers that are a pure function of a seed and a position.
//!
//! The generator is Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy
//! as 1, 2, 3", SC 2011), which PyTorch uses on GPUs: a counter goes through ten rounds of a cipher, so
//! number `k` is computed from `k` without the ones before it. There is no state to save, any thread or
//! process computes its own numbers, and they are the same on every machine and in every release.
//! libtorch's global generator is neither used nor disturbed.
//!
//! [`random_u64`] and [`uniform_below`] compute one number; [`Generator`] walks through a sequence.

use std::hash::{BuildHasher, RandomState};

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// Returns a seed that differs from call to call and from process to process.
pub fn entropy() -> u64 {
    // The standard library's only source of randomness: the keys of a `HashMap`, from the system.
    RandomState::new().hash_one(std::time::SystemTime::now())
}

/// Returns one block of Philox4x32-10: 128 random bits from a counter and a key.
pub fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for round in 0..ROUNDS {
        if round > 0 {
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        let left = u64::from(counter[0]) * u64::from(MULTIPLIERS[0]);
        let right = u64::from(counter[2]) * u64::from(MULTIPLIERS[1]);
        counter = [
            high(right) ^ counter[1] ^ key[0],
            low(right),
            high(left) ^ counter[3] ^ key[1],
            low(left),
        ];
    }
    counter
}

/// Returns 64 random bits: number `index` of the sequence `stream` under `seed`.
///
/// Use another `stream` for each purpose, so that one seed serves all of them.
pub fn random_u64(seed: u64, stream: u32, index: u64) -> u64 {
    block(seed, stream, index, 0)[0]
}

/// Returns a number below `bound`, each equally likely: number `index` of the sequence `stream` under
/// `seed`.
///
/// The reduction is Lemire's multiplication with rejection ("Fast random integer generation in an
/// interval", 2019): no number is preferred, however large the bound. `bound` 0 gives 0.
pub fn uniform_below(bound: u64, seed: u64, stream: u32, index: u64) -> u64 {
    // The smallest low half that is not over-represented: 2^64 mod bound.
    let threshold = bound.wrapping_neg().checked_rem(bound).unwrap_or(0);
    let mut attempt = 0;
    loop {
        for bits in block(seed, stream, index, attempt) {
            let product = u128::from(bits) * u128::from(bound);
            if product as u64 >= threshold {
                return (product >> 64) as u64;
            }
        }
        // Each attempt fails with a probability below one half, so 2^32 failures in a row do not happen.
        attempt = attempt.wrapping_add(1);
    }
}

/// A sequence of random numbers, and the position in it.
///
/// ```
/// use overdrive_core::random::Generator;
///
/// let mut generator = Generator::named(42, "layers.0.weight");
/// let weights: Vec<f64> = (0..4).map(|_| 0.02 * generator.normal()).collect();
/// let again: Vec<f64> = {
///     let mut generator = Generator::named(42, "layers.0.weight");
///     (0..4).map(|_| 0.02 * generator.normal()).collect()
/// };
/// assert_eq!(weights, again);
/// ```
#[derive(Debug, Clone)]
pub struct Generator {
    seed: u64,
    stream: u32,
    index: u64,
    /// The second of the two normal numbers that one block gives.
    spare: Option<f64>,
}

impl Generator {
    /// Returns the generator of the sequence `stream` under `seed`, at its beginning.
    pub fn new(seed: u64, stream: u32) -> Self {
        Self {
            seed,
            stream,
            index: 0,
            spare: None,
        }
    }

    /// Returns the generator of a named sequence, for example that of a parameter, whose initial values then depend
    /// neither on the other parameters nor on their order.
    pub fn named(seed: u64, name: &str) -> Self {
        // FNV-1a: any hash that is the same everywhere would do, Philox does the mixing.
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        Self::new(block(seed, u32::MAX, hash, 0)[0], 0)
    }

    /// Returns the generator of another sequence, chosen by `number`; this one stays where it is.
    pub fn split(&self, number: u64) -> Self {
        let seed = block(self.seed, self.stream, self.index, u32::MAX)[0];
        Self::new(block(seed, u32::MAX, number, 0)[0], 0)
    }

    fn next_block(&mut self) -> [u64; 2] {
        let block = block(self.seed, self.stream, self.index, 0);
        self.index = self.index.wrapping_add(1);
        block
    }

    /// Returns 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.next_block()[0]
    }

    /// Returns a number uniform in `[0, 1)`, a multiple of 2⁻⁵³.
    pub fn uniform(&mut self) -> f64 {
        unit(self.next_u64())
    }

    /// Returns a number of the normal distribution with mean 0 and standard deviation 1, by the
    /// Box-Muller transform.
    pub fn normal(&mut self) -> f64 {
        if let Some(spare) = self.spare.take() {
            return spare;
        }
        let [first, second] = self.next_block();
        // In (0, 1], so that the logarithm is finite.
        let radius = (-2.0 * (1.0 - unit(first)).ln()).sqrt();
        let (sin, cos) = (std::f64::consts::TAU * unit(second)).sin_cos();
        self.spare = Some(radius * sin);
        radius * cos
    }

    /// Returns an integer below `bound`, each equally likely; 0 where `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        let number = uniform_below(bound, self.seed, self.stream, self.index);
        self.index = self.index.wrapping_add(1);
        number
    }
}

/// The upper 53 bits as a number in `[0, 1)`.
fn unit(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

fn block(seed: u64, stream: u32, index: u64, attempt: u32) -> [u64; 2] {
    let out = philox4x32(
        [low(index), high(index), stream, attempt],
        [low(seed), high(seed)],
    );
    let join = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
    [join(out[0], out[1]), join(out[2], out[3])]
}

fn low(x: u64) -> u32 {
    x as u32
}

fn high(x: u64) -> u32 {
    (x >> 32) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    // The known-answer vectors that the authors ship with Random123 (kat_vectors).
    #[test]
    fn philox_gives_the_known_answers_of_random123() {
        assert_eq!(
            philox4x32([0; 4], [0; 2]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            philox4x32([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox4x32(
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0]
            ),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn reduction_is_unbiased_for_a_bound_where_plain_modulo_is_not() {
        // With 3 * 2^62, modulo would give the lower third twice as often (1/2 of the draws).
        let bound = 3 << 62;
        let draws = 30_000;
        let low = (0..draws)
            .filter(|&i| uniform_below(bound, 1, 0, i) < bound / 3)
            .count();
        // Binomial with p = 1/3: mean 10,000, standard deviation 81.6; five of them are allowed.
        assert!(
            (9_592..=10_408).contains(&low),
            "{low} of {draws} in the lower third"
        );
    }

    #[test]
    fn every_number_below_the_bound_appears_and_none_above() {
        let mut seen = [0; 7];
        for i in 0..700 {
            seen[uniform_below(7, 42, 3, i) as usize] += 1;
        }
        assert!(seen.iter().all(|&n| n > 50), "{seen:?}");
        assert_eq!(uniform_below(1, 42, 3, 0), 0);
        assert_eq!(uniform_below(0, 42, 3, 0), 0);
    }

    #[test]
    fn normal_numbers_have_mean_0_and_deviation_1_and_differ_by_name_and_seed() {
        let draw = |seed, name: &str| {
            let mut generator = Generator::named(seed, name);
            (0..200_000).map(|_| generator.normal()).collect::<Vec<_>>()
        };
        let values = draw(1, "a");
        let n = values.len() as f64;
        let mean = values.iter().sum::<f64>() / n;
        let std = (values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n).sqrt();
        let fourth = values.iter().map(|v| ((v - mean) / std).powi(4));
        let kurtosis = fourth.sum::<f64>() / n;
        // Five standard errors of each statistic at 200,000 samples.
        assert!(mean.abs() < 5.0 / n.sqrt(), "{mean}");
        assert!((std - 1.0).abs() < 5.0 / (2.0 * n).sqrt(), "{std}");
        let error = (24.0 / n).sqrt();
        assert!((kurtosis - 3.0).abs() < 5.0 * error, "{kurtosis}");
        assert_eq!(values, draw(1, "a"));
        for other in [draw(2, "a"), draw(1, "b")] {
            let correlation = values.iter().zip(&other).map(|(a, b)| a * b).sum::<f64>() / n;
            assert!(correlation.abs() < 5.0 / n.sqrt(), "{correlation}");
        }
    }

    #[test]
    fn a_split_leaves_its_origin_where_it_is_and_depends_on_its_position() {
        let mut origin = Generator::new(7, 3);
        let next = origin.clone().next_u64();
        let (first, second) = (origin.split(0).next_u64(), origin.split(1).next_u64());
        assert_ne!(first, second);
        assert_eq!(origin.next_u64(), next);
        assert_ne!(origin.split(0).next_u64(), first);
        assert!((0..1000).all(|_| origin.below(3) < 3));
        assert!((0..1000).all(|_| (0.0..1.0).contains(&origin.uniform())));
    }

    #[test]
    fn streams_and_seeds_are_different_sequences() {
        let take = |seed, stream| {
            (0..8)
                .map(|i| random_u64(seed, stream, i))
                .collect::<Vec<_>>()
        };
        assert_ne!(take(1, 0), take(2, 0));
        assert_ne!(take(1, 0), take(1, 1));
        assert_eq!(take(1, 1), take(1, 1));
    }
}
