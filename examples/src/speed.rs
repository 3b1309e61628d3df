//! Measurement of a model's decoding speed.

use std::time::Instant;

use anyhow::Result;
use overdrive::generation::{GenerationConfig, generate};
use overdrive::sys::threads;
use overdrive::transformer::CausalLm;
use tch::Tensor;

use crate::print_line;

/// Returns the tokens per second of one greedy sequence of 64 tokens.
pub fn decode_tokens_per_second(model: &CausalLm) -> Result<f64> {
    let config = GenerationConfig {
        max_new_tokens: Some(64),
        min_new_tokens: 64,
        ..GenerationConfig::default()
    };
    let output = generate(model, &[vec![1, 2, 3, 4]], &config)?;
    Ok(output.timings.decode_tokens_per_second())
}

/// A benchmark of greedy decoding, for any function from tokens to logits.
#[derive(Debug, Clone)]
pub struct GreedySpeed {
    /// The number of tokens after the prompt.
    pub new_tokens: usize,
    /// The number of timed rounds, after one warm-up round.
    pub rounds: usize,
}

impl GreedySpeed {
    /// Decodes greedily after `prompt` (B, T) and returns the new tokens, one row for each step. `step` gets the
    /// tokens (B, T) or (B, 1) and a flag that is `true` at the start of a sequence, and returns the last logits.
    ///
    /// Prints the medians of prefill and decode, in tokens per second, as one line of JSON.
    pub fn measure(
        &self,
        side: &str,
        prompt: &Tensor,
        mut step: impl FnMut(&Tensor, bool) -> Result<Tensor>,
    ) -> Result<Vec<Vec<i64>>> {
        let batch = prompt.size().first().copied().unwrap_or(1) as f64;
        let (mut prefills, mut decodes, mut found) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..=self.rounds {
            found.clear();
            let start = Instant::now();
            let mut logits = step(prompt, true)?;
            prefills.push(prompt.numel() as f64 / start.elapsed().as_secs_f64());
            let start = Instant::now();
            for _ in 0..self.new_tokens {
                let next = logits.f_argmax(-1, false)?;
                logits = step(&next, false)?;
                found.push(Vec::<i64>::try_from(next.f_view(-1)?)?);
            }
            decodes.push(batch * self.new_tokens as f64 / start.elapsed().as_secs_f64());
        }
        let median = |speeds: &mut Vec<f64>| {
            speeds.remove(0);
            speeds.sort_by(f64::total_cmp);
            speeds.get(speeds.len() / 2).copied().unwrap_or_default()
        };
        let line = serde_json::json!({
            "side": side, "threads": threads::intra_op(),
            "prefill": median(&mut prefills), "decode": median(&mut decodes),
        });
        print_line(line);
        Ok(found)
    }
}
