//! The check of the disk: the snapshots and the model against the free space.

use overdrive_core::units;

use super::Severity::Failure;
use super::{Finding, MachineFacts, Sizes};
use crate::Result;
use crate::arguments::{SaveStrategy, TrainingArguments};
use crate::run::TrainingPlan;

/// The bytes of an fp32 weight.
const WEIGHT: u64 = 4;

/// Returns the finding about the disk.
pub(super) fn finding(
    arguments: &TrainingArguments,
    facts: &MachineFacts,
    sizes: &Sizes,
) -> Result<Finding> {
    let shape = arguments
        .memory_plan(sizes.vocabulary, facts.precision)
        .shape;
    let weights = WEIGHT.saturating_mul(shape.parameters());
    // The model and its averages are written at the end, in addition to the snapshots.
    let model = weights.saturating_mul(1 + u64::from(arguments.ema_decay.is_some()));
    let snapshot = model.saturating_add(arguments.optim.stored().bytes(&shape));
    let plan = match sizes.micro_batches_per_epoch {
        Some(micro_batches) => Some(arguments.plan(micro_batches)?),
        // Without data, the number of snapshots is known only if they are saved by steps and the number of steps
        // was given.
        None if arguments.max_steps > 0 && arguments.save_strategy == SaveStrategy::Steps => {
            Some(arguments.plan(1)?)
        }
        None => None,
    };
    let kept = plan.map_or(1, |plan| kept_snapshots(arguments, &plan));
    let needed = kept.saturating_mul(snapshot).saturating_add(model);
    let what = format!(
        "{kept} snapshots of {} and the model of {} take {}",
        units::bytes(snapshot),
        units::bytes(model),
        units::bytes(needed)
    );
    let Some(free) = facts.free_disk else {
        return Ok(Finding::fine("disk", what));
    };
    let what = format!("{what}; {} are free", units::bytes(free));
    let newest = match kept > 2 && arguments.save_total_limit != Some(1) {
        true => "keep only the newest (`save_total_limit: 1`), ",
        false => "",
    };
    let remedy = format!(
        "save less often (`save_steps`), {newest}save none (`save_strategy: no`), or write to another disk (`--out DIR`)"
    );
    Ok(Finding::fine("disk", what).or(needed > free, Failure, remedy))
}

/// Returns the greatest number of snapshots that lie on the disk at the same time.
fn kept_snapshots(arguments: &TrainingArguments, plan: &TrainingPlan) -> u64 {
    let every = match arguments.save_strategy {
        SaveStrategy::No => return 0,
        // At most one snapshot per evaluation.
        SaveStrategy::Best => plan.eval_steps,
        SaveStrategy::Steps | SaveStrategy::Epoch => plan.save_steps,
    };
    let written = every.map_or(1, |every| plan.total_steps.div_ceil(every));
    let limit = arguments.save_total_limit.map_or(u64::MAX, |limit| {
        // The new snapshot is complete before the oldest is removed, and the best is kept beside the newest.
        let best = u64::from(plan.eval_steps.is_some() && limit == 1);
        limit as u64 + 1 + best
    });
    written.min(limit)
}
