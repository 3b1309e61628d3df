//! The records that wait for their delivery, shared by the tracker and the thread that sends them.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The largest size of the waiting records in bytes: about 300,000 values, which is hours of a run.
pub(super) const MAX_WAITING: usize = 32 << 20;
/// The largest number of metrics in a request, MLflow's limit.
const MAX_METRICS: usize = 1000;
/// The size of an entry besides its texts.
const ENTRY_BYTES: usize = 64;

/// A record that waits. Times are in milliseconds since 1970, as of the call that recorded them: a record that is sent
/// twice is the same record for the server.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Entry {
    Metric {
        key: String,
        value: f64,
        timestamp: u64,
        step: u64,
    },
    Tag {
        key: String,
        value: String,
    },
    /// The end of the run.
    Status {
        status: &'static str,
        end_time: u64,
    },
}

impl Entry {
    fn bytes(&self) -> usize {
        let text = match self {
            Self::Metric { key, .. } => key.len(),
            Self::Tag { key, value } => key.len() + value.len(),
            Self::Status { .. } => 0,
        };
        ENTRY_BYTES + text
    }
}

#[derive(Default)]
struct State {
    entries: VecDeque<Entry>,
    bytes: usize,
    /// The failure of the last attempt, until one succeeds.
    problem: Option<String>,
    /// A failure that the next call reports once.
    notice: Option<String>,
    /// If `true`, somebody waits for the queue to be empty, and the next pause is skipped.
    hurry: bool,
    closed: bool,
}

