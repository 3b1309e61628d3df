//! The check of the memory: the estimate against the free memory.

use overdrive_core::units;

use super::{Finding, MachineFacts, Severity, Sizes};
use crate::Result;
use crate::arguments::TrainingArguments;

/// The tolerance of the estimate.
const TOLERANCE: f64 = 0.15;

/// Returns the finding about the memory of `processes` processes; on GPUs each has its own.
pub(super) fn finding(
    arguments: &TrainingArguments,
    facts: &MachineFacts,
    sizes: &Sizes,
    processes: usize,
) -> Result<Finding> {
    let plan = facts.memory_plan(arguments, sizes);
    let shared_by = match facts.device {
        tch::Device::Cpu => processes.max(1) as u64,
        _ => 1,
    };
    let peak = plan.estimate()?.peak;
    let needed = peak.saturating_mul(shared_by);
    let each = match shared_by {
        1 => String::new(),
        count => format!(" in {count} processes"),
    };
    let what = format!(
        "about {} of tensors{each}, by estimate",
        units::bytes(needed)
    );
    let Some(free) = facts.free_memory else {
        return Ok(Finding::fine("memory", what));
    };
    let what = format!("{what}; {} are free", units::bytes(free));
    // A little less than the free memory, so that the advised settings do not need all of it.
    let target = (free as f64 * (1.0 - TOLERANCE)) as u64;
    if needed < target {
        return Ok(Finding::fine("memory", what));
    }
    let advice = plan.advice(target / shared_by)?;
    let changes: Vec<String> = advice.changes.iter().map(ToString::to_string).collect();
    let remedy = match changes.is_empty() {
        true => "end other programs, or train a smaller model".to_owned(),
        false => format!(
            "{}: then about {}; `auto_find_batch_size: true` or `cargo xtask tune` find the micro-batch",
            changes.join(", "),
            units::bytes(advice.changed_peak_bytes.saturating_mul(shared_by))
        ),
    };
    // The run itself halves the micro-batch until it fits.
    let shrinks = arguments.auto_find_batch_size && advice.largest_batch > 0;
    let severity = match needed > free && !shrinks {
        true => Severity::Failure,
        false => Severity::Warning,
    };
    Ok(Finding::fine("memory", what).or(true, severity, remedy))
}
