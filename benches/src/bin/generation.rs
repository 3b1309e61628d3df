//! Times generation with the 100M-parameter Llama of the claims and prints one JSON line, as
//! `pytorch/generation.py` does for transformers; `pytorch/compare_generation.py` runs both in turn on
//! the same weights.

use std::path::PathBuf;
use std::time::Instant;

use clap::Parser;
use overdrive::generation::{GenerateOutput, GenerationConfig, generate};
use overdrive::sys::{build_info, threads};
use overdrive::transformer::{CausalLm, LoadOptions};
use overdrive_benches::{StepResult, generation};
use tch::Kind;

/// Times prefill and decode
#[derive(Parser)]
struct Flags {
    /// Folder with the weights [default: random ones]
    #[arg(long)]
    model: Option<PathBuf>,
    /// Tokens of each prompt
    #[arg(long, default_value_t = 32)]
    prompt: usize,
    /// Tokens generated for each
    #[arg(long, default_value_t = 128)]
    new: usize,
    /// Prompts continued together
    #[arg(long, default_value_t = 1)]
    streams: usize,
    /// Weights in bf16 instead of fp32
    #[arg(long)]
    bf16: bool,
    /// Compute every step from the whole text
    #[arg(long)]
    no_cache: bool,
    /// Runs, of which the median counts
    #[arg(long, default_value_t = 3)]
    runs: usize,
}

fn main() -> StepResult<()> {
    let flags = Flags::parse();
    let kind = flags.bf16.then_some(Kind::BFloat16);
    let model = match &flags.model {
        Some(dir) => CausalLm::from_pretrained(
            dir,
            &LoadOptions {
                kind,
                ..LoadOptions::default()
            },
        )?,
        None => generation::model(kind.unwrap_or(Kind::Float))?,
    };
    let prompts = generation::prompts(flags.streams, flags.prompt, model.config().vocab_size());
    let config = GenerationConfig {
        max_new_tokens: Some(flags.new),
        use_cache: !flags.no_cache,
        ..GenerationConfig::default()
    };
    let mut outputs: Vec<(f64, GenerateOutput)> = Vec::new();
    for _ in 0..flags.runs.max(1) {
        let start = Instant::now();
        let output = generate(&model, &prompts, &config)?;
        outputs.push((start.elapsed().as_secs_f64(), output));
    }
    let median = |of: &dyn Fn(&(f64, GenerateOutput)) -> f64| {
        let mut all: Vec<f64> = outputs.iter().map(of).collect();
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    };
    let line = serde_json::json!({
        "side": format!("Overdrive on libtorch {}", build_info::libtorch_version()?),
        "parameters": model.num_parameters(),
        "threads": threads::intra_op(),
        "seconds": median(&|(seconds, _)| *seconds),
        "prefill_tokens_per_second": median(&|(_, o)| o.timings.prefill_tokens_per_second()),
        "decode_tokens_per_second": median(&|(_, o)| o.timings.decode_tokens_per_second()),
        "first_tokens": outputs[0].1.new_tokens(0).iter().take(16).collect::<Vec<_>>(),
    });
    println!("{line}");
    Ok(())
}
