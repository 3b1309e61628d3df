//! Random numbers that are a pure function of a seed and a position.
//!
//! The generator is Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy
//! as 1, 2, 3", SC 2011), a counter put through ten rounds of a cipher: number `k` is computed from
//! `k` without the ones before it. So nothing has a state to save, any thread or process computes
//! its own part, and the numbers are the same on every machine and in every release.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// One block of Philox4x32-10: 128 random bits out of a counter and a key.
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

/// 64 random bits: number `index` of the sequence `stream` under `seed`.
///
/// Use another `stream` for each purpose, so that one seed serves all of them.
pub fn random_u64(seed: u64, stream: u32, index: u64) -> u64 {
    block(seed, stream, index, 0)[0]
}

/// A number below `bound`, each equally likely: number `index` of the sequence `stream` under
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
        // Each attempt fails with a probability below one half; 2^32 of them do not happen.
        attempt = attempt.wrapping_add(1);
    }
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
