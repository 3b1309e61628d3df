//! Times generation with the 100M-parameter Llama of the claims and prints one JSON line, as
//! `pytorch/generation.py` does for transformers; `pytorch/compare_generation.py` alternates both on the same
//! weights.

use std::path::PathBuf;

use clap::Parser;
use overdrive::generation::{GenerateOutput, GenerationConfig, generate};
use overdrive::quantization::Scheme;
use overdrive::sys::denormals::set_flush_denormals;
use overdrive::sys::{build_info, threads};
use overdrive::transformer::{CausalLm, LoadOptions, QuantizeOptions, SaveOptions};
use overdrive_benches::{StepResult, generation};
use serde_json::json;
use tch::{Device, Kind};

/// Times prefill and decode
#[derive(Parser)]
struct Flags {
    /// Folder of the weights [default: random weights]
    #[arg(long)]
    model: Option<PathBuf>,
    /// JSON file with the tokens of a text from which the prompts are taken [default: made-up tokens]
    #[arg(long, value_name = "FILE")]
    prompt_ids: Option<PathBuf>,
    /// Write the random weights to this folder and exit
    #[arg(long)]
    save: Option<PathBuf>,
    /// Weights in bf16 instead of fp32
    #[arg(long)]
    bf16: bool,
    /// Quantize the linear layers: int8, int4, nf4, …
    #[arg(long, value_name = "SCHEME")]
    quantize: Option<Scheme>,
    /// Quantize the head, and the embedding with it [default: as the linear layers]
    #[arg(long, value_name = "SCHEME", requires = "quantize")]
    quantize_head: Option<Scheme>,
    /// Number of runs of each case, of which the median counts
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// Number of threads inside one operator [default: libtorch's choice]
    #[arg(long)]
    threads: Option<usize>,
    /// One case instead of all: prefill, one_stream, eight_streams, cached, uncached, eight_cached,
    /// eight_uncached or long_prompt
    #[arg(long)]
    case: Option<String>,
}

fn main() -> StepResult<()> {
    let flags = Flags::parse();
    if let Some(count) = flags.threads {
        threads::set_intra_op(count)?;
    }
    set_flush_denormals(true);
    let text: Option<Vec<i64>> = match &flags.prompt_ids {
        Some(file) => Some(serde_json::from_slice(&std::fs::read(file)?)?),
        None => None,
    };
    let kind = flags.bf16.then_some(Kind::BFloat16);
    let mut model = match &flags.model {
        Some(dir) => {
            let mut options = LoadOptions::default();
            (options.device, options.kind) = (Device::Cpu, kind);
            CausalLm::from_pretrained(dir, &options)?
        }
        None => generation::model(kind.unwrap_or(Kind::Float))?,
    };
    if let Some(dir) = &flags.save {
        model.save_pretrained(dir, &SaveOptions::default())?;
        println!("{}", json!({"parameters": model.num_parameters()}));
        return Ok(());
    }
    if let Some(scheme) = flags.quantize {
        let head = flags.quantize_head.unwrap_or(scheme);
        model.quantize(&QuantizeOptions::new(scheme).with_head(head))?;
    }
    let mut line = json!({
        "side": format!("Overdrive on libtorch {}", build_info::libtorch_version()?),
        "parameters": model.num_parameters(),
        "bytes": model.memory_footprint(),
        "threads": threads::intra_op(),
    });
    let wanted =
        |case: &&generation::Case| flags.case.as_deref().is_none_or(|name| name == case.name);
    for case in generation::CASES.iter().filter(wanted) {
        let prompts = match &text {
            Some(text) => generation::prompts_of_text(text, case.streams, case.prompt)
                .ok_or("the text is too short for the prompts")?,
            None => generation::prompts(case.streams, case.prompt, model.config().vocab_size()),
        };
        let config = GenerationConfig {
            max_new_tokens: Some(case.new),
            use_cache: case.use_cache,
            ..GenerationConfig::default()
        };
        let mut outputs = Vec::new();
        let runs = if case.use_cache { flags.runs.max(1) } else { 1 };
        for _ in 0..runs {
            outputs.push(generate(&model, &prompts, &config)?);
        }
        let median = |of: &dyn Fn(&GenerateOutput) -> f64| {
            overdrive_benches::median(outputs.iter().map(of).collect())
        };
        line[case.name] = json!({
            "prefill": median(&|o| o.timings.prefill_tokens_per_second()),
            "decode": median(&|o| o.timings.decode_tokens_per_second()),
            "tokens": outputs[0].new_tokens(0),
        });
    }
    println!("{line}");
    Ok(())
}
