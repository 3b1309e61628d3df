//! Fine-tunes a model on prompts and responses: LoRA, QLoRA with `--qlora` (4-bit weights), or all weights
//! with `--full`. For a model of `cargo xtask train`, with the data in this repository:
//!
//! ```text
//! cargo xtask train --out runs/base
//! cargo run --release -p overdrive-examples --example finetune -- \
//!     --model runs/base/model --data examples/data/arithmetic.jsonl --steps 100 --qlora --out runs/mine
//! cargo run --release -p overdrive-examples --example finetune -- --config qlora.yaml
//! ```
//!
//! The folder gets `adapter_config.json` and `adapter_model.safetensors`, which PEFT and
//! `generate --adapter DIR` load, the tokenizer, metrics.jsonl and report.html. `--compare` trains by each
//! method in turn and prints their costs. The loop is that of `train`.

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use overdrive::distributed::ProcessGroup;
use overdrive::profiling::MemoryUsage;
use overdrive::sys::memory;
use overdrive::tracking::Trackers;
use overdrive::trainer::{
    DataShard, Evaluation, FinetuneArgs, FinetuneArguments, InstructionData, Interrupt,
};
use overdrive_examples::finetuning::{
    Comparison, FinetuneModel, Finetuned, Method, TrainingMemory,
};
use overdrive_examples::training::{decoder_shape, evaluate, name_lost_ranks, shared};
use overdrive_examples::{RunEnd, exit_or_resume, local_model, print_line};
use tch::Device;

#[allow(dead_code, reason = "its `main` is another program's")]
pub(crate) mod train;

/// Fine-tunes a model on prompts and responses
#[derive(Parser)]
pub(crate) struct Flags {
    #[command(flatten)]
    finetune: FinetuneArgs,
    /// Train by each method in turn (all weights, LoRA, QLoRA), print the costs, and write nothing
    #[arg(long)]
    compare: bool,
}

fn main() -> ExitCode {
    exit_or_resume(|| run(&Flags::parse()))
}

/// Fine-tunes, or compares the methods.
pub(crate) fn run(flags: &Flags) -> Result<RunEnd> {
    let say = |line: &str| print_line(line);
    let arguments = flags.finetune.resolve_with_notes(say)?;
    if flags.compare {
        println!("\n{}", compare(&arguments, say)?);
        return Ok(match Interrupt::install()?.requested() {
            true => RunEnd::NotSaved,
            false => RunEnd::Finished,
        });
    }
    // The processes that torchrun or the example `launch` has started; usually one.
    let group = arguments.training.init_process_group()?;
    let tuned = finetune(&arguments, &group, true, |line| {
        if group.is_main() {
            say(line);
        }
    })?;
    finish(tuned, &group)
}

/// Writes the results on rank 0, unless the run was interrupted, and returns the way in which it ended, on all ranks.
pub(crate) fn finish(tuned: Finetuned, group: &ProcessGroup) -> Result<RunEnd> {
    let end = tuned.summary.end();
    if group.is_main() && end == RunEnd::Finished {
        let results = tuned.write()?;
        let root = results.folder.root().display();
        print_line(format_args!("{results}\nwritten     {root}"));
        if let Some(merged) = &results.merged {
            print_line(format_args!("merged      {}", merged.display()));
        }
    } else if let (true, RunEnd::Saved, Some(folder)) = (group.is_main(), end, &tuned.folder) {
        let root = folder.root().display();
        println!("resume it with `--out {root} --resume-from-checkpoint true`");
    }
    Ok(end)
}

/// Trains by each method in turn, each time from the stored model, and writes nothing. A signal ends it after the
/// step of the present method.
pub(crate) fn compare(
    arguments: &FinetuneArguments,
    mut say: impl FnMut(&str),
) -> Result<Comparison> {
    let mut rows = Vec::new();
    for method in Method::ALL {
        say(&format!("{method}"));
        let arguments = method.of(arguments);
        let tuned = finetune(&arguments, &ProcessGroup::single(), false, |_| {})?;
        let interrupted = tuned.summary.interrupted;
        rows.push((method, tuned.memory, tuned.summary));
        if interrupted {
            break;
        }
    }
    Ok(Comparison { rows })
}

