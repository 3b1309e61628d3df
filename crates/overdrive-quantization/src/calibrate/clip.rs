use std::sync::Mutex;

use serde::{Deserialize, Serialize};

use super::grid::Grid;
use crate::codec::jobs::{run_jobs, units_of_job};
use crate::{Error, Result};

/// The search of each group's (row's, block's) range that makes the squared error of its weights least,
/// each weighted by the mean square of its input where that is known. A few large weights are rounded
/// worse so that the many others are rounded better.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ClipOptions {
    /// The smallest range tried, as a part of the whole; default 0.5, in `0..1`.
    pub least: f64,
    /// How many ranges are tried between that and one a little above the whole; default 40.
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

/// The largest range tried: at 4 bits the range of symmetric codes ends half a step before the largest
/// weight.
const MOST: f64 = 1.08;

impl ClipOptions {
    pub(super) fn validate(&self) -> Result<()> {
        if self.least > 0.0 && self.least < 1.0 && self.steps > 0 {
            return Ok(());
        }
        Err(Error::BadOption {
            option: "clip",
            found: format!("least {} in {} steps", self.least, self.steps),
            expected: "least in 0..1, and at least one step".to_owned(),
        })
    }
}

/// Chooses the steps of `grid` for `weight (O·I,)`, of which the columns count `importance (I,)`.
pub(super) fn clip(grid: &mut Grid, weight: &[f32], importance: &[f32], options: &ClipOptions) {
    let (group, inputs) = (grid.group.max(1), importance.len());
    let width = MOST - options.least;
    let tries = (0..=options.steps).map(|step| f64::from(step) / f64::from(options.steps));
    // The whole range first: what is no better than it does not replace it.
    let ratios: Vec<f32> = std::iter::once(1.0)
        .chain(tries.map(|part| (options.least + width * part) as f32))
        .collect();
    let best: Vec<Mutex<f32>> = grid.steps.iter().map(|_| Mutex::new(1.0)).collect();
    let units = units_of_job(group * ratios.len());
    let starts = (0..best.len()).step_by(units);
    run_jobs(starts, |start| {
        for (index, best) in best.iter().enumerate().skip(start).take(units) {
            let first = index * group;
            let numbers = &weight[first..(first + group).min(weight.len())];
            let (step, offset) = (grid.steps[index], grid.offsets.get(index));
            let offset = offset.copied().unwrap_or_default();
            let error = |ratio: f32| -> f32 {
                let squares = numbers.iter().enumerate().map(|(place, &x)| {
                    let (_, number) = grid.nearest_of(step * ratio, offset * ratio, x);
                    importance[(first + place) % inputs] * (x - number) * (x - number)
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
            *best
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner) = least.1;
        }
    });
    for (index, ratio) in best.into_iter().enumerate() {
        let ratio = ratio.into_inner().unwrap_or(1.0);
        grid.steps[index] *= ratio;
        if let Some(offset) = grid.offsets.get_mut(index) {
            *offset *= ratio;
        }
    }
}
