//! Writes a model as a GGUF file for llama.cpp and its relatives, optionally with a merged adapter; or an adapter alone.
//!
//! ```text
//! cargo xtask example export_gguf --model runs/tiny-001/model --type q8_0 --out tiny.gguf
//! cargo xtask example export_gguf --model ORG/NAME --adapter runs/mine --type q4_k_m --out mine.gguf
//! cargo xtask example export_gguf --model ORG/NAME --adapter runs/mine --keep-adapter --out lora.gguf
//! ```
//!
//! The tokenizer, the chat template and the sampling defaults go into the file. An adapter is merged into dense weights;
//! `--keep-adapter` writes it alone, for `llama-server --lora`, and the model stays as it is.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Parser;
use overdrive::core::{check_not_read, units};
use overdrive::generation::{ModelFiles, export_gguf};
use overdrive::lora::{LoadAdapterOptions, MergeOptions, load_adapter, merge_and_unload};
use overdrive::quantization::GgufFile;
use overdrive::transformer::{
    GgufFileType, LoadOptions, LoadProgress, ModelConfig, save_gguf_adapter,
};
use overdrive_examples::{
    ByteProgress, check_output_file, load_model, local_adapter, local_model, print_line,
};

/// Writes a model or an adapter as a GGUF file
#[derive(Parser)]
pub(crate) struct Flags {
    /// GGUF file, folder with config.json, weights and tokenizer.json, or name on the Hugging Face hub
    #[arg(long)]
    model: PathBuf,
    /// Folder of an adapter in PEFT's format, or its name on the hub, to merge into the weights
    #[arg(long)]
    adapter: Option<PathBuf>,
    /// Write the adapter alone, in f32
    #[arg(long, requires = "adapter", conflicts_with = "file_type")]
    keep_adapter: bool,
    /// Type of the matrices: f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, q6_k, q4_k_m, mxfp4_moe
    #[arg(long = "type", value_name = "TYPE", default_value = "f16")]
    file_type: GgufFileType,
    /// Output file
    #[arg(long)]
    out: PathBuf,
    /// Replace an existing file
    #[arg(long)]
    overwrite: bool,
}

fn main() -> ExitCode {
    overdrive_examples::run_main(|| run(&Flags::parse()))
}

/// Writes the file.
pub(crate) fn run(flags: &Flags) -> Result<()> {
    check_output_file("--out", &flags.out)?;
    let path = local_model(&flags.model)?;
    let adapter = flags.adapter.as_deref().map(local_adapter).transpose()?;
    let inputs = [("--model", Some(&path)), ("--adapter", adapter.as_ref())];
    let inputs = inputs
        .into_iter()
        .filter_map(|(flag, path)| Some((flag, path?.as_path())));
    check_not_read("--out", &flags.out, &inputs.collect::<Vec<_>>())?;
    if flags.out.exists() && !flags.overwrite {
        let out = flags.out.display();
        bail!("{out} exists; choose another file, or replace it with `--overwrite`");
    }
    if let (true, Some(adapter)) = (flags.keep_adapter, &adapter) {
        let config = match path.is_dir() {
            true => ModelConfig::from_dir(&path)?,
            false => ModelConfig::from_gguf(&GgufFile::open(&path)?)?,
        };
        save_gguf_adapter(&config, adapter, &flags.out)?;
        return written(&flags.out, "an adapter");
    }
    let mut model = load_model(&path, LoadOptions::default())?;
    // The adapter may have been trained with another chat template than the model's, which then lies beside it.
    let mut files = ModelFiles::open(&path)?;
    if let Some(adapter) = &adapter {
        if model.is_quantized() {
            // Merged into quantized weights, the sum would be rounded twice.
            model.dequantize()?;
        }
        load_adapter(
            &mut model,
            adapter,
            "default",
            &LoadAdapterOptions::default(),
        )?;
        merge_and_unload(&mut model, &MergeOptions::default())?;
        if adapter.join("tokenizer.json").exists() {
            files = ModelFiles::open(adapter)?;
        }
    }
    let bar = ByteProgress::new("writing")?;
    let shown = bar.clone();
    let progress = LoadProgress::new(move |done, all| shown.set(done, all));
    export_gguf(&model, &files, &flags.out, flags.file_type, Some(progress))?;
    bar.clear();
    written(&flags.out, &flags.file_type.to_string())
}

fn written(path: &Path, what: &str) -> Result<()> {
    let bytes = units::bytes(std::fs::metadata(path)?.len());
    print_line(format!("written     {} ({what}, {bytes})", path.display()));
    Ok(())
}
