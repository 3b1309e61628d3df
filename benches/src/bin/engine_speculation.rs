//! The tokens per second of the engine with and without prompt lookup, for 1, 4 and 8 requests at once, in turn in one
//! process: the median of the ratios of neighbouring rounds, and the share of the proposed tokens that was accepted.
//!
//! `cargo run --release -p overdrive-benches --bin engine_speculation -- --gguf SmolLM2-135M-Instruct.Q4_1.gguf`
//!
//! Two kinds of requests: `repeat`, whose answers repeat a text of the prompt, and `open`, whose answers do not. Answers
//! are compared: with a model that is batch-invariant they have the same tokens.

use std::path::PathBuf;
use std::time::Instant;

use clap::Parser;
use overdrive::generation::{
    Engine, EngineConfig, GenerationConfig, ModelFiles, Request, Tokenizer,
};
use overdrive::sys::denormals::set_flush_denormals;
use overdrive::transformer::{CausalLm, LoadOptions};

/// Times prompt lookup in the engine
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
    println!("kind    streams  proposed  accepted  tokens/s  ratio to none");
    for (kind, questions) in [
        (
            "repeat",
            TEXTS.map(|text| format!("Repeat this text word for word, and add nothing: {text}")),
        ),
        ("open", QUESTIONS.map(str::to_owned)),
    ] {
        let prompts = questions.iter().map(|text| prompt(&tokenizer, text));
        let prompts = prompts.collect::<Result<Vec<_>>>()?;
        for &streams in &flags.streams {
            for &lookup in &flags.lookup {
                let prompts: Vec<_> = prompts.iter().cycle().take(streams).cloned().collect();
                compare(&model, &prompts, (kind, lookup), &flags)?;
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
    (kind, lookup): (&str, usize),
    flags: &Flags,
) -> Result<()> {
    let (mut ratios, mut speeds, mut accepted) = (Vec::new(), Vec::new(), 0.0);
    // The first round of each kind makes the buffers.
    for round in 0..=flags.rounds {
        let (none, without, _) = run(model, prompts, None, flags.tokens)?;
        let (speed, with, share) = run(model, prompts, Some(lookup), flags.tokens)?;
        if with != without {
            return Err("the answers with and without proposals differ".into());
        }
        if round > 0 {
            ratios.push(speed / none);
            speeds.push(speed);
            accepted = share;
        }
    }
    println!(
        "{kind:<8}{:>7}{lookup:>10}{:>9.0}%{:>10.1}{:>10.2}",
        prompts.len(),
        100.0 * accepted,
        median(speeds),
        median(ratios),
    );
    Ok(())
}

/// Returns the tokens per second of decoding, the answers, and the share of proposed tokens that was accepted.
fn run(
    model: &CausalLm,
    prompts: &[Vec<i64>],
    lookup: Option<usize>,
    tokens: usize,
) -> Result<(f64, Vec<Vec<i64>>, f64)> {
    let mut config = EngineConfig::default();
    config.max_model_len = Some(1024);
    let mut engine = Engine::new(model, config)?;
    for prompt in prompts {
        let config = GenerationConfig {
            max_new_tokens: Some(tokens),
            // No end of a text, so that all answers have the same length.
            prompt_lookup_num_tokens: lookup,
            ..GenerationConfig::default()
        };
        engine.submit(Request::new(prompt.clone(), config))?;
    }
    // The prompts are read in a step or two.
    let mut generated = 0;
    while engine.statistics().generated_tokens == 0 {
        generated += engine.step()?.len();
    }
    let begin = Instant::now();
    let outcomes = engine.run_to_end()?;
    let seconds = begin.elapsed().as_secs_f64();
    let answers = outcomes
        .into_iter()
        .map(|(_, outcome)| Ok(outcome?.remove(0).tokens));
    let answers = answers.collect::<Result<Vec<_>>>()?;
    let statistics = engine.statistics();
    let decoded = statistics.generated_tokens as f64 - generated as f64;
    let share = statistics.accepted_tokens as f64 / statistics.proposed_tokens.max(1) as f64;
    Ok((decoded / seconds, answers, share))
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied().unwrap_or(0.0)
}
