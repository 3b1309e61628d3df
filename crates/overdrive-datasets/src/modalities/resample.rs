//! The resampling of audio.

use serde::{Deserialize, Serialize};

use crate::Result;
use overdrive_core::check_option;

/// The low-pass filter of resampling, which removes frequencies above half the lower rate: a windowed sinc, as in
/// `torchaudio.functional.resample`, with its names and defaults.
///
/// A wider filter is steeper and costs in proportion. A width of 64 with a `rolloff` of 0.9475937167399596
/// corresponds to librosa's `kaiser_best`, according to torchaudio's documentation.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Resampling {
    /// The number of zero crossings of the sinc on each side. Default: 6.
    pub lowpass_filter_width: u32,
    /// The cutoff frequency as a fraction of half the lower rate, above 0 and at most 1. Default: 0.99.
    pub rolloff: f64,
}

impl Default for Resampling {
    fn default() -> Self {
        Self {
            lowpass_filter_width: 6,
            rolloff: 0.99,
        }
    }
}

impl Resampling {
    pub(super) fn check(&self) -> Result<()> {
        let Self {
            lowpass_filter_width: width,
            rolloff,
        } = *self;
        // The upper bound keeps the table of weights small.
        check_option(
            (1..=1024).contains(&width),
            "lowpass_filter_width",
            width,
            "from 1 to 1024",
        )?;
        let valid = rolloff > 0.0 && rolloff <= 1.0;
        check_option(valid, "rolloff", rolloff, "above 0 and at most 1")?;
        Ok(())
    }
}

/// A resampler from one rate to another.
///
/// The value between samples is `sum_i x[i] * sinc(t) * cos^2(pi t / 2w) * base / from` with
/// `t = (i / from - time) * base` for `|t| < w`: a sum over `2 w` zero crossings. With the rates divided by their
/// greatest common divisor, the weights repeat every `to` samples of the output, so they are a table by phase.
#[derive(Debug)]
pub(super) struct Resampler {
    /// The rates, divided by their greatest common divisor.
    from: usize,
    to: usize,
    filter: Filter,
    /// The weights of each of the `to` phases. The table is empty if it would be too large: rates without a large
    /// common divisor are rare, so their weights are computed for each sample.
    table: Vec<Weights>,
}

/// The windowed sinc.
#[derive(Debug)]
struct Filter {
    from: f64,
    to: f64,
    width: f64,
    base: f64,
}

/// The weights of the input samples for one phase.
#[derive(Debug)]
struct Weights {
    /// The input sample of the first weight, relative to the start of the period.
    first: isize,
    weights: Vec<f32>,
}

/// The largest number of weights in a table: 16 MiB.
const MAX_WEIGHTS: f64 = (4 << 20) as f64;

impl Filter {
    /// Returns the number of input samples on each side that have a weight.
    fn reach(&self) -> f64 {
        self.width * self.from / self.base
    }

    fn weights(&self, phase: usize) -> Weights {
        let middle = phase as f64 * self.from / self.to;
        let first = (middle - self.reach()).ceil() as isize;
        let last = (middle + self.reach()).floor() as isize;
        let weight = |sample: isize| {
            let t = (sample as f64 - middle) / self.from * self.base;
            let window = (t * std::f64::consts::FRAC_PI_2 / self.width).cos().powi(2);
            (sinc(t) * window * self.base / self.from) as f32
        };
        Weights {
            first,
            weights: (first..=last).map(weight).collect(),
        }
    }
}

impl Resampler {
    pub(super) fn new(from_hz: u32, to_hz: u32, options: &Resampling) -> Self {
        let common = greatest_common_divisor(from_hz, to_hz).max(1);
        let (from, to) = ((from_hz / common).max(1), (to_hz / common).max(1));
        let filter = Filter {
            from: f64::from(from),
            to: f64::from(to),
            width: f64::from(options.lowpass_filter_width),
            base: f64::from(from.min(to)) * options.rolloff,
        };
        let weights = 2.0 * filter.reach() * filter.to;
        let kept = if weights <= MAX_WEIGHTS {
            to as usize
        } else {
            0
        };
        Self {
            from: from as usize,
            to: to as usize,
            table: (0..kept).map(|phase| filter.weights(phase)).collect(),
            filter,
        }
    }

