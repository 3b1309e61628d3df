//! Tokens per second.

use std::collections::VecDeque;
use std::time::Duration;

/// A meter of the tokens per second over the last few steps.
///
/// The rate is the tokens of the window divided by its time, not a mean of rates, so that a slow step
/// weighs as much as it costs.
///
/// ```
/// use std::time::Duration;
/// use overdrive_profiling::Throughput;
///
/// let mut meter = Throughput::new(2);
/// meter.record(1000, Duration::from_secs(100)); // outside the window of the last two
/// meter.record(1000, Duration::from_secs(1));
/// meter.record(1000, Duration::from_secs(3));
/// assert_eq!(meter.tokens_per_second(), 500.0);
/// assert_eq!(meter.tokens_seen(), 3000);
/// ```
#[derive(Debug, Clone)]
pub struct Throughput {
    window: usize,
    steps: VecDeque<(u64, Duration)>,
    tokens_seen: u64,
}

impl Throughput {
    /// Creates a meter over the last `window` steps; 0 counts as 1.
    pub fn new(window: usize) -> Self {
        Self {
            window: window.max(1),
            steps: VecDeque::new(),
            tokens_seen: 0,
        }
    }

    /// Adds a step of `tokens` tokens that took `time`.
    pub fn record(&mut self, tokens: u64, time: Duration) {
        if self.steps.len() == self.window {
            self.steps.pop_front();
        }
        self.steps.push_back((tokens, time));
        self.tokens_seen += tokens;
    }

    /// Returns the tokens per second over the window; 0 before the first step.
    pub fn tokens_per_second(&self) -> f64 {
        let tokens: u64 = self.steps.iter().map(|(tokens, _)| tokens).sum();
        let time: Duration = self.steps.iter().map(|(_, time)| time).sum();
        if time.is_zero() {
            0.0
        } else {
            tokens as f64 / time.as_secs_f64()
        }
    }

    /// Returns the number of tokens since the meter was created.
    pub fn tokens_seen(&self) -> u64 {
        self.tokens_seen
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn before_the_first_step_the_rate_is_zero_and_not_nan() {
        assert_eq!(Throughput::new(10).tokens_per_second(), 0.0);
    }

    #[test]
    fn a_window_of_zero_steps_is_one_of_one_step() {
        let mut meter = Throughput::new(0);
        meter.record(10, Duration::from_secs(1));
        meter.record(60, Duration::from_secs(2));
        assert_eq!(meter.tokens_per_second(), 30.0);
    }
}
