//! The tokens per second of the engine with prompt lookup or a cache of 8 bits beside the same without, for 1, 4 and 8
//! requests at once, in turn in one process: the median of the ratios of neighbouring rounds.
//!
//! `cargo run --release -p overdrive-benches --bin engine_options -- --gguf SmolLM2-135M-Instruct.Q4_1.gguf`
//!
//! Three kinds of requests: `repeat`, whose answers repeat a text of the prompt, `open`, whose answers do not, and `long`,
//! with prompts of 1,500 tokens. With prompt lookup, answers are compared: if the model is batch-invariant, they have the
//! same tokens as without.

use std::path::PathBuf;
use std::time::Instant;

use clap::Parser;
use overdrive::generation::{
    Engine, EngineConfig, GenerationConfig, ModelFiles, Request, Tokenizer,
};
use overdrive::kv_cache::KvCacheDtype;
use overdrive::sys::denormals::set_flush_denormals;
use overdrive::transformer::{CausalLm, LoadOptions};
use overdrive_benches::median;

/// Times prompt lookup and caches of 8 bits in the engine
#[derive(Parser)]
struct Flags {
    /// A GGUF file of a model that chats in the format of SmolLM2 (ChatML)
    #[arg(long)]
    gguf: PathBuf,
    /// Numbers of requests at once
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4, 8])]
    streams: Vec<usize>,
    /// Numbers of tokens to propose in a step
    #[arg(long, value_delimiter = ',', default_values_t = [2, 4, 8])]
    lookup: Vec<usize>,
    /// Number of tokens of each answer
    #[arg(long, default_value_t = 96)]
    tokens: usize,
    /// Number of rounds of each kind
    #[arg(long, default_value_t = 5)]
    rounds: usize,
}

/// An option that is compared with an engine without it.
#[derive(Debug, Clone, Copy)]
enum Variant {
    Lookup(usize),
    Cache(KvCacheDtype),
}

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const TEXTS: [&str; 8] = [
    "The harbour library opens at nine in the morning and closes at six in the evening. Books may be kept for four weeks.",
    "Water boils at one hundred degrees at sea level, and at lower temperatures in the mountains, where the air is thin.",
    "A compiler reads the source of a program, checks its types, and writes instructions that a processor can execute.",
    "The train to the coast leaves every hour from platform three, except on Sundays, when it leaves every two hours.",
    "Bread needs flour, water, salt and time. The dough rests for twelve hours in a cool place before it is baked.",
    "The old lighthouse was built of granite in 1852, and its lamp could be seen from a distance of twenty miles.",
    "A good test names what it expects, fails for one reason only, and does not depend on the time of the day.",
    "Bees visit thousands of flowers for one spoon of honey, and they tell each other where the best flowers are.",
];

const QUESTIONS: [&str; 8] = [
    "Why is the sky blue?",
    "How does a bicycle stay upright?",
    "What makes a good friend?",
    "Write a short poem about the sea.",
    "How do I learn to play the guitar?",
    "What happened to the dinosaurs?",
    "Give me three ideas for dinner.",
    "Explain how a magnet works.",
];

fn main() -> Result<()> {
    let flags = Flags::parse();
    set_flush_denormals(true);
    let model = CausalLm::from_gguf(&flags.gguf, &LoadOptions::default())?;
    let tokenizer = ModelFiles::open(&flags.gguf)?.tokenizer()?;
    println!("kind    streams          with  accepted  tokens/s  ratio to without");
    let lookups = flags.lookup.iter().map(|tokens| Variant::Lookup(*tokens));
    let lookups: Vec<_> = lookups.collect();
    let caches = [KvCacheDtype::Int8, KvCacheDtype::Fp8].map(Variant::Cache);
    // Some 1,500 tokens.
    let long = TEXTS.join(" ").repeat(7);
    let kinds = [
        (
            "repeat",
            TEXTS.map(|text| format!("Repeat this text word for word, and add nothing: {text}")),
            &lookups[..],
        ),
        ("open", QUESTIONS.map(str::to_owned), &lookups[..]),
        (
            "long",
            QUESTIONS.map(|text| format!("{long} {text}")),
            &caches[..],
        ),
    ];
    for (kind, questions, variants) in kinds {
        let prompts = questions.iter().map(|text| prompt(&tokenizer, text));
        let prompts = prompts.collect::<Result<Vec<_>>>()?;
        for &streams in &flags.streams {
            for variant in variants {
                let prompts: Vec<_> = prompts.iter().cycle().take(streams).cloned().collect();
                compare(&model, &prompts, (kind, *variant), &flags)?;
            }
        }
    }
    Ok(())
}

