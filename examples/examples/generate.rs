//! Continues a prompt with a model from a Hugging Face folder, such as the one that `train` writes.
//! Text streams to stdout as it comes, the speed goes to stderr.
//!
//! ```text
//! cargo run --release -p overdrive-examples --example generate -- --model runs/tiny/model \
//!     --prompt "fn main() {" --max-new-tokens 200 --temperature 0.8 --top-p 0.95 --seed 1
//! cargo run --release -p overdrive-examples --example generate -- --model DIR \
//!     --prompt-ids 1,2,3 --print-ids --temperature 0        # exact: ids in, ids out, greedy
//! ```

use std::io::{Write, stdout};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, anyhow};
use clap::Parser;
use overdrive::generation::{GenerationConfig, Tokenizer, generate, generate_text};
use overdrive::transformer::{CausalLm, LoadOptions};
use tch::Device;

/// Continues a prompt with a model from a Hugging Face folder
///
/// What a flag does not say is as the folder's generation_config.json says, else greedy.
#[derive(Parser)]
struct Flags {
    /// Folder with config.json, model.safetensors and tokenizer.json
    #[arg(long)]
    model: PathBuf,
    /// Text to continue
    #[arg(
        long,
        required_unless_present = "prompt_ids",
        conflicts_with = "prompt_ids"
    )]
    prompt: Option<String>,
    /// Token ids to continue, separated by commas
    #[arg(long, value_delimiter = ',')]
    prompt_ids: Option<Vec<i64>>,
    /// Print the new token ids, separated by commas, instead of text
    #[arg(long)]
    print_ids: bool,
    /// Stop after so many tokens
    #[arg(long, default_value_t = 128)]
    max_new_tokens: usize,
    /// 0 takes the likeliest token; higher is more varied
    #[arg(long)]
    temperature: Option<f64>,
    /// Sample among the fewest tokens with this probability together
    #[arg(long)]
    top_p: Option<f64>,
    /// Sample among so many of the likeliest tokens; 0 is all
    #[arg(long)]
    top_k: Option<usize>,
    /// The same seed gives the same text
    #[arg(long)]
    seed: Option<u64>,
}

impl Flags {
    fn generation(&self) -> Result<GenerationConfig> {
        let folder = GenerationConfig::from_dir(&self.model)?;
        let sampling = self.temperature.is_some() || self.top_p.is_some() || self.top_k.is_some();
        Ok(GenerationConfig {
            max_new_tokens: Some(self.max_new_tokens),
            do_sample: folder.do_sample || sampling, // temperature 0 is greedy all the same
            temperature: self.temperature.unwrap_or(folder.temperature),
            top_p: self.top_p.unwrap_or(folder.top_p),
            top_k: self.top_k.unwrap_or(folder.top_k),
            seed: self.seed.or(folder.seed),
            ..folder
        })
    }
}

fn main() -> ExitCode {
    overdrive_examples::exit(run(&Flags::parse()))
}

fn run(flags: &Flags) -> Result<()> {
    let config = flags.generation()?;
    config.validate()?;
    let device = Device::cuda_if_available();
    let model = CausalLm::from_pretrained(&flags.model, &LoadOptions { device, ..LoadOptions::default() })?;
    let text = flags.prompt.as_deref().unwrap_or_default();
    let prompt = match &flags.prompt_ids {
        Some(ids) => ids.clone(),
        None => encode(flags, text)?,
    };

    let output = if flags.print_ids {
        generate(&model, &[prompt], &config)?
    } else {
        say(text)?;
        let tokenizer = load_tokenizer(flags)?;
        generate_text(&model, &tokenizer, &prompt, &config, |piece| {
            say(piece).map_or(ControlFlow::Break(()), ControlFlow::Continue) // until the pipe closes
        })?
    };
    if flags.print_ids {
        let ids: Vec<String> = output.new_tokens(0).iter().map(i64::to_string).collect();
        say(&ids.join(","))?;
    }
    say("\n")?;
    eprintln!("{}", output.timings);
    Ok(())
}

/// Writes to stdout at once, for a reader who watches.
fn say(text: &str) -> std::io::Result<()> {
    stdout().write_all(text.as_bytes())?;
    stdout().flush()
}

fn encode(flags: &Flags, text: &str) -> Result<Vec<i64>> {
    let encoding = load_tokenizer(flags)?
        .encode(text, true)
        .map_err(|error| anyhow!(error))?;
    Ok(encoding.get_ids().iter().map(|&id| i64::from(id)).collect())
}

fn load_tokenizer(flags: &Flags) -> Result<Tokenizer> {
    let path = flags.model.join("tokenizer.json");
    let hint = "without a tokenizer use --prompt-ids and --print-ids";
    Tokenizer::from_file(&path).map_err(|error| anyhow!("{}: {error}; {hint}", path.display()))
}