    /// Resamples to `len * to / from` samples, rounded up. The audio is extended by silence.
    pub(super) fn apply(&self, samples: &[f32]) -> Vec<f32> {
        if self.from == self.to {
            return samples.to_vec();
        }
        let len = (samples.len() as u128 * self.to as u128).div_ceil(self.from as u128) as usize;
        let at = |phase: usize| {
            let start = (phase / self.to * self.from) as isize;
            let sum =
                |weights: &Weights| weighted_sum(samples, start + weights.first, &weights.weights);
            match self.table.get(phase % self.to) {
                Some(weights) => sum(weights),
                None => sum(&self.filter.weights(phase % self.to)),
            }
        };
        (0..len).map(at).collect()
    }
}

/// Returns the dot product of the weights with the samples from `start` on, which may be outside.
fn weighted_sum(samples: &[f32], start: isize, weights: &[f32]) -> f32 {
    let inside = |phase: isize| phase.clamp(0, samples.len() as isize) as usize;
    let begin = inside(start);
    let end = inside(start + weights.len() as isize).max(begin);
    let skipped = (begin as isize - start) as usize;
    // If no sample is inside, `skipped` may exceed the number of weights.
    let weights = weights.get(skipped..).unwrap_or_default();
    // Eight independent sums, which the compiler keeps in one vector register.
    let mut sums = [0.0_f32; 8];
    let samples = &samples[begin..end];
    let (blocks, weight_blocks) = (samples.chunks_exact(8), weights.chunks_exact(8));
    let rest = blocks.remainder();
    let rest_weights = &weights[(samples.len() - rest.len()).min(weights.len())..];
    for (block, weights) in blocks.zip(weight_blocks) {
        for (sum, (sample, weight)) in sums.iter_mut().zip(block.iter().zip(weights)) {
            *sum += sample * weight;
        }
    }
    let rest: f32 = rest.iter().zip(rest_weights).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

fn sinc(t: f64) -> f64 {
    let x = t * std::f64::consts::PI;
    if x == 0.0 { 1.0 } else { x.sin() / x }
}

fn greatest_common_divisor(a: u32, b: u32) -> u32 {
    match b {
        0 => a,
        _ => greatest_common_divisor(b, a % b),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tone_below_both_cutoffs_is_unchanged() {
        let tone = |rate: u32| -> Vec<f32> {
            (0..rate / 5)
                .map(|i| {
                    (f64::from(i) / f64::from(rate) * 440.0 * std::f64::consts::TAU).sin() as f32
                })
                .collect()
        };
        let steep = Resampling {
            lowpass_filter_width: 64,
            rolloff: 0.95,
        };
        for (from, to) in [
            (44_100, 16_000),
            (8_000, 16_000),
            (48_000, 16_000),
            (22_050, 44_100),
        ] {
            let made = Resampler::new(from, to, &steep).apply(&tone(from));
            let expected = tone(to);
            assert_eq!(made.len(), expected.len());
            // The filter reaches beyond the ends, where there is silence.
            let inner = expected.len() / 5..expected.len() * 4 / 5;
            for at in inner {
                assert!(
                    (made[at] - expected[at]).abs() < 2e-4,
                    "{from} {to} {at}: {} {}",
                    made[at],
                    expected[at]
                );
            }
        }
    }

    #[test]
    fn rates_without_a_common_divisor_need_no_large_table() {
        let wide = Resampling {
            lowpass_filter_width: 64,
            ..Resampling::default()
        };
        let samples: Vec<f32> = (0..300_u32).map(|i| (i % 17) as f32).collect();
        let resampler = Resampler::new(96_001, 16_000, &wide);
        assert!(resampler.table.is_empty());
        let table = (0..resampler.to)
            .map(|phase| resampler.filter.weights(phase))
            .collect();
        let expected = Resampler { table, ..resampler }.apply(&samples);
        assert_eq!(
            Resampler::new(96_001, 16_000, &wide).apply(&samples),
            expected
        );
        assert_eq!(expected.len(), 50);
    }

    #[test]
    fn resampled_audio_keeps_its_duration() {
        let resampler = Resampler::new(44_100, 16_000, &Resampling::default());
        for len in [0, 1, 2, 3, 5, 100, 441, 442, 44_100] {
            let made = resampler.apply(&vec![1.0; len]);
            assert_eq!(made.len(), (len * 160).div_ceil(441), "{len}");
            assert!(made.iter().all(|value| value.is_finite()));
        }
        assert_eq!(
            Resampler::new(16_000, 16_000, &Resampling::default()).apply(&[0.5, 1.0]),
            [0.5, 1.0]
        );
    }
}
