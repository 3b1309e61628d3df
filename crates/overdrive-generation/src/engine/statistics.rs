use std::collections::VecDeque;
use std::time::Duration;

/// What an [`Engine`](crate::Engine) does and has done.
#[derive(Debug, Clone, PartialEq, Default)]
#[non_exhaustive]
pub struct EngineStatistics {
    /// Texts that are computed now.
    pub running: usize,
    /// Texts that wait for a seat, tokens or blocks.
    pub waiting: usize,
    /// Blocks of the cache that texts hold.
    pub blocks_used: usize,
    /// Blocks of the cache.
    pub blocks: usize,
    /// Steps computed.
    pub steps: u64,
    /// Time spent in them.
    pub busy: Duration,
    /// Tokens that went through the model: prompts and continuations, recomputed ones twice.
    pub computed_tokens: u64,
    /// Tokens of prompts that were found in the cache, and not computed.
    pub reused_tokens: u64,
    /// Tokens chosen.
    pub generated_tokens: u64,
    /// How often a text had to give its blocks back.
    pub preemptions: u64,
    /// Tokens that were computed again after that.
    pub recomputed_tokens: u64,
    /// Requests that ended, cancelled and failed ones not counted.
    pub finished: u64,
    /// Requests that were cancelled.
    pub cancelled: u64,
    /// Requests that failed after they were taken.
    pub failed: u64,
    /// From a request's submission to its first token.
    pub time_to_first_token: Latency,
}

impl EngineStatistics {
    /// Tokens chosen a second of [`busy`](EngineStatistics::busy).
    pub fn tokens_per_second(&self) -> f64 {
        match self.generated_tokens {
            0 => 0.0,
            tokens => tokens as f64 / self.busy.as_secs_f64().max(1e-9),
        }
    }
}

impl std::fmt::Display for EngineStatistics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} running, {} waiting, {} of {} blocks, {:.1} tokens/s, {} reused, {} preemptions",
            self.running,
            self.waiting,
            self.blocks_used,
            self.blocks,
            self.tokens_per_second(),
            self.reused_tokens,
            self.preemptions,
        )
    }
}

/// How long something took, over the last 1024 times.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Latency {
    /// Half took less.
    pub median: Duration,
    /// 95 of 100 took less.
    pub p95: Duration,
    /// None took more.
    pub max: Duration,
}

/// The last times of something.
#[derive(Debug, Default)]
pub(super) struct Recent {
    times: VecDeque<Duration>,
}

impl Recent {
    const KEPT: usize = 1024;

    pub(super) fn push(&mut self, time: Duration) {
        if self.times.len() == Recent::KEPT {
            self.times.pop_front();
        }
        self.times.push_back(time);
    }

    pub(super) fn summary(&self) -> Latency {
        let mut sorted: Vec<_> = self.times.iter().copied().collect();
        sorted.sort_unstable();
        let at = |share: f64| {
            let place = (share * sorted.len() as f64) as usize;
            let last = sorted.len().saturating_sub(1);
            sorted.get(place.min(last)).copied().unwrap_or_default()
        };
        Latency {
            median: at(0.5),
            p95: at(0.95),
            max: at(1.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_are_those_of_the_last_times() {
        let mut recent = Recent::default();
        assert_eq!(recent.summary(), Latency::default());
        (1..=2048).for_each(|ms| recent.push(Duration::from_millis(ms)));
        let summary = recent.summary();
        assert_eq!(summary.median, Duration::from_millis(1024 + 513));
        assert_eq!(summary.max, Duration::from_millis(2048));
        assert!(summary.p95 > summary.median && summary.p95 < summary.max);
    }
}
