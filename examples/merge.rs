//! Merges an adapter into its model and writes a folder that can be quantized, chatted with and served like any other
//! model.
//!
//! ```text
//! cargo xtask example merge --model PATH --adapter runs/mine --out runs/mine-merged
//! ```
//!
//! The tokenizer and the chat template are taken from the folder of the adapter, or from the model if that folder has
//! none. The weights of a GGUF file or a quantized folder are dequantized first, so that the merged weights are not
//! rounded.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use overdrive::core::OutputFolder;
use overdrive::datasets::copy_tokenizer;
use overdrive::generation::ModelFiles;
use overdrive::trainer::FinetuneModel;
use overdrive_examples::{local_adapter, local_model, print_line};

/// Merges an adapter into its model
#[derive(Parser)]
pub(crate) struct Flags {
    /// GGUF file, folder with config.json, weights and tokenizer.json, or name on the Hugging Face hub
    #[arg(long)]
    model: PathBuf,
    /// Folder of the adapter in PEFT's format, or its name on the hub
    #[arg(long)]
    adapter: PathBuf,
    /// Output folder
    #[arg(long)]
    out: PathBuf,
}

fn main() -> ExitCode {
    overdrive_examples::run_main(|| run(&Flags::parse()))
}

/// Merges, and writes the folder.
pub(crate) fn run(flags: &Flags) -> Result<()> {
    let (model, adapter) = (local_model(&flags.model)?, local_adapter(&flags.adapter)?);
    let inputs = [
        ("--model", model.as_path()),
        ("--adapter", adapter.as_path()),
    ];
    let output = OutputFolder::check("merge", "--out", &flags.out, &inputs)?.begin()?;
    let folder = output.path();
    FinetuneModel::save_merged(&model, &adapter, folder)?;
    // The adapter may have been trained with another chat template than the model's, which then lies beside it.
    let copied = copy_tokenizer(&adapter, folder)?;
    if !copied.iter().any(|name| name.ends_with("tokenizer.json")) {
        ModelFiles::open(&model)?.copy_tokenizer(folder)?;
    }
    output.finish()?;
    print_line(format!("merged      {}", flags.out.display()));
    Ok(())
}
