//! Counter-based dropout: the dropped weights depend only on the seed and the position, so the backward pass
//! drops the same weights without a stored mask.

use overdrive_core::random::random_u64;
use overdrive_kernels::Real;

/// The stream of random numbers for the dropout of attention.
//
// The letters "drop".
const DROPOUT_STREAM: u32 = 0x6472_6f70;

/// The probability and the seed of dropout.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Dropout {
    /// The probability that a weight is dropped, in `0..1`.
    pub(crate) probability: f64,
    /// The seed of the pattern.
    pub(crate) seed: u64,
}

/// Two random words for each row of a block, which are mixed with the counter of a key.
#[derive(Debug, Clone)]
pub(super) struct RowKeys {
    first: [u32; super::block::ROWS],
    second: [u32; super::block::ROWS],
    /// The bound below which a weight's word drops the weight.
    threshold: u32,
    survivor: f64,
}

impl Dropout {
    /// Returns the words of rows `ids`, each the index of a query in its batch and head.
    pub(super) fn rows(&self, ids: impl Iterator<Item = u64>) -> RowKeys {
        let (mut first, mut second) = ([0; super::block::ROWS], [0; super::block::ROWS]);
        for ((id, first), second) in ids.zip(&mut first).zip(&mut second) {
            // The halves of a random word are two independent words.
            let word = random_u64(self.seed, DROPOUT_STREAM, id);
            (*first, *second) = ((word >> 32) as u32, word as u32);
        }
        RowKeys {
            first,
            second,
            #[allow(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a probability in 0..1 of 2^32 words"
            )]
            threshold: (self.probability * 4_294_967_296.0) as u32,
            // Finite, because a probability of 1 is refused with the other options.
            survivor: 1.0 / (1.0 - self.probability),
        }
    }
}

impl RowKeys {
    /// Zeroes the dropped entries of `tile (keys, lanes)`, whose first key is `start`, and scales the
    /// others by `1 / (1 - probability)`.
    #[inline(always)]
    pub(super) fn apply<R: Real>(&self, tile: &mut [R], lanes: usize, start: usize) {
        let survivor = R::of(self.survivor);
        for (key, row) in tile.chunks_exact_mut(lanes).enumerate() {
            // Long sequences wrap around at 2^32 keys.
            // The odd factor, about 2^32 over the golden ratio, is one-to-one on words and spreads neighbouring
            // keys over all bits.
            #[allow(clippy::cast_possible_truncation, reason = "the counter wraps around")]
            let counter = ((start + key) as u32).wrapping_mul(0x9e37_79b1);
            for ((x, &first), &second) in row.iter_mut().zip(&self.first).zip(&self.second) {
                // Two rounds of multiply and shift, Wellons' `lowbias32`, with a row's word before each. Not Philox,
                // whose ten rounds for each weight would take longer than the matmuls of small heads.
                let mut word = counter ^ first;
                word = (word ^ (word >> 16))
                    .wrapping_mul(0x7feb_352d)
                    .wrapping_add(second);
                word = (word ^ (word >> 15)).wrapping_mul(0x846c_a68b);
                word ^= word >> 16;
                *x = if word < self.threshold {
                    R::ZERO
                } else {
                    *x * survivor
                };
            }
        }
    }
}
