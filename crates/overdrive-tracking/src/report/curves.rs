//! The curves of a report.

use overdrive_core::units;

use super::chart::{Chart, Role, Series};
use crate::StepMetrics;

// The smoothed line is made of one 40th of the steps: wide enough against noise, narrow enough for the warm-up.
const SMOOTHING_WINDOWS: usize = 40;

const LARGE: (u32, u32) = (920, 340);
const SMALL: (u32, u32) = (460, 240);

/// Returns the chart of the training loss, raw and smoothed, with the validation points.
pub(super) fn loss(metrics: &[StepMetrics]) -> Chart {
    let raw = points(metrics, |step| Some(step.loss));
    let evaluated = points(metrics, |step| step.eval_loss);
    let mut series = Vec::new();
    let span = raw.len() / SMOOTHING_WINDOWS;
    if span > 1 {
        let smooth = smoothed(&raw, span);
        series.push(line("training, each step", Role::Faint, raw));
        series.push(line("training, smoothed", Role::Main, smooth));
    } else {
        series.push(line("training", Role::Main, raw));
    }
    if !evaluated.is_empty() {
        series.push(Series {
            dots: true,
            ..line("validation", Role::Second, evaluated)
        });
    }
    Chart {
        title: "Loss",
        y_label: "",
        y_format: units::compact,
        from_zero: false,
        size: LARGE,
        series,
    }
}

/// Returns the small charts that have points.
pub(super) fn others(metrics: &[StepMetrics]) -> Vec<Chart> {
    let small = |title, y_label, y_format, value: fn(&StepMetrics) -> Option<f64>| Chart {
        title,
        y_label,
        y_format,
        from_zero: true,
        size: SMALL,
        series: vec![line(title, Role::Main, points(metrics, value))],
    };
    let mebibytes = |step: &StepMetrics| {
        (step.peak_memory_bytes > 0).then(|| step.peak_memory_bytes as f64 / f64::from(1 << 20))
    };
    [
        small("Learning rate", "", units::compact, |step| {
            Some(step.learning_rate)
        }),
        small("Throughput", "tokens per second", units::rounded, |step| {
            Some(step.tokens_per_second)
        }),
        small("Peak memory", "MiB", units::rounded, mebibytes),
        small("Gradient norm", "before clipping", units::compact, |step| {
            step.grad_norm
        }),
        small("Loss scale", "", units::compact, |step| step.loss_scale),
    ]
    .into_iter()
    .filter(|chart| !chart.is_empty())
    .collect()
}

fn line(name: &'static str, role: Role, points: Vec<(f64, f64)>) -> Series {
    Series {
        name,
        role,
        dots: false,
        points,
    }
}

fn points(metrics: &[StepMetrics], value: impl Fn(&StepMetrics) -> Option<f64>) -> Vec<(f64, f64)> {
    metrics
        .iter()
        .filter_map(|step| Some((step.step as f64, value(step)?)))
        .collect()
}

/// Returns for each point the line of least squares through the `span` points around it, at this point: where they lie
/// on both sides, their mean. At the ends they are the first or the last ones, and the line neither lags nor ends in the
/// noise of one step. Points that are not finite are ignored.
fn smoothed(points: &[(f64, f64)], span: usize) -> Vec<(f64, f64)> {
    let width = (span / 2 * 2 + 1).min(points.len());
    (0..points.len())
        .map(|middle| {
            let (x, y) = points[middle];
            // A non-finite point breaks the smoothed line too.
            if !y.is_finite() {
                return (x, y);
            }
            let first = middle.saturating_sub(width / 2).min(points.len() - width);
            let window = points[first..first + width].iter();
            let finite = || window.clone().filter(|(_, y)| y.is_finite());
            let count = finite().count() as f64;
            let mean_x = finite().map(|(x, _)| x).sum::<f64>() / count;
            let mean_y = finite().map(|(_, y)| y).sum::<f64>() / count;
            let products = finite().map(|(x, y)| (x - mean_x) * (y - mean_y));
            let squares: f64 = finite().map(|(x, _)| (x - mean_x).powi(2)).sum();
            // One point alone has no slope.
            let slope = match squares > 0.0 {
                true => products.sum::<f64>() / squares,
                false => 0.0,
            };
            (x, mean_y + slope * (x - mean_x))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn smoothing_keeps_a_constant() {
        let points: Vec<_> = (0..20).map(|x| (f64::from(x), 3.0)).collect();
        for (_, y) in smoothed(&points, 5) {
            assert!((y - 3.0).abs() < 1e-12, "{y}");
        }
    }

    #[test]
    fn a_straight_line_is_not_bent_or_moved_by_smoothing() {
        let points: Vec<_> = (0..20)
            .map(|x| (f64::from(x), 2.0 * f64::from(x)))
            .collect();
        for (x, y) in smoothed(&points, 7) {
            assert!((y - 2.0 * x).abs() < 1e-12, "{y} at {x}");
        }
    }

    #[test]
    fn smoothing_ignores_a_step_whose_loss_is_not_finite() {
        let points: Vec<_> = (1..=5)
            .map(|x| {
                (
                    f64::from(x),
                    if x == 2 { f64::NAN } else { 2.0 * f64::from(x) },
                )
            })
            .collect();
        let smooth = smoothed(&points, 5);
        assert!(smooth[1].1.is_nan());
        for (x, y) in [smooth[0], smooth[2], smooth[4]] {
            assert!((y - 2.0 * x).abs() < 1e-12, "{y} at {x}");
        }
    }

    #[test]
    fn the_smoothed_line_does_not_end_in_the_noise_of_one_step() {
        // Alternates around 1; the last step is the first that does not.
        let mut points: Vec<_> = (0..101)
            .map(|x| (f64::from(x), 1.0 + 0.1 * f64::from(x % 2 * 2 - 1)))
            .collect();
        points[100].1 = 2.0;
        let smooth = smoothed(&points, 20);
        assert!(smooth[100].1 < 1.3, "{:?}", smooth[100]);
        // In the middle it is the mean of 21 points.
        assert!((smooth[50].1 - 1.0).abs() < 0.01, "{:?}", smooth[50]);
    }

    #[test]
    fn short_runs_are_not_smoothed_and_curves_without_points_are_left_out() {
        let metrics: Vec<_> = (1..=10)
            .map(|step| StepMetrics {
                step,
                loss: 1.0,
                ..Default::default()
            })
            .collect();
        assert_eq!(loss(&metrics).series.len(), 1);
        let titles: Vec<_> = others(&metrics).iter().map(|chart| chart.title).collect();
        assert_eq!(titles, ["Learning rate", "Throughput"]);
    }
}