/// Fine-tunes with all processes of `group`; if `writes` is `true`, snapshots and metrics are written to the run's folder.
pub(crate) fn finetune(
    arguments: &FinetuneArguments,
    group: &ProcessGroup,
    writes: bool,
    mut say: impl FnMut(&str),
) -> Result<Finetuned> {
    arguments.validate()?;
    // The context may be shortened to the model's, and the micro-batch to what fits.
    let mut arguments = arguments.clone();
    loop {
        match attempt(&mut arguments, group, writes, &mut say) {
            Err(error) if train::retry(&mut arguments.training, group, &error, &mut say)? => {}
            ended => return ended.map_err(|error| name_lost_ranks(group, error)),
        }
    }
}

/// Fine-tunes from the stored model, or from a snapshot, with the micro-batch of `arguments`.
fn attempt(
    arguments: &mut FinetuneArguments,
    group: &ProcessGroup,
    writes: bool,
    mut say: impl FnMut(&str),
) -> Result<Finetuned> {
    if !writes {
        // Without a folder there are no snapshots.
        arguments.training.resume_from_checkpoint = None;
    }
    let (device, precision) = (arguments.training.device(group), arguments.apply()?);
    // The peak is measured from here. A GPU without allocations has no statistics yet.
    memory::reset_peak(device).or_else(|error| match device {
        Device::Cuda(_) => Ok(()),
        _ => Err(error),
    })?;
    // `--compare` trains several times in one process: earlier allocations do not count.
    let before = MemoryUsage::of(device).allocated_bytes.unwrap_or(0);

    arguments.model_name_or_path = local_model(&arguments.model_name_or_path)?;
    let mut model = FinetuneModel::load(arguments, device)?;
    let config = model.model.config();
    let context = u64::try_from(config.max_position_embeddings())?;
    if arguments.training.context_length > context {
        let asked = arguments.training.context_length;
        say(&format!(
            "max_seq_length is {context}, the model's context (asked for: {asked})"
        ));
        arguments.training.context_length = context;
    }
    let (shape, trainable) = (decoder_shape(&model.model), model.trainable_parameters());
    if let Some(line) = arguments.fit_batch(shape, precision, trainable, device, group)? {
        say(&line);
    }
    let data = InstructionData::prepare(arguments, config.eos_token_ids(), &mut say)?;
    let fingerprints = data.fingerprints(arguments, group)?;
    let shard = DataShard::of(group, device);
    let loader = data.train_loader(arguments, shard)?;
    let (fill, width) = data.fill(arguments)?;
    say(&format!(
        "batches     {} of {} rows per epoch, {fill}",
        loader.batches_per_epoch(),
        arguments.training.per_device_train_batch_size,
    ));
    model.describe(arguments, precision, &mut say);

    let folder = match writes {
        true => Some(arguments.open_or_create_folder(group)?),
        false => None,
    };
    if let Some(folder) = &folder {
        say(&format!("run folder  {}", folder.root().display()));
        train::continue_in(&mut arguments.training, folder);
    }
    let arguments = &*arguments;
    let training = train::Training {
        arguments: &arguments.training,
        group,
        precision,
        folder: folder.as_ref(),
        // A snapshot of adapters alone is not a loadable model folder.
        files: Vec::new(),
        fingerprints,
        parameters: shared(&model.trainable),
        trackers: Trackers::new(),
    };
    let trained = training.fit(&mut model.model, loader, &mut |model| {
        let loss = match data.validation_loader(arguments, shard)? {
            Some(batches) => evaluate(model, batches, precision, group)?,
            None => f64::NAN,
        };
        Ok(Evaluation::new(loss, None))
    });
    let (summary, ema) = trained?;
    let peak = MemoryUsage::of(device).peak_allocated_bytes;
    let peak = peak.map(|peak| peak.saturating_sub(before));
    // The longest row bounds the activations, which dominate the estimate.
    let width = width.min(arguments.training.context_length);
    let memory = TrainingMemory::of(arguments, precision, &model, &summary, width, peak)?;
    Ok(Finetuned {
        arguments: arguments.clone(),
        folder,
        model,
        data,
        summary,
        memory,
        fill,
        ema,
    })
}
