//! The counters of the server, in the text format of Prometheus.

use std::collections::BTreeMap;
use std::fmt::{self, Display, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use overdrive_generation::EngineStatistics;

/// The upper bounds of the buckets for the time to the first token, in seconds, as in vLLM.
const FIRST_TOKEN: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0,
];

/// The upper bounds of the buckets for the time of a whole request, in seconds, as in vLLM.
const WHOLE_REQUEST: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0,
];

#[derive(Debug)]
pub(crate) struct Metrics(Mutex<Counters>);

#[derive(Debug)]
struct Counters {
    /// The answers by route and status.
    responses: BTreeMap<(&'static str, u16), u64>,
    prompt_tokens: u64,
    first_token: Histogram,
    whole_request: Histogram,
}

impl Metrics {
    pub(crate) fn new() -> Metrics {
        Metrics(Mutex::new(Counters {
            responses: BTreeMap::new(),
            prompt_tokens: 0,
            first_token: Histogram::new(FIRST_TOKEN),
            whole_request: Histogram::new(WHOLE_REQUEST),
        }))
    }

    fn counters(&self) -> MutexGuard<'_, Counters> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn responded(&self, route: &'static str, status: u16) {
        *self
            .counters()
            .responses
            .entry((route, status))
            .or_default() += 1;
    }

    pub(crate) fn prompt(&self, tokens: usize) {
        self.counters().prompt_tokens += tokens as u64;
    }

    pub(crate) fn first_token(&self, time: Duration) {
        self.counters().first_token.observe(time);
    }

    pub(crate) fn whole_request(&self, time: Duration) {
        self.counters().whole_request.observe(time);
    }

    /// Returns the text of `/metrics`.
    pub(crate) fn text(&self, engine: &EngineStatistics, in_flight: usize, limit: usize) -> String {
        let counters = self.counters();
        let mut text = Text(String::new());
        let gauges: [(&str, &str, f64); 6] = [
            (
                "sequences_running",
                "Sequences in the engine's batch",
                engine.running as f64,
            ),
            (
                "sequences_waiting",
                "Sequences waiting in the engine",
                engine.waiting as f64,
            ),
            (
                "sequences_in_flight",
                "Continuations and embeddings of requests that have not ended",
                in_flight as f64,
            ),
            (
                "sequences_limit",
                "Limit on sequences in flight (max_queue)",
                limit as f64,
            ),
            (
                "kv_cache_blocks",
                "Blocks of the key/value cache",
                engine.blocks as f64,
            ),
            (
                "kv_cache_blocks_used",
                "Blocks held by sequences",
                engine.blocks_used as f64,
            ),
        ];
        for (name, help, value) in gauges {
            text.metric(name, "gauge", help);
            text.sample(name, "", value);
        }
        let totals: [(&str, &str, u64); 10] = [
            (
                "prompt_tokens_total",
                "Prompt tokens",
                counters.prompt_tokens,
            ),
            (
                "reused_tokens_total",
                "Prompt tokens found in the cache",
                engine.reused_tokens,
            ),
            (
                "generation_tokens_total",
                "Tokens generated",
                engine.generated_tokens,
            ),
            (
                "proposed_tokens_total",
                "Tokens proposed by speculative decoding and verified",
                engine.proposed_tokens,
            ),
            (
                "accepted_tokens_total",
                "Proposed tokens that were accepted",
                engine.accepted_tokens,
            ),
            (
                "preemptions_total",
                "Sequences preempted to free their blocks",
                engine.preemptions,
            ),
            ("engine_steps_total", "Engine steps", engine.steps),
            (
                "requests_finished_total",
                "Requests whose continuations all ended by themselves",
                engine.finished,
            ),
            (
                "requests_cancelled_total",
                "Requests whose client disconnected or that exceeded max_time",
                engine.cancelled,
            ),
            (
                "requests_failed_total",
                "Requests that failed after they were accepted",
                engine.failed,
            ),
        ];
        for (name, help, value) in totals {
            text.metric(name, "counter", help);
            text.sample(name, "", value);
        }
        text.metric(
            "http_responses_total",
            "counter",
            "Responses by route and status",
        );
        for ((route, status), count) in &counters.responses {
            let labels = format!("{{route=\"{route}\",status=\"{status}\"}}");
            text.sample("http_responses_total", labels, count);
        }
        text.histogram(
            "time_to_first_token_seconds",
            "Time from a request to its first token",
            &counters.first_token,
        );
        text.histogram(
            "request_seconds",
            "Time of a whole request",
            &counters.whole_request,
        );
        text.0
    }
}

/// A text in Prometheus's format. Writing to a string does not fail.
struct Text(String);

impl Text {
    fn metric(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(
            self.0,
            "# HELP overdrive_{name} {help}.\n# TYPE overdrive_{name} {kind}"
        );
    }

    fn sample(&mut self, name: &str, labels: impl Display, value: impl Display) {
        let _ = writeln!(self.0, "overdrive_{name}{labels} {value}");
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.metric(name, "histogram", help);
        let bucket = format!("{name}_bucket");
        let mut below = 0;
        for (bound, count) in histogram.bounds.iter().zip(&histogram.counts) {
            below += count;
            self.sample(&bucket, Bound(*bound), below);
        }
        self.sample(&bucket, "{le=\"+Inf\"}", histogram.count);
        self.sample(&format!("{name}_sum"), "", histogram.sum);
        self.sample(&format!("{name}_count"), "", histogram.count);
    }
}

/// The label of a bucket.
struct Bound(f64);

impl Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // With a point, as Prometheus's own clients write it.
        write!(f, "{{le=\"{:?}\"}}", self.0)
    }
}

#[derive(Debug)]
struct Histogram {
    bounds: &'static [f64],
    counts: Vec<u64>,
    count: u64,
    sum: f64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Histogram {
        Histogram {
            bounds,
            counts: vec![0; bounds.len()],
            count: 0,
            sum: 0.0,
        }
    }

    fn observe(&mut self, time: Duration) {
        let seconds = time.as_secs_f64();
        if let Some(bucket) = self.bounds.iter().position(|bound| seconds <= *bound) {
            self.counts[bucket] += 1;
        }
        self.count += 1;
        self.sum += seconds;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_of_a_histogram_are_cumulative_and_hold_their_bound() {
        let metrics = Metrics::new();
        for milliseconds in [1, 5, 6, 700_000] {
            metrics.first_token(Duration::from_millis(milliseconds));
        }
        metrics.responded("/v1/models", 200);
        let text = metrics.text(&EngineStatistics::default(), 3, 256);
        let lines: Vec<&str> = text.lines().collect();
        for line in [
            "overdrive_time_to_first_token_seconds_bucket{le=\"0.001\"} 1",
            "overdrive_time_to_first_token_seconds_bucket{le=\"0.005\"} 2",
            "overdrive_time_to_first_token_seconds_bucket{le=\"0.01\"} 3",
            "overdrive_time_to_first_token_seconds_bucket{le=\"640.0\"} 3",
            "overdrive_time_to_first_token_seconds_bucket{le=\"+Inf\"} 4",
            "overdrive_time_to_first_token_seconds_count 4",
            "overdrive_http_responses_total{route=\"/v1/models\",status=\"200\"} 1",
            "overdrive_sequences_in_flight 3",
            "# TYPE overdrive_kv_cache_blocks_used gauge",
        ] {
            assert!(lines.contains(&line), "{line} is not in\n{text}");
        }
    }
}
