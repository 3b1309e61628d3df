use std::hash::{BuildHasher, RandomState};

/// SplitMix64 (Steele, Lea & Flood 2014): 64 bits of state, passes BigCrush, the same numbers on every
/// machine. libtorch's global generator is left alone, so that a program may train and sample.
#[derive(Debug, Clone)]
pub(crate) struct SplitMix64 {
    state: u64,
}

impl SplitMix64 {
    /// The stream of row `row` of a batch; each row has its own.
    pub(crate) fn new(seed: u64, row: usize) -> Self {
        let mut generator = SplitMix64 { state: seed };
        // A row is its number of outputs away from its neighbour in no usable way: mixed, not added.
        generator.state = generator.next() ^ (row as u64).wrapping_mul(0xd134_2543_de82_ef95);
        generator
    }

    /// A seed that differs from call to call.
    pub(crate) fn entropy() -> u64 {
        RandomState::new().hash_one(std::time::SystemTime::now())
    }

    /// Another stream that follows from this one's state, and leaves it where it is.
    pub(crate) fn split(&self, number: u64) -> Self {
        let mut other = SplitMix64 {
            state: self.state ^ number.wrapping_mul(0xbea2_25f9_eb34_556d),
        };
        other.state = other.next();
        other
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in [0, 1), in steps of 2^-53.
    pub(crate) fn uniform(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}
