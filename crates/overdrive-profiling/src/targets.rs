//! The targets that a training run should meet.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The targets of a training run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Targets {
    /// The minimum fraction of the time in which the GPU runs a kernel, 0 to 1. Default 0.85.
    pub gpu_utilization: f64,
    /// The maximum fraction of the steps' time that data loading takes, 0 to 1. Default 0.05.
    pub data_loading: f64,
}

impl Default for Targets {
    fn default() -> Self {
        Self {
            gpu_utilization: 0.85,
            data_loading: 0.05,
        }
    }
}

/// A target with the measured value. [`Display`](fmt::Display) is one line, with the remedy if the target is missed.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum TargetResult {
    /// The share of data loading in the steps' time.
    DataLoading {
        /// The measured fraction, 0 to 1.
        share: f64,
        /// The maximum fraction that meets the target.
        most: f64,
    },
    /// The mean utilization of the GPU.
    GpuUtilization {
        /// The measured fraction, 0 to 1.
        mean: f64,
        /// The minimum fraction that meets the target.
        least: f64,
    },
}

impl Targets {
    /// Compares the measured values with the targets. A value that was not measured has no result: a CPU has no
    /// utilization of a GPU.
    ///
    /// ```
    /// use overdrive_profiling::Targets;
    ///
    /// let results = Targets::default().check(Some(0.002), Some(0.61));
    /// assert!(results[0].is_met() && !results[1].is_met());
    /// assert!(results[1].to_string().contains("61%"));
    /// ```
    pub fn check(
        &self,
        data_loading: Option<f64>,
        gpu_utilization: Option<f64>,
    ) -> Vec<TargetResult> {
        let loading = data_loading.map(|share| TargetResult::DataLoading {
            share,
            most: self.data_loading,
        });
        let utilization = gpu_utilization.map(|mean| TargetResult::GpuUtilization {
            mean,
            least: self.gpu_utilization,
        });
        loading.into_iter().chain(utilization).collect()
    }
}

impl TargetResult {
    /// Returns `true` if the target is met.
    pub fn is_met(&self) -> bool {
        match *self {
            Self::DataLoading { share, most } => share <= most,
            Self::GpuUtilization { mean, least } => mean >= least,
        }
    }
}

impl fmt::Display for TargetResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = match self.is_met() {
            true => "target met    ",
            false => "target missed ",
        };
        match *self {
            Self::DataLoading { share, most } => write!(
                f,
                "{verdict}data loading {:.2}% of the step, at most {:.0}%",
                100.0 * share,
                100.0 * most
            )?,
            Self::GpuUtilization { mean, least } => write!(
                f,
                "{verdict}GPU use {:.0}% of the time, at least {:.0}%",
                100.0 * mean,
                100.0 * least
            )?,
        }
        match (self.is_met(), self) {
            (true, _) => Ok(()),
            (false, Self::DataLoading { .. }) => f.write_str(
                ": raise dataloader_num_workers or dataloader_prefetch_factor, or tokenize the data beforehand",
            ),
            (false, Self::GpuUtilization { .. }) => f.write_str(
                ": raise per_device_train_batch_size (`cargo xtask tune` finds it), log and evaluate less often",
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_at_its_target_meets_it() {
        let results = Targets::default().check(Some(0.05), Some(0.85));
        assert!(results.iter().all(TargetResult::is_met));
        assert_eq!(
            results[0].to_string(),
            "target met    data loading 5.00% of the step, at most 5%"
        );
        assert_eq!(
            results[1].to_string(),
            "target met    GPU use 85% of the time, at least 85%"
        );
    }

    #[test]
    fn a_missed_target_names_its_remedy() {
        let lines: Vec<String> = Targets::default()
            .check(Some(0.31), Some(0.4))
            .iter()
            .map(ToString::to_string)
            .collect();
        assert!(lines[0].starts_with("target missed data loading 31.00%"));
        assert!(lines[0].contains("dataloader_num_workers"));
        assert!(lines[1].contains("per_device_train_batch_size"));
    }

    #[test]
    fn a_value_that_was_not_measured_has_no_line() {
        assert!(Targets::default().check(None, None).is_empty());
    }
}
