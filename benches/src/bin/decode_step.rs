//! The tokens per second of decoding one sequence greedily, with and without
//! [`Execution::fused_decoding`](overdrive::transformer::Execution), in turn in one process: the median of each, and
//! the median of the ratios of neighbouring rounds; and how often a second the weights could be read from memory, which
//! bounds it where they do not fit the caches. (An embedding that is not the head counts, though a step reads one row.)
//!
//! `cargo run --release -p overdrive-benches --bin decode_step [-- --gguf FILE]`
//!
//! With `--text FILE` the tokens before the first step are those of a text: `--gguf FILE --text FILE --past 1024` measures
//! what a user has, a trained model over a long prompt, and the speed of reading it. In random weights and tokens hardly a key
//! is ignored, so that a processor meets none of the subnormal numbers that slow it down.

use std::path::PathBuf;
use std::time::Instant;

use clap::Parser;
use overdrive::generation::{GenerationConfig, ModelFiles, Sampler};
use overdrive::kv_cache::DynamicCache;
use overdrive::quantization::{GroupOptions, Scheme};
use overdrive::sys::denormals::set_flush_denormals;
use overdrive::transformer::{
    CausalLm, Execution, ForwardInput, InitOptions, LlamaConfig, LoadOptions, Logits,
    QuantizeOptions,
};
use overdrive_benches::{median, read_bandwidth};
use tch::Tensor;

/// Times decoding steps
#[derive(Parser)]
struct Flags {
    /// A GGUF file [default: random weights in the shape of SmolLM2-135M, in groups of 32 like `Q4_1` with a head
    /// like `Q8_0`]
    #[arg(long)]
    gguf: Option<PathBuf>,
    /// Number of tokens before the first step
    #[arg(long, default_value_t = 32)]
    past: i64,
    /// Text whose tokens come before the first step [default: made-up tokens]
    #[arg(long, requires = "gguf")]
    text: Option<PathBuf>,
    /// Let libtorch's operators compute with subnormal numbers
    #[arg(long)]
    keep_denormals: bool,
    /// Number of steps of a round
    #[arg(long, default_value_t = 32)]
    steps: i64,
    /// Number of rounds of each kind
    #[arg(long, default_value_t = 21)]
    rounds: usize,
}

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

fn main() -> Result<()> {
    let flags = Flags::parse();
    set_flush_denormals(!flags.keep_denormals);
    let _no_grad = tch::no_grad_guard();
    let prompt = prompt(&flags)?;
    let mut model = match &flags.gguf {
        Some(file) => CausalLm::from_gguf(file, &LoadOptions::default())?,
        None => random()?,
    };
    let mut speeds = [Vec::new(), Vec::new()];
    let mut tokens = [Vec::new(), Vec::new()];
    let mut prefills = Vec::new();
    // The first round of each kind makes the buffers.
    for _ in 0..=flags.rounds {
        for (kind, fused) in [false, true].into_iter().enumerate() {
            let mut execution = Execution::default();
            execution.fused_decoding = fused;
            model.set_execution(execution);
            let (prefill, speed, generated) = round(&model, &prompt, flags.steps)?;
            prefills.push(prefill);
            speeds[kind].push(speed);
            tokens[kind] = generated;
        }
    }
    let ratios = speeds[0].iter().zip(&speeds[1]).map(|(a, b)| b / a);
    let ratio = median(ratios.skip(1).collect());
    let [separate, fused] = speeds.map(|speeds| median(speeds[1..].to_vec()));
    println!(
        "prefill            {:6.1} tokens/s, {} tokens",
        median(prefills[2..].to_vec()),
        prompt.len()
    );
    println!("separate operators {separate:6.1} tokens/s");
    println!("fused decoding     {fused:6.1} tokens/s, {ratio:.2} times");
    println!("same tokens        {}", tokens[0] == tokens[1]);
    let (bytes, rate) = (model.memory_footprint() as f64, read_bandwidth());
    println!(
        "weights            {:6.1} MB, which {} threads read {:.1} times a second ({:.1} GB/s): fused decoding is at {:.0}%",
        bytes / 1e6,
        tch::get_num_threads(),
        rate / bytes,
        rate / 1e9,
        100.0 * fused * bytes / rate
    );
    Ok(())
}

/// Returns the tokens before the first step.
fn prompt(flags: &Flags) -> Result<Vec<i64>> {
    let (Some(gguf), Some(text)) = (&flags.gguf, &flags.text) else {
        return Ok((0..flags.past).map(|at| 100 + at * 37 % 1000).collect());
    };
    let tokenizer = ModelFiles::open(gguf)?.tokenizer()?;
    let ids = tokenizer.encode(std::fs::read_to_string(text)?, false)?;
    let count = usize::try_from(flags.past)?;
    let ids = ids.get_ids().iter().take(count);
    let ids: Vec<i64> = ids.map(|&id| id.into()).collect();
    if ids.len() < count {
        return Err(format!("the text has {} tokens, --past is {count}", ids.len()).into());
    }
    Ok(ids)
}

/// Returns the tokens per second of the prompt and of the steps of one round, and the tokens.
fn round(model: &CausalLm, prompt: &[i64], steps: i64) -> Result<(f64, f64, Vec<i64>)> {
    let past = prompt.len() as i64;
    let mut cache = DynamicCache::with_capacity(model.num_layers(), past + steps);
    let mut next = Tensor::f_from_slice(prompt)?.f_view([1, -1])?;
    let mut tokens = Vec::new();
    let mut sampler = Sampler::new(&GenerationConfig::default(), 0, 0)?;
    let mut begin = Instant::now();
    let mut prefill = 0.0;
    for step in 0..=steps {
        let input = ForwardInput::new(&next).with_cache(&mut cache);
        let logits = model.forward(input.with_logits(Logits::Last))?;
        let mut logits = Vec::<f32>::try_from(logits.f_view([-1])?)?;
        let token = sampler.next_token(&mut logits, &tokens, tokens.len())?;
        next = Tensor::f_from_slice(&[token])?.f_view([1, -1])?;
        tokens.push(token);
        if step == 0 {
            prefill = past as f64 / begin.elapsed().as_secs_f64();
            begin = Instant::now();
        }
    }
    let decode = steps as f64 / begin.elapsed().as_secs_f64();
    Ok((prefill, decode, tokens))
}

fn random() -> Result<CausalLm> {
    let config = LlamaConfig {
        vocab_size: 49_152,
        hidden_size: 576,
        intermediate_size: 1536,
        num_hidden_layers: 30,
        num_attention_heads: 9,
        num_key_value_heads: Some(3),
        max_position_embeddings: 8192,
        rope_theta: 1e5,
        tie_word_embeddings: true,
        ..LlamaConfig::default()
    };
    let mut model = CausalLm::new(&config.into(), &InitOptions::default())?;
    let groups = |bits, symmetric| {
        Scheme::Grouped(GroupOptions {
            bits,
            group_size: 32,
            symmetric,
        })
    };
    model.quantize(&QuantizeOptions::new(groups(4, false)).with_head(groups(8, true)))?;
    Ok(model)
}
