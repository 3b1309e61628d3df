//! Quantizes a model folder or a GGUF file into a new folder, and reports the size and error of each weight, and
//! perplexity and decoding speed before and after.
//!
//! ```text
//! cargo xtask example quantize --model runs/tiny-001/model --scheme nf4 --head nf4 --out runs/tiny-nf4
//! cargo xtask example quantize --model PATH --scheme int4 --group-size 32 --calibrate clip,gptq \
//!     --data book.txt --out OUT
//! ```

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::rc::Rc;

use anyhow::{Result, bail};
use clap::{Parser, ValueEnum};
use overdrive::core::OutputFolder;
use overdrive::quantization::{
    CheckpointOptions, ClipOptions, GptqOptions, Migration, Progress, Scheme, check_checkpoint,
    quantize_checkpoint,
};
use overdrive::transformer::LoadOptions;
use overdrive_examples::{
    ByteProgress, ModelText, decode_tokens_per_second, load_model, local_model, print_line,
    scheme_help, unpack_model,
};

/// Quantizes a model folder or a GGUF file into a new folder
#[derive(Parser)]
struct Flags {
    /// Folder with config.json, weights and tokenizer.json, GGUF file (dequantized first), or name on the Hugging Face
    /// hub
    #[arg(long)]
    model: PathBuf,
    #[arg(long, help = scheme_help("Scheme of the linear layers"))]
    scheme: Scheme,
    /// Output folder
    #[arg(long)]
    out: PathBuf,
    /// Scheme of the head, and of an embedding that is tied to it [default: not quantized]
    #[arg(long, value_parser = scheme_or_keep)]
    head: Option<OptionalScheme>,
    /// Scheme of the embedding [default: not quantized]
    #[arg(long, value_parser = scheme_or_keep)]
    embedding: Option<OptionalScheme>,
    /// Linear layers to leave unquantized, separated by commas: ends or beginnings of names, or regular expressions
    #[arg(long, value_delimiter = ',')]
    skip: Vec<String>,
    /// Group size of int4: 16, 32, 64, 128 or 256
    #[arg(long)]
    group_size: Option<usize>,
    /// Calibration of scales and quantized values on the training split of the data
    #[arg(long, value_enum, value_delimiter = ',')]
    calibrate: Vec<Calibrate>,
    /// Number of calibration windows
    #[arg(long, default_value_t = 128)]
    calibration_windows: usize,
    /// Text files or folders, split into calibration and measurement data [default: the Rust source code that
    /// Cargo keeps on this machine, split as `train` splits it]
    #[arg(long)]
    data: Vec<PathBuf>,
    /// Do not measure perplexity and speed; without any data they are not measured either
    #[arg(long)]
    no_eval: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Calibrate {
    /// Clip the range of each scale to minimize the squared error
    Clip,
    /// GPTQ: choose quantized values that compensate for each other's errors
    Gptq,
    /// SmoothQuant: scale large activations down and their weights up
    Smoothquant,
    /// AWQ: the same scaling, chosen to minimize the error of the weights
    Awq,
}

/// The treatment of head or embedding.
type OptionalScheme = Option<Scheme>;

fn scheme_or_keep(text: &str) -> Result<OptionalScheme, overdrive::quantization::Error> {
    match text {
        "keep" => Ok(None),
        scheme => scheme.parse().map(Some),
    }
}

fn main() -> ExitCode {
    overdrive_examples::run_main(|| run(&Flags::parse()))
}

fn run(flags: &Flags) -> Result<()> {
    let schemes = [
        Some(flags.scheme),
        flags.head.flatten(),
        flags.embedding.flatten(),
    ];
    let mut schemes = schemes.into_iter().flatten();
    if let (Some(size), false) = (
        flags.group_size,
        schemes.any(|own| matches!(own, Scheme::Grouped(_))),
    ) {
        let scheme = flags.scheme;
        bail!(
            "`--group-size` is {size}, but `{scheme}` takes no group size; leave it out, or use `--scheme int4`"
        );
    }
    // One group size for all: a folder has one configuration.
    let sized = |mut scheme: Scheme| {
        if let (Scheme::Grouped(options), Some(size)) = (&mut scheme, flags.group_size) {
            options.group_size = size;
        }
        scheme
    };
    let scheme = sized(flags.scheme);
    let mut options = CheckpointOptions {
        head: flags.head.flatten().map(sized),
        embedding: flags.embedding.flatten().map(sized),
        skip_modules: flags.skip.clone(),
        ..CheckpointOptions::default()
    };
    let wants = |method| flags.calibrate.contains(&method);
    options.calibration.clip = wants(Calibrate::Clip).then(ClipOptions::default);
    options.calibration.gptq = wants(Calibrate::Gptq).then(GptqOptions::default);
    options.migration = match (wants(Calibrate::Smoothquant), wants(Calibrate::Awq)) {
        (true, _) => Some(Migration::Strength(0.5)),
        (_, true) => Some(Migration::Search { steps: 20 }),
        _ => None,
    };

    // The weights of a GGUF file are in llama.cpp's order and types, those of a pickle in storages: both are written as
    // safetensors first.
    let source = local_model(&flags.model)?;
    // Now, and not after the calibration.
    OutputFolder::check("quantize", "--out", &flags.out, &[("--model", &source)])?;
    let is_pickle = ["pytorch_model.bin", "pytorch_model.bin.index.json"]
        .iter()
        .any(|name| source.join(name).exists());
    let has_safetensors = ["model.safetensors", "model.safetensors.index.json"]
        .iter()
        .any(|name| source.join(name).exists());
    let unpacked = match source.is_file() || (is_pickle && !has_safetensors) {
        true => {
            let parent = flags
                .out
                .parent()
                .filter(|parent| !parent.as_os_str().is_empty());
            Some(unpack_model(&source, parent.unwrap_or(Path::new(".")))?)
        }
        false => None,
    };
    let folder = unpacked
        .as_ref()
        .map_or(source.as_path(), |unpacked| unpacked.path());
    check_checkpoint(folder, scheme, &options)?;
    let (mut text, mut before) = (None, None);
    if !flags.no_eval || !flags.calibrate.is_empty() {
        let model = load_model(folder, LoadOptions::default())?;
        text = match ModelText::prepare(folder, &model, &flags.data) {
            Ok(data) => Some(data),
            // Nothing was asked of a text: a machine without one can quantize too.
            Err(error) if flags.data.is_empty() && flags.calibrate.is_empty() => {
                print_line(format_args!(
                    "perplexity and speed are not measured without a text (`--data FILE`): {error}"
                ));
                None
            }
            Err(error) => return Err(error),
        };
        if let Some(data) = &text {
            if !flags.calibrate.is_empty() {
                let inputs = data.inputs_of(&model, flags.calibration_windows)?;
                options.statistics = Some(Rc::new(inputs));
            }
            if !flags.no_eval {
                before = Some((data.perplexity(&model)?, decode_tokens_per_second(&model)?));
            }
        }
    }

    let bar = ByteProgress::new("quantizing")?;
    let shown = bar.clone();
    options.progress = Some(Progress::new(move |done, all| shown.set(done, all)));
    let report = quantize_checkpoint(folder, &flags.out, scheme, &options);
    bar.clear();
    print_line(format_args!("{}\n", report?));

    if let (Some(text), Some((perplexity, speed))) = (&text, before) {
        let model = load_model(&flags.out, LoadOptions::default())?;
        let after = text.perplexity(&model)?;
        let change = 100.0 * (after / perplexity - 1.0);
        print_line(format_args!(
            "perplexity  {perplexity:.3} before, {after:.3} after ({change:+.2} %)"
        ));
        let faster = decode_tokens_per_second(&model)?;
        print_line(format_args!(
            "decoding    {speed:.0} tokens/s before, {faster:.0} after"
        ));
    }
    print_line(format_args!("model       {}", flags.out.display()));
    Ok(())
}
