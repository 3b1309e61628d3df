use crate::processors::{process, softmax};
use crate::random::SplitMix64;
use crate::{Error, GenerationConfig, Result};

/// Chooses one row's next token from its logits.
///
/// It has a random state of its own: two samplers with the same configuration, seed and row choose the
/// same tokens from the same logits, whatever happens around them.
#[derive(Debug, Clone)]
pub struct Sampler {
    config: GenerationConfig,
    random: SplitMix64,
    row: usize,
}

impl Sampler {
    /// A sampler for row `row` of a batch. `seed` takes the place of `config.seed` where that is
    /// `None`.
    ///
    /// # Errors
    /// When the configuration is invalid.
    pub fn new(config: &GenerationConfig, seed: u64, row: usize) -> Result<Sampler> {
        config.validate()?;
        let random = SplitMix64::new(config.seed.unwrap_or(seed), row);
        Ok(Sampler {
            config: config.clone(),
            random,
            row,
        })
    }

    /// The next token id. `logits (V,)` are processed in place; `present` are the ids so far, prompt
    /// included, of which the last `new` are generated.
    ///
    /// Greedy takes the first of the best; sampling inverts the cumulative distribution at one uniform
    /// number a token.
    ///
    /// # Errors
    /// [`Error::BadLogits`] where a logit is NaN or +∞, or none is finite.
    pub fn next_token(&mut self, logits: &mut [f32], present: &[i64], new: usize) -> Result<i64> {
        let bad = Error::BadLogits { row: self.row };
        if logits.iter().any(|x| x.is_nan() || *x == f32::INFINITY) {
            return Err(bad);
        }
        process(logits, present, new, &self.config);
        let mut best = None;
        for (id, &score) in logits.iter().enumerate() {
            if score > best.map_or(f32::NEG_INFINITY, |(_, best)| best) {
                best = Some((id, score));
            }
        }
        let Some((best, _)) = best else {
            return Err(bad);
        };
        if self.config.is_greedy() {
            return Ok(best as i64);
        }
        let mut left = self.random.uniform();
        let probabilities = softmax(logits);
        let total: f64 = probabilities.iter().map(|&p| f64::from(p)).sum();
        left *= total;
        for (id, &probability) in probabilities.iter().enumerate() {
            left -= f64::from(probability);
            if left < 0.0 {
                return Ok(id as i64);
            }
        }
        // Rounding may leave a last crumb; it belongs to the likeliest token.
        Ok(best as i64)
    }
}