/// The queue.
#[derive(Default)]
pub(super) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds entries, unless there is no room for all of them. Never waits for the network.
    ///
    /// # Errors
    /// The reason why the entries were not taken, or why earlier ones are not delivered yet.
    pub(super) fn push(&self, entries: Vec<Entry>) -> Result<(), String> {
        let mut state = self.state();
        let bytes: usize = entries.iter().map(Entry::bytes).sum();
        if state.bytes + bytes > MAX_WAITING {
            let reason = state.problem.as_deref().unwrap_or("is too slow");
            return Err(format!(
                "{reason}; {} MiB of records wait already, so this one is lost for MLflow",
                MAX_WAITING >> 20
            ));
        }
        state.bytes += bytes;
        state.entries.extend(entries);
        self.changed.notify_all();
        let failure = state.notice.take().or_else(|| state.problem.clone());
        failure.map_or(Ok(()), Err)
    }

    /// Adds the last entry, for which there is always room, and waits until all entries are delivered, at most `timeout`.
    ///
    /// # Errors
    /// The reason why entries are left, or were refused.
    pub(super) fn finish(&self, last: Entry, timeout: Duration) -> Result<(), String> {
        let deadline = Instant::now() + timeout;
        let mut state = self.state();
        state.bytes += last.bytes();
        state.entries.push_back(last);
        state.hurry = true;
        self.changed.notify_all();
        while !state.entries.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let reason = state.problem.as_deref().unwrap_or("is too slow");
                return Err(format!(
                    "{reason}; {} records were not sent within {timeout:?}",
                    state.entries.len()
                ));
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.notice.take().map_or(Ok(()), Err)
    }

    /// Ends the thread that sends.
    pub(super) fn close(&self) {
        self.state().closed = true;
        self.changed.notify_all();
    }

    /// Returns the first entries that fit into one request, which stay in the queue until they are
    /// [`delivered`](Self::delivered). Waits for an entry; returns `None` after [`close`](Self::close).
    pub(super) fn next(&self) -> Option<Vec<Entry>> {
        let mut state = self.state();
        loop {
            if state.closed {
                return None;
            }
            let is_metric = |entry: &&Entry| matches!(entry, Entry::Metric { .. });
            let metrics = state.entries.iter().take(MAX_METRICS);
            let count = metrics.take_while(is_metric).count().max(1);
            if !state.entries.is_empty() {
                return Some(state.entries.iter().take(count).cloned().collect());
            }
            let waited = self.changed.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Removes the first entries. A `notice` says that the server has refused them.
    pub(super) fn delivered(&self, count: usize, notice: Option<String>) {
        let mut state = self.state();
        let count = count.min(state.entries.len());
        let removed: usize = state
            .entries
            .drain(..count)
            .map(|entry| entry.bytes())
            .sum();
        state.bytes -= removed;
        state.problem = None;
        if notice.is_some() {
            state.notice = notice;
        }
        self.changed.notify_all();
    }

    /// Records that an attempt has failed, and waits before the next one, at most `pause`. Returns `true` if the pause was
    /// skipped because [`finish`](Self::finish) waits.
    pub(super) fn failed(&self, problem: String, pause: Duration) -> bool {
        let deadline = Instant::now() + pause;
        let mut state = self.state();
        state.problem = Some(problem);
        loop {
            if std::mem::take(&mut state.hurry) {
                return true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if state.closed || left.is_zero() {
                return false;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Keeps a failure for the next call that reports one.
    pub(super) fn notice(&self, notice: String) {
        self.state().notice = Some(notice);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const END: Entry = Entry::Status {
        status: "FINISHED",
        end_time: 8,
    };

    fn metric(step: u64) -> Entry {
        Entry::Metric {
            key: "loss".to_owned(),
            value: 1.0,
            timestamp: 7,
            step,
        }
    }

    fn tag(value: String) -> Entry {
        Entry::Tag {
            key: "note".to_owned(),
            value,
        }
    }

    #[test]
    fn a_request_has_at_most_a_thousand_metrics_and_keeps_the_order() {
        let queue = Queue::default();
        queue.push((0..1500).map(metric).collect()).expect("room");
        queue.push(vec![tag("x".to_owned())]).expect("room");
        let mut sizes = Vec::new();
        let mut all = Vec::new();
        for _ in 0..3 {
            let batch = queue.next().expect("open");
            assert_eq!(
                queue.next().as_ref(),
                Some(&batch),
                "it stays until it is delivered"
            );
            sizes.push(batch.len());
            queue.delivered(batch.len(), None);
            all.extend(batch);
        }
        assert_eq!(sizes, [1000, 500, 1]);
        let expected: Vec<Entry> = (0..1500).map(metric).chain([tag("x".to_owned())]).collect();
        assert_eq!(all, expected);
        queue.close();
        assert_eq!(queue.next(), None);
    }

    #[test]
    fn the_waiting_records_are_bounded_and_the_error_says_so() {
        let queue = Queue::default();
        let large = || vec![tag("x".repeat(1 << 20))];
        let taken = (0..40).filter(|_| queue.push(large()).is_ok()).count();
        assert_eq!(taken, 31, "32 MiB less the sizes of the entries");
        let error = queue.push(large()).expect_err("full");
        assert!(error.contains("32 MiB of records wait already"), "{error}");
        queue.delivered(1, None);
        queue.push(large()).expect("room again");
    }

    #[test]
    fn a_problem_is_reported_until_a_delivery_and_a_refusal_once() {
        let queue = Queue::default();
        queue.push(vec![metric(1)]).expect("room");
        assert!(!queue.failed("is down".to_owned(), Duration::ZERO));
        for step in 2..4 {
            assert_eq!(queue.push(vec![metric(step)]), Err("is down".to_owned()));
        }
        let error = queue
            .finish(END, Duration::ZERO)
            .expect_err("four are left");
        assert_eq!(error, "is down; 4 records were not sent within 0ns");
        queue.delivered(1, None);
        queue.push(vec![metric(4)]).expect("no problem");
        queue.delivered(1, Some("refused".to_owned()));
        assert_eq!(queue.push(vec![metric(5)]), Err("refused".to_owned()));
        queue.push(vec![metric(6)]).expect("reported once");
    }

    #[test]
    fn waiting_for_the_end_skips_one_pause() {
        let queue = Queue::default();
        queue.push(vec![metric(1)]).expect("room");
        queue
            .finish(END, Duration::ZERO)
            .expect_err("not delivered");
        // Would take an hour otherwise.
        assert!(queue.failed("is down".to_owned(), Duration::from_secs(3600)));
        assert!(!queue.failed("is down".to_owned(), Duration::ZERO));
    }
}
