//! The single checks.

use overdrive_checkpointing::Schedule;
use overdrive_core::units;
use overdrive_transformer::AttentionImplementation;
use tch::Device;

use super::Severity::{Failure, Warning};
use super::{Finding, MachineFacts, Sizes};
use crate::arguments::{IntervalStrategy, SaveStrategy, SequenceMode, TrainingArguments};
use crate::data::TextData;
use crate::memory_estimate::MemoryPlan;
use crate::run::TrainingPlan;
use crate::{Error, Result};

/// The number of passes up to which repeated text is worth about as much as new text (Muennighoff et al., "Scaling
/// Data-Constrained Language Models", 2023).
const WORTHWHILE_PASSES: f64 = 4.0;
/// The number of bytes of text per token below which a tokenizer does not suit the text: a byte-level tokenizer that
/// knows none of its words has 1, GPT-2's has about 4 on English.
const LEAST_BYTES_PER_TOKEN: f64 = 2.0;
/// The bytes of an fp32 weight.
const WEIGHT: u64 = 4;
/// The tolerance of the estimate.
const TOLERANCE: f64 = 0.15;
/// The share of the time above which evaluations are reported.
const MOST_EVALUATION: f64 = 0.2;
/// The share of the free memory that a run without checkpointing may take to be reported.
const ROOM: f64 = 0.7;

/// Returns the findings about the data, prepared as the run does it.
pub(super) fn data(
    arguments: &TrainingArguments,
    data: std::result::Result<&TextData, &Error>,
) -> Vec<Finding> {
    let data = match data {
        Ok(data) => data,
        // Errors of the data already name their remedy.
        Err(error) => {
            let remedy =
                "change `data` (`--data`) or the named key; the run would end with this error";
            return vec![Finding::fine("data", error.to_string()).or(true, Failure, remedy)];
        }
    };
    let tokens = data.train.len() as u64;
    let mut found = vec![amount(arguments, data, tokens)];
    found.extend(tokenizer(data));
    found
}

fn amount(arguments: &TrainingArguments, data: &TextData, tokens: u64) -> Finding {
    let what = format!(
        "{} tokens to train on, {} for validation",
        units::short_count(tokens),
        units::short_count(data.validation.len() as u64)
    );
    let plan = arguments.plan(data.micro_batches_per_epoch(arguments));
    let passes = plan.map_or(0.0, |plan| {
        plan.total_steps as f64 / plan.steps_per_epoch as f64
    });
    let what = format!("{what}; the run passes over them {passes:.1} times");
    let remedy = format!(
        "give more text or fewer steps (`max_steps`, `num_train_epochs`): beyond {WORTHWHILE_PASSES} passes \
         repeated text teaches a model less and less"
    );
    Finding::fine("data", what).or(passes > WORTHWHILE_PASSES, Warning, remedy)
}

/// Returns the finding about the tokenizer; `None` if the bytes of the text are not known.
fn tokenizer(data: &TextData) -> Option<Finding> {
    let bytes = data.train.text_bytes()? as f64;
    let per_token = bytes / data.train.len().max(1) as f64;
    let what = format!(
        "{per_token:.2} bytes of text a token, {} tokens in the vocabulary",
        data.vocab_size()
    );
    let remedy = "give a tokenizer that was made for this language and kind of text, raise `vocab_size`, or leave \
                  `tokenizer` out, so that one is trained on the data";
    let unsuited = per_token < LEAST_BYTES_PER_TOKEN;
    Some(Finding::fine("tokenizer", what).or(unsuited, Warning, remedy))
}

/// Returns the finding about the disk.
pub(super) fn disk(
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

/// Returns the finding about the memory of `processes` processes; on GPUs each has its own.
pub(super) fn memory(
    arguments: &TrainingArguments,
    facts: &MachineFacts,
    sizes: &Sizes,
    processes: usize,
) -> Result<Finding> {
    let plan = facts.memory_plan(arguments, sizes);
    let shared_by = match facts.device {
        Device::Cpu => processes.max(1) as u64,
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
        true => Failure,
        false => Warning,
    };
    Ok(Finding::fine("memory", what).or(true, severity, remedy))
}

/// Returns the finding about the precision.
pub(super) fn precision(facts: &MachineFacts) -> Finding {
    let (chosen, best) = (facts.precision, facts.recommended.precision);
    let reason = &facts.recommended.reason;
    let (what, keys) = match &facts.precision_warning {
        Some(warning) => (
            format!("{chosen}: {warning}"),
            "`bf16`, `fp16`, `fp8` and `tf32`",
        ),
        None if chosen == best => (format!("{chosen}: {reason}"), ""),
        None => (
            format!("{chosen}, and {best} is recommended: {reason}"),
            "`bf16`, `fp16`, `fp8`, `tf32` and `auto_precision`",
        ),
    };
    let remedy = format!("leave {keys} out, which selects {best}");
    Finding::fine("precision", what).or(!keys.is_empty(), Warning, remedy)
}

/// Returns the finding about other processes on the GPU, if there are any.
pub(super) fn other_processes(facts: &MachineFacts) -> Option<Finding> {
    let others = &facts.gpu_processes;
    let listed: Vec<String> = others
        .iter()
        .map(|process| match process.memory_bytes {
            Some(bytes) => format!("{} ({})", process.pid, units::bytes(bytes)),
            None => process.pid.to_string(),
        })
        .collect();
    let what = format!(
        "other processes compute on the GPU: {}; they share its time and its memory",
        listed.join(", ")
    );
    let remedy = "end them, or select another GPU with CUDA_VISIBLE_DEVICES";
    let finding = Finding::fine("processes", what).or(true, Warning, remedy);
    (!others.is_empty()).then_some(finding)
}

/// Returns the finding about the threads of `processes` processes.
pub(super) fn threads(facts: &MachineFacts, processes: usize) -> Finding {
    let (threads, processors) = (facts.threads, facts.processors);
    let all = threads.saturating_mul(processes.max(1));
    let threads_of = units::counted(threads, "thread");
    let all_processors = units::counted(processors, "processor");
    let what = match processes {
        0 | 1 => format!("{threads_of} an operator on {all_processors}"),
        _ => format!("{processes} processes of {threads_of} an operator on {all_processors}"),
    };
    if all > processors {
        let best = (processors / processes.max(1)).max(1);
        let what = format!("{what}: they wait for one another");
        let remedy = format!("`--threads {best}`, or OMP_NUM_THREADS={best}");
        return Finding::fine("threads", what).or(true, Warning, remedy);
    }
    // A quarter allows for hyper-threads: libtorch uses one thread per core.
    let idle = all * 4 < processors && facts.device == Device::Cpu;
    let what = what + if idle { ": most of them are idle" } else { "" };
    let remedy = "leave `--threads` and OMP_NUM_THREADS out, or raise them to the number of cores";
    Finding::fine("threads", what).or(idle, Warning, remedy)
}

/// Returns the findings, each of which is a warning; if there is none, returns one that says that all is fine.
pub(super) fn speed(
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
