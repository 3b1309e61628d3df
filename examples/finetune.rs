//! Fine-tunes a model on questions and answers: LoRA, QLoRA with `--qlora` (weights in 4 bits), or all
//! weights with `--full`. On what `cargo xtask train` makes, with the questions that are here:
//!
//! ```text
//! cargo xtask train --out runs/base
//! cargo run --release -p overdrive-examples --example finetune -- \
//!     --model runs/base/model --data examples/data/arithmetic.jsonl --steps 100 --qlora --out runs/mine
//! cargo run --release -p overdrive-examples --example finetune -- --config qlora.yaml
//! ```
//!
//! The folder gets `adapter_config.json` and `adapter_model.safetensors`, which PEFT loads and
//! `generate --adapter DIR` too, the tokenizer, metrics.jsonl and report.html. `--compare` trains by
//! each method in turn and prints what they cost, side by side.

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use overdrive::trainer::{FinetuneArgs, compare, finetune_in};

/// Fine-tunes a model on questions and answers
#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    finetune: FinetuneArgs,
    /// Train by each method in turn (all weights, LoRA, QLoRA), write nothing, and print what they cost
    #[arg(long)]
    compare: bool,
}

fn main() -> ExitCode {
    overdrive_examples::exit_or_go_on(run(&Flags::parse()))
}

/// Whether it was interrupted.
fn run(flags: &Flags) -> Result<bool> {
    let say = |line: &str| println!("{line}");
    let arguments = flags.finetune.resolve_telling(say)?;
    if flags.compare {
        println!("\n{}", compare(&arguments, say)?);
        return Ok(false);
    }
    // The processes that torchrun or the example `launch` has started; most often one.
    let group = arguments.training.init_process_group()?;
    let Some(results) = finetune_in(&group, &arguments, say)? else {
        return Ok(false);
    };
    println!("{results}");
    println!("written     {}", results.folder.root().display());
    if let Some(merged) = &results.merged {
        println!("merged      {}", merged.display());
    }
    Ok(results.summary.interrupted)
}
