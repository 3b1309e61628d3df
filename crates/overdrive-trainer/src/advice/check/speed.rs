//! The keys that would slow a run down.

use overdrive_checkpointing::Schedule;
use overdrive_transformer::AttentionImplementation;
use tch::Device;

use super::Severity::Warning;
use super::{Finding, MachineFacts, Sizes};
use crate::Result;
use crate::arguments::{IntervalStrategy, SequenceMode, TrainingArguments};
use crate::memory_estimate::MemoryPlan;

/// The share of the time above which evaluations are reported.
const MOST_EVALUATION: f64 = 0.2;
/// The share of the free memory that a run without checkpointing may take to be reported.
const ROOM: f64 = 0.7;

/// Returns the findings, each of which is a warning; if there is none, returns one that says that all is fine.
pub(super) fn findings(
    arguments: &TrainingArguments,
    facts: &MachineFacts,
    sizes: &Sizes,
) -> Result<Vec<Finding>> {
    let plan = facts.memory_plan(arguments, sizes);
    let whole = MemoryPlan {
        schedule: Schedule::Never,
        ..plan.clone()
    };
    let doubled = MemoryPlan {
        batch: plan.batch.saturating_mul(2),
        ..plan.clone()
    };
    let gpu = facts.device != Device::Cpu;
    let evaluation = evaluation_share(arguments, sizes)?;
    let evaluations = format!(
        "evaluations take about {:.0}% of the time",
        100.0 * evaluation
    );
    // Each row: whether it holds, the finding and the remedy.
    #[rustfmt::skip]
    let table = [
        (cfg!(debug_assertions),
            "this is no release build, so its kernels are slow",
            "build it with `--release`"),
        (plan.attention == AttentionImplementation::Eager,
            "`attn_implementation: eager` computes and stores the scores of all pairs of tokens",
            "leave `attn_implementation` out, which selects flash attention"),
        (!arguments.fused_kernels,
            "`fused_kernels: false` computes norms, rotary positions, gates and the loss in several passes",
            "leave `fused_kernels` out"),
        (plan.schedule != Schedule::Never && has_room(&whole, facts)?,
            "`gradient_checkpointing` computes blocks twice, and without it the run fits into the free memory",
            "leave `gradient_checkpointing` out"),
        (pads(arguments),
            "documents are padded to the longest of their batch",
            "`packing: true`, `padding_free: true` or `group_by_length: true`"),
        (evaluation > MOST_EVALUATION,
            &evaluations,
            "`max_eval_batches`, or a larger `eval_steps`"),
        (gpu && arguments.dataloader_num_workers == 0,
            "`dataloader_num_workers: 0` prepares each batch while the GPU waits",
            "`dataloader_num_workers: 2`"),
        (gpu && !arguments.dataloader_pin_memory,
            "`dataloader_pin_memory: false` copies batches while the GPU waits",
            "leave `dataloader_pin_memory` out"),
        (gpu && arguments.logging_steps == 1.0 && arguments.max_steps != 1,
            "`logging_steps: 1` waits for the GPU after each step",
            "`logging_steps: 10`"),
        (gpu && arguments.gradient_accumulation_steps > 1 && has_room(&doubled, facts)?,
            "micro-batches of twice the size fit into the free memory",
            "a larger `per_device_train_batch_size` with fewer `gradient_accumulation_steps`; `cargo xtask tune` finds both"),
    ];
    let slow = table.into_iter().filter(|(holds, ..)| *holds);
    let slow = slow.map(|(_, what, remedy)| Finding::fine("speed", what).or(true, Warning, remedy));
    let mut found: Vec<Finding> = slow.collect();
    if found.is_empty() {
        found.push(Finding::fine(
            "speed",
            "no key that would slow the run down",
        ));
    }
    Ok(found)
}

/// Returns `true` if the estimate is well below the free memory.
fn has_room(plan: &MemoryPlan, facts: &MachineFacts) -> Result<bool> {
    let peak = plan.estimate()?.peak as f64;
    Ok(facts
        .free_memory
        .is_some_and(|free| peak < ROOM * free as f64))
}

fn pads(arguments: &TrainingArguments) -> bool {
    arguments.sequence_mode() == SequenceMode::Documents
        && !(arguments.packing || arguments.padding_free || arguments.group_by_length)
        && arguments.per_device_train_batch_size > 1
}

/// Returns the share of the time that evaluations take, if their number of batches is bounded by a key; else 0.
fn evaluation_share(arguments: &TrainingArguments, sizes: &Sizes) -> Result<f64> {
    if arguments.eval_strategy != IntervalStrategy::Steps {
        return Ok(0.0);
    }
    let plan = arguments.plan(sizes.micro_batches_per_epoch.unwrap_or(1))?;
    // Without a limit an evaluation reads all validation data, a fraction of an epoch.
    let fraction = arguments.validation_fraction / (1.0 - arguments.validation_fraction);
    let all = plan.steps_per_epoch as f64 * arguments.sequences_per_step() as f64 * fraction;
    let most = arguments.max_eval_batches.map_or(f64::INFINITY, |batches| {
        (batches * arguments.per_device_eval_batch_size) as f64
    });
    let Some(every) = plan.eval_steps else {
        return Ok(0.0);
    };
    // A sequence costs a third as much in evaluation as in training, whose backward pass takes twice the work of
    // the forward pass.
    let evaluated = all.min(most) / 3.0;
    let trained = (every * arguments.sequences_per_step()) as f64;
    Ok(evaluated / (evaluated + trained))
}
