//! Exports a model folder or GGUF file to ONNX, optionally with a merged adapter and quantized weights, and compares
//! the speed of ONNX Runtime and Overdrive.
//!
//! ```text
//! cargo xtask example export_onnx --model runs/tiny-001/model --out runs/tiny-onnx
//! cargo xtask example export_onnx --model PATH --out OUT --quantize int4-g32 --activations int8
//! cargo xtask example export_onnx --model PATH --adapter runs/finetune-001 --out OUT --compare
//! ```
//!
//! `--compare` needs Python with onnxruntime: `python3`, or the interpreter in OVERDRIVE_PYTHON.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, ValueEnum};
use overdrive::core::OutputFolder;
use overdrive::onnx::{
    Activations, Attention, ExportOptions, ExternalData, Precision, export_pretrained,
};
use overdrive::transformer::{CausalLm, QuantizeOptions};
use overdrive_examples::{ModelFlags, OnnxComparison, print_line};

/// Exports a model folder or GGUF file to ONNX
#[derive(Parser)]
pub(crate) struct Flags {
    #[command(flatten)]
    model: ModelFlags,
    /// Output folder: model.onnx, config.json, generation_config.json, the tokenizer's files and chat templates
    #[arg(long)]
    out: PathBuf,
    /// ONNX opset version, 18 to 26 [default: 21, and 23 for --attention standard]
    #[arg(long)]
    opset: Option<i64>,
    /// Use fp16 for activations, caches and dense weights
    #[arg(long)]
    fp16: bool,
    /// Attention operators; standard needs opset 23, group-query needs ONNX Runtime
    #[arg(long, value_enum, default_value = "composed")]
    attention: AttentionFlag,
    /// Activation type of matmuls with quantized weights
    #[arg(long, value_enum, default_value = "scheme")]
    activations: ActivationsFlag,
    /// Store the weights in a separate file, whatever their size
    #[arg(long)]
    external_data: bool,
    /// Run the same prompt in Overdrive and in ONNX Runtime, and print both speeds
    #[arg(long)]
    compare: bool,
    /// Number of prompt tokens in the comparison
    #[arg(long, default_value_t = 128)]
    prompt: usize,
    /// Number of generated tokens in the comparison
    #[arg(long, default_value_t = 64)]
    new: usize,
    /// Number of rounds; the medians are printed
    #[arg(long, default_value_t = 3)]
    rounds: usize,
}

#[derive(Clone, Copy, ValueEnum)]
enum AttentionFlag {
    Composed,
    Standard,
    GroupQuery,
}

#[derive(Clone, Copy, ValueEnum)]
enum ActivationsFlag {
    Scheme,
    Float,
    Int8,
}

fn main() -> ExitCode {
    overdrive_examples::run_main(|| run(&Flags::parse()))
}

/// Exports, and compares the speeds if the flags ask for it.
pub(crate) fn run(flags: &Flags) -> Result<()> {
    let mut options = ExportOptions::default();
    if flags.fp16 {
        options.precision = Precision::Float16;
    }
    options.attention = match flags.attention {
        AttentionFlag::Composed => Attention::Composed,
        AttentionFlag::Standard => Attention::Standard,
        AttentionFlag::GroupQuery => Attention::GroupQuery,
    };
    let standard = options.attention == Attention::Standard;
    options.opset = flags
        .opset
        .unwrap_or(if standard { 23 } else { options.opset });
    options.activations = match flags.activations {
        ActivationsFlag::Scheme => Activations::Scheme,
        ActivationsFlag::Float => Activations::Float,
        ActivationsFlag::Int8 => Activations::Int8,
    };
    if flags.external_data {
        options.external_data = ExternalData::Always;
    }
    // Before the weights are loaded.
    options.validate()?;
    // Groups of a GGUF file that ONNX has no operator for are written as dense weights.
    let source = flags.model.local()?;
    let output = OutputFolder::check("export_onnx", "--out", &flags.out, &source.inputs())?;
    options.dense_fallback = source.path.is_file();
    let mut model = load(&source)?;
    let unfinished = output.begin()?;
    let mut report = export_pretrained(&mut model, unfinished.path(), &options)?;
    source.copy_tokenizer(unfinished.path())?;
    unfinished.finish()?;
    // The report names the files by the places that they have now.
    for path in [&mut report.path].into_iter().chain(&mut report.data_path) {
        *path = flags.out.join(path.file_name().unwrap_or_default());
    }
    print_line(report.to_string().trim_end());
    if flags.compare {
        let comparison = OnnxComparison {
            prompt: flags.prompt,
            new: flags.new,
            rounds: flags.rounds,
        };
        let compared = comparison.run(&model, &flags.out.join("model.onnx"))?;
        print_line(format_args!("\n{}", compared.to_string().trim_end()));
    }
    Ok(())
}

/// Loads the model, merges its adapter and quantizes it, in this order: an adapter merged into quantized weights would
/// be rounded twice.
fn load(flags: &ModelFlags) -> Result<CausalLm> {
    let mut dense = flags.clone();
    (dense.quantize, dense.quantize_head) = (None, None);
    let mut model = dense.load()?;
    if let Some(scheme) = flags.quantize {
        if model.is_quantized() {
            // The weights of a GGUF file; those that are quantized stay as they are otherwise.
            model.dequantize()?;
        }
        let options = QuantizeOptions::new(scheme);
        model.quantize(&match flags.quantize_head {
            Some(head) => options.with_head(head),
            None => options,
        })?;
    }
    Ok(model)
}
