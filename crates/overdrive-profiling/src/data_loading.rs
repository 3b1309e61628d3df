//! The time that steps wait for data.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The totals of a data loader since it began, for [`StepRecorder::loader`](crate::StepRecorder::loader).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LoaderTotals {
    /// The number of batches delivered.
    pub batches: u64,
    /// The time that the loop waited for them.
    pub wait: Duration,
    /// The longest of these waits.
    pub longest_wait: Duration,
    /// The number of batches that were ready when one was requested, summed over the requests.
    pub ready: u64,
    /// The number of records that could not be read and were left out or replaced.
    pub failed_records: u64,
}

/// The data loading of one step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LoaderMetrics {
    /// The number of batches delivered.
    pub batches: u64,
    /// The seconds that the step waited for them.
    pub wait_seconds: f64,
    /// The mean number of batches that were ready when one was requested. Near 0 the loader's threads are too
    /// slow (or it has none).
    pub queue_depth: f64,
    /// The number of records since the run began that could not be read and were left out or replaced.
    pub failed_records: u64,
}

impl LoaderTotals {
    /// Returns the difference to `before`, an earlier state of the same totals.
    pub fn since(&self, before: &Self) -> LoaderMetrics {
        let batches = self.batches.saturating_sub(before.batches);
        let ready = self.ready.saturating_sub(before.ready);
        LoaderMetrics {
            batches,
            wait_seconds: self.wait.saturating_sub(before.wait).as_secs_f64(),
            queue_depth: ready as f64 / batches.max(1) as f64,
            failed_records: self.failed_records,
        }
    }
}

/// The share of data loading in the steps of a run. [`Display`](fmt::Display) is one line.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct DataLoading {
    /// The fraction of the steps' time that [`Phase::Data`](crate::Phase::Data) took, 0 to 1.
    pub share: f64,
    /// The mean seconds of data loading per step.
    pub seconds_a_step: f64,
    /// The totals of the loader, if they were given.
    pub loader: Option<LoaderTotals>,
}

impl fmt::Display for DataLoading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "data loading takes {:.2}% of the step, {:.3} ms",
            100.0 * self.share,
            1e3 * self.seconds_a_step
        )?;
        if let Some(loader) = self.loader {
            let waited = loader.since(&LoaderTotals::default());
            write!(
                f,
                ": {} batches, waited {:.1} ms for them in total, {:.2} ms at most; {:.1} were ready when \
                 one was requested",
                waited.batches,
                1e3 * waited.wait_seconds,
                1e3 * loader.longest_wait.as_secs_f64(),
                waited.queue_depth
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_the_difference_of_two_states() {
        let before = LoaderTotals {
            batches: 4,
            wait: Duration::from_millis(30),
            longest_wait: Duration::from_millis(20),
            ready: 6,
            failed_records: 1,
        };
        let after = LoaderTotals {
            batches: 6,
            wait: Duration::from_millis(35),
            ready: 11,
            failed_records: 2,
            ..before
        };
        let step = after.since(&before);
        assert_eq!((step.batches, step.failed_records), (2, 2));
        assert!((step.wait_seconds - 0.005).abs() < 1e-12, "{step:?}");
        assert_eq!(step.queue_depth, 2.5);
        assert_eq!(after.since(&after).queue_depth, 0.0);
    }

    #[test]
    fn the_share_is_displayed_in_one_line() {
        let mut loading = DataLoading {
            share: 0.0123,
            seconds_a_step: 0.002,
            loader: None,
        };
        assert_eq!(
            loading.to_string(),
            "data loading takes 1.23% of the step, 2.000 ms"
        );
        loading.loader = Some(LoaderTotals {
            batches: 10,
            wait: Duration::from_millis(20),
            longest_wait: Duration::from_millis(5),
            ready: 15,
            failed_records: 0,
        });
        assert!(
            loading.to_string().ends_with(
                "2.000 ms: 10 batches, waited 20.0 ms for them in total, 5.00 ms at most; 1.5 were ready \
                 when one was requested"
            ),
            "{loading}"
        );
    }
}
