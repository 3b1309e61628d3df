use overdrive_core::{check_at_least, check_option};
use overdrive_kernels::threads::run_jobs;
use serde::{Deserialize, Serialize};

use super::grid::Grid;
use crate::Result;
use crate::codec::units_of_job;

/// The options of the search for the range of each group (row, block) that minimizes the squared error of its
/// elements, each weighted by the mean square of its input if known. A few large elements are clipped so that
/// the many others are rounded more finely.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ClipOptions {
    /// The smallest range to try, as a fraction of the full range; default 0.5, in `0..1`.
    pub least: f64,
    /// The number of ranges to try between the smallest one and slightly more than the full range; default 40.
    pub steps: u32,
}

impl Default for ClipOptions {
    fn default() -> Self {
        ClipOptions {
            least: 0.5,
            steps: 40,
        }
    }
}

/// The largest range that is tried: at 4 bits the range of symmetric codes ends half a step before the
/// largest element.
// The scale makes the largest element 7.5 steps, and the largest code is 7: 7.5 / 7 is 1.07.
const MOST: f64 = 1.08;

impl ClipOptions {
    pub(super) fn validate(&self) -> Result<()> {
        let valid = self.least > 0.0 && self.least < 1.0;
        check_option(valid, "clip.least", self.least, "above 0 and below 1")?;
        check_at_least("clip.steps", self.steps, 1)?;
        Ok(())
    }
}

/// Chooses the steps of `grid` for `weight (O·I,)`; `importance (I,)` weights the errors of the columns.
pub(super) fn clip(grid: &mut Grid, weight: &[f32], importance: &[f32], options: &ClipOptions) {
    let (group, inputs) = (grid.group.max(1), importance.len());
    let width = MOST - options.least;
    let tries = (0..=options.steps).map(|step| f64::from(step) / f64::from(options.steps));
    // The full range is first, so that a range that is no better does not replace it.
    let ratios: Vec<f32> = std::iter::once(1.0)
        .chain(tries.map(|fraction| (options.least + width * fraction) as f32))
        .collect();
    let mut best = vec![1.0; grid.steps.len()];
    let units = units_of_job(group * ratios.len());
    run_jobs(best.chunks_mut(units).enumerate(), |(job, best)| {
        for (index, best) in (job * units..).zip(best) {
            let first = index * group;
            let numbers = &weight[first..(first + group).min(weight.len())];
            let offset = grid.offsets.get(index).copied().unwrap_or_default();
            let error = |ratio: f32| -> f32 {
                let step = grid.scaled_step(index, ratio);
                let squares = numbers.iter().enumerate().map(|(index, &x)| {
                    let (_, number) = grid.nearest_of(step, offset * ratio, x);
                    // Blocks may cross rows: the column is counted along the flattened weight.
                    importance[(first + index) % inputs] * (x - number) * (x - number)
                });
                squares.sum()
            };
            let mut least = (f32::INFINITY, 1.0);
            for &ratio in &ratios {
                let error = error(ratio);
                if error < least.0 {
                    least = (error, ratio);
                }
            }
            *best = least.1;
        }
    });
    for (index, ratio) in best.into_iter().enumerate() {
        grid.steps[index] = grid.scaled_step(index, ratio);
        if let Some(offset) = grid.offsets.get_mut(index) {
            *offset *= ratio;
        }
    }
}
