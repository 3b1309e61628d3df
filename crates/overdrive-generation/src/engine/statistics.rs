use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The state and the counters of an [`Engine`](crate::Engine).
#[derive(Debug, Clone, PartialEq, Default)]
#[non_exhaustive]
pub struct EngineStatistics {
    /// The sequences that are computed now.
    pub running: usize,
    /// The sequences that wait for a seat, tokens or blocks.
    pub waiting: usize,
    /// The blocks of the cache that sequences hold.
    pub blocks_used: usize,
    /// The blocks of the cache.
    pub blocks: usize,
    /// The bytes of all blocks of the cache, and of the states that are allocated in recurrent layers.
    pub cache_bytes: u64,
    /// The time of [`Engine::warm_up`](crate::Engine::warm_up), which is in none of the other values.
    pub warm_up: Duration,
    /// The steps computed.
    pub steps: u64,
    /// The steps that were replayed CUDA graphs.
    pub replayed_steps: u64,
    /// Those of them that the device was given before the tokens of the step before were read.
    pub steps_ahead: u64,
    /// Those of them that were discarded, because a sequence had chosen another token than the device expected.
    pub steps_discarded: u64,
    /// The CUDA graphs that were captured.
    pub graphs: usize,
    /// The bytes of their memory pools, and of what they read and write.
    pub graph_bytes: u64,
    /// The time spent in steps.
    pub busy: Duration,
    /// The tokens that went through the model: prompts and continuations, recomputed ones twice.
    pub computed_tokens: u64,
    /// The tokens of prompts that were found in the cache and not computed.
    pub reused_tokens: u64,
    /// The tokens generated.
    pub generated_tokens: u64,
    /// The tokens that were proposed by prompt lookup or a draft model and verified.
    pub proposed_tokens: u64,
    /// Those of them that were accepted.
    pub accepted_tokens: u64,
    /// The number of times a sequence was preempted and its blocks taken back.
    pub preemptions: u64,
    /// The tokens that were computed again after that.
    pub recomputed_tokens: u64,
    /// The requests whose samples all ended by themselves.
    pub finished: u64,
    /// The requests of which a sample was ended early: those that were cancelled or exceeded `max_time`.
    pub cancelled: u64,
    /// The requests that failed after they were accepted.
    pub failed: u64,
    /// The time from a request's submission to its first token.
    pub time_to_first_token: Latency,
}

impl EngineStatistics {
    /// Returns the tokens generated per second of [`busy`](EngineStatistics::busy).
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

/// A latency over the last 1024 measurements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Latency {
    /// The median.
    pub median: Duration,
    /// The 95th percentile.
    pub p95: Duration,
    /// The maximum.
    pub max: Duration,
}

/// The last measurements of a duration. Copies share them: the engine's thread measures, and another one that asks for a
/// summary sorts.
#[derive(Debug, Clone, Default)]
pub(super) struct LatencyWindow(Arc<Mutex<VecDeque<Duration>>>);

impl LatencyWindow {
    // Enough for a stable 95th percentile, and few enough that sorting them for a report is cheap.
    const KEPT: usize = 1024;

    pub(super) fn push(&self, time: Duration) {
        let mut times = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if times.len() == LatencyWindow::KEPT {
            times.pop_front();
        }
        times.push_back(time);
    }

    pub(super) fn summary(&self) -> Latency {
        let times = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut sorted: Vec<_> = times.iter().copied().collect();
        drop(times);
        sorted.sort_unstable();
        let at = |quantile: f64| {
            let index = (quantile * sorted.len() as f64) as usize;
            let last = sorted.len().saturating_sub(1);
            sorted.get(index.min(last)).copied().unwrap_or_default()
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
        let recent = LatencyWindow::default();
        assert_eq!(recent.summary(), Latency::default());
        (1..=2048).for_each(|ms| recent.push(Duration::from_millis(ms)));
        let summary = recent.summary();
        assert_eq!(summary.median, Duration::from_millis(1024 + 513));
        assert_eq!(summary.max, Duration::from_millis(2048));
        // The 973rd of the 1024.
        assert_eq!(summary.p95, Duration::from_millis(1024 + 973));
        assert_eq!(recent.clone().summary(), summary);
    }
}
