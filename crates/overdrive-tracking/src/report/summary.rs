//! The headline figures of a report.

use overdrive_core::units;
use overdrive_profiling::{Phase, PhaseSeconds};

use crate::{Report, StepMetrics};

/// A figure with its name and a detail such as its unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Figure {
    pub(super) name: &'static str,
    pub(super) value: String,
    pub(super) detail: String,
}

/// Returns the headline figures that can be computed from the records.
pub(super) fn figures(report: &Report) -> Vec<Figure> {
    let metrics = &report.metrics;
    let mut figures = Vec::new();
    let mut add = |name, value: Option<String>, detail: String| {
        figures.extend(value.map(|value| Figure {
            name,
            value,
            detail,
        }));
    };

    let evaluated = metrics.iter().rev().find(|step| step.eval_loss.is_some());
    let detail = evaluated.map(|step| format!("step {}", units::thousands(step.step)));
    let value = evaluated.and_then(|step| step.eval_loss).map(loss_text);
    add("Validation loss", value, detail.unwrap_or_default());
    let bits = evaluated
        .and_then(|step| step.eval_bits_per_byte)
        .map(loss_text);
    add("Bits per byte", bits, "validation text".to_owned());
    let (loss, detail) = final_loss(metrics);
    add("Training loss", loss, detail);
    let rate = median(metrics.iter().map(|step| step.tokens_per_second));
    add(
        "Tokens per second",
        rate.map(units::rounded),
        "median of all steps".to_owned(),
    );
    let peak = metrics
        .iter()
        .map(|step| step.peak_memory_bytes)
        .max()
        .filter(|&bytes| bytes > 0);
    add(
        "Peak memory",
        peak.map(units::bytes),
        "tensors alive at once".to_owned(),
    );
    let last = metrics.last();
    let tokens = last.and_then(|step| step.tokens_seen);
    let detail = tokens.map(|tokens| format!("{} tokens", units::short_count(tokens)));
    let time = last
        .and_then(|step| step.elapsed_seconds)
        .map(units::seconds);
    let steps = last.map(|step| format!("{} steps", units::thousands(step.step)));
    let details: Vec<_> = steps.into_iter().chain(detail).collect();
    add("Training time", time, details.join(", "));
    let parameters = report.parameters.map(units::short_count);
    add(
        "Parameters",
        parameters,
        report.parameters.map(units::thousands).unwrap_or_default(),
    );
    figures
}

/// Returns the mean loss of the last steps, with their number.
fn final_loss(metrics: &[StepMetrics]) -> (Option<String>, String) {
    // The loss of a single step depends on its batch: a mean over the last 5 % of the run, at most 20 steps.
    let last = metrics.len().div_ceil(20).clamp(1, 20);
    let losses: Vec<f64> = metrics
        .iter()
        .rev()
        .take(last)
        .map(|step| step.loss)
        .filter(|loss| loss.is_finite())
        .collect();
    if losses.is_empty() {
        return (
            metrics.last().map(|_| "not finite".to_owned()),
            String::new(),
        );
    }
    let mean = losses.iter().sum::<f64>() / losses.len() as f64;
    let detail = match losses.len() {
        1 => "last step".to_owned(),
        steps => format!("last {steps} steps"),
    };
    (Some(loss_text(mean)), detail)
}

/// Returns the median of the finite values.
pub(super) fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.filter(|value| value.is_finite()).collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.is_empty() {
        None
    } else if values.len().is_multiple_of(2) {
        Some(f64::midpoint(values[middle - 1], values[middle]))
    } else {
        Some(values[middle])
    }
}

/// Returns the time by phase over all steps that recorded it, with their number.
pub(super) fn phases(metrics: &[StepMetrics]) -> Option<(PhaseSeconds, u64)> {
    let mut total = PhaseSeconds::default();
    let mut steps = 0;
    for seconds in metrics.iter().filter_map(StepMetrics::time_by_phase) {
        total += seconds;
        steps += 1;
    }
    (total.total() > 0.0).then_some((total, steps))
}

/// Returns the fraction of each phase, in the order of a step; the sum is 1.
pub(super) fn shares(seconds: &PhaseSeconds) -> impl Iterator<Item = (Phase, f64)> {
    let total = seconds.total();
    seconds
        .shown()
        .map(move |(phase, seconds)| (phase, seconds / total))
}

fn loss_text(loss: f64) -> String {
    if loss.is_finite() {
        format!("{loss:.3}")
    } else {
        "not finite".to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: u64, loss: f64) -> StepMetrics {
        StepMetrics {
            step,
            loss,
            ..Default::default()
        }
    }

    #[test]
    fn the_median_ignores_values_that_are_not_finite() {
        assert_eq!(median([3.0, f64::NAN, 1.0, 2.0].into_iter()), Some(2.0));
        assert_eq!(median([1.0, 2.0].into_iter()), Some(1.5));
        assert_eq!(median(std::iter::empty()), None);
    }

    #[test]
    fn the_final_loss_is_a_mean_over_the_last_steps() {
        let metrics: Vec<_> = (1..=100)
            .map(|n| step(n, if n > 95 { n as f64 } else { 0.0 }))
            .collect();
        let (value, detail) = final_loss(&metrics);
        assert_eq!(value.as_deref(), Some("98.000"));
        assert_eq!(detail, "last 5 steps");
    }

    #[test]
    fn a_loss_that_is_not_finite_is_shown_as_such() {
        let report = Report {
            metrics: vec![step(1, f64::NAN)],
            ..Default::default()
        };
        let figure = figures(&report)
            .into_iter()
            .find(|figure| figure.name == "Training loss");
        assert_eq!(figure.expect("there").value, "not finite");
    }

    #[test]
    fn the_time_by_phase_is_that_of_the_device_where_it_has_a_clock() {
        let seconds = |forward| PhaseSeconds {
            forward,
            ..Default::default()
        };
        let on_gpu = StepMetrics {
            phase_seconds: Some(seconds(0.05)),
            device_phase_seconds: Some(seconds(0.21)),
            ..step(1, 2.0)
        };
        let on_cpu = StepMetrics {
            phase_seconds: Some(seconds(0.5)),
            ..step(2, 2.0)
        };
        assert_eq!(
            phases(std::slice::from_ref(&on_gpu)),
            Some((seconds(0.21), 1))
        );
        assert_eq!(phases(&[on_gpu, on_cpu]), Some((seconds(0.71), 2)));
    }

    #[test]
    fn the_shares_of_the_phases_add_up_to_one() {
        let seconds = PhaseSeconds {
            data: 1.0,
            forward: 2.0,
            backward: 4.0,
            optimizer: 0.5,
            other: 0.5,
            ..Default::default()
        };
        let sum: f64 = shares(&seconds).map(|(_, share)| share).sum();
        assert!((sum - 1.0).abs() < 1e-12);
    }
}