fn prompt(tokenizer: &Tokenizer, text: &str) -> Result<Vec<i64>> {
    let text = format!("<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n");
    let encoding = tokenizer.encode(text, false)?;
    Ok(encoding.get_ids().iter().map(|id| i64::from(*id)).collect())
}

/// Prints a line of the table.
fn compare(
    model: &CausalLm,
    prompts: &[Vec<i64>],
    (kind, variant): (&str, Variant),
    flags: &Flags,
) -> Result<()> {
    let (mut ratios, mut speeds, mut accepted) = (Vec::new(), Vec::new(), 0.0);
    // The first round of each kind makes the buffers.
    for round in 0..=flags.rounds {
        let (none, without, _) = run(model, prompts, None, flags.tokens)?;
        let (speed, with, share) = run(model, prompts, Some(variant), flags.tokens)?;
        if matches!(variant, Variant::Lookup(_)) && with != without {
            return Err("the answers with and without proposals differ".into());
        }
        if round > 0 {
            ratios.push(speed / none);
            speeds.push(speed);
            accepted = share;
        }
    }
    let (with, accepted) = match variant {
        Variant::Lookup(tokens) => (
            format!("{tokens} proposed"),
            format!("{:.0}%", 100.0 * accepted),
        ),
        Variant::Cache(dtype) => (format!("{dtype} cache"), "-".to_owned()),
    };
    println!(
        "{kind:<8}{:>7}{with:>14}{accepted:>10}{:>10.1}{:>10.2}",
        prompts.len(),
        median(speeds),
        median(ratios),
    );
    Ok(())
}

/// Returns the tokens per second of decoding, the answers, and the share of proposed tokens that was accepted.
fn run(
    model: &CausalLm,
    prompts: &[Vec<i64>],
    variant: Option<Variant>,
    tokens: usize,
) -> Result<(f64, Vec<Vec<i64>>, f64)> {
    let mut config = EngineConfig {
        max_model_len: Some(2048),
        ..EngineConfig::default()
    };
    let mut options = GenerationConfig {
        // No end of a text, so that all answers have the same length.
        max_new_tokens: Some(tokens),
        ..GenerationConfig::default()
    };
    match variant {
        None => {}
        Some(Variant::Lookup(tokens)) => options.prompt_lookup_num_tokens = Some(tokens),
        Some(Variant::Cache(dtype)) => config.kv_cache_dtype = dtype,
    }
    let mut engine = Engine::new(model, config)?;
    for prompt in prompts {
        engine.submit(Request::new(prompt.clone(), options.clone()))?;
    }
    // Until all prompts have been read.
    while engine.statistics().generated_tokens < prompts.len() as u64 {
        engine.step()?;
    }
    let before = engine.statistics().generated_tokens;
    let begin = Instant::now();
    let outcomes = engine.run_to_end()?;
    let seconds = begin.elapsed().as_secs_f64();
    let answers = outcomes
        .into_iter()
        .map(|(_, outcome)| Ok(outcome?.remove(0).tokens));
    let answers = answers.collect::<Result<Vec<_>>>()?;
    let statistics = engine.statistics();
    let decoded = (statistics.generated_tokens - before) as f64;
    let share = statistics.accepted_tokens as f64 / statistics.proposed_tokens.max(1) as f64;
    Ok((decoded / seconds, answers, share))
}
