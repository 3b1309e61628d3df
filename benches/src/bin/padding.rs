//! The fraction of padding in a batch, and the resulting real tokens per second: records in a random order,
//! grouped by length, by a budget of tokens, and packed.
//!
//! ```text
//! cargo run --release -p overdrive-benches --bin padding -- [FILE…]
//! ```
//!
//! Without files the records are the documentation comments of the Rust source code in Cargo's registry:
//! natural text of natural lengths, which is on every machine that has built this workspace. A model computes
//! every position of a batch, including padding, so at the same speed per position the real tokens per second
//! are proportional to the fraction without padding. `batches/s` is the speed of the samplers and the collation
//! alone, on one core.

use std::hint::black_box;
use std::time::Instant;

use overdrive::datasets::{
    BatchSampler, BpeOptions, Corpus, CorpusOptions, Dataset, LengthGroupedBatches, PackPlan,
    PackingStrategy, RandomSampler, RowLayout, SampleBy, SampledBatches, Shard, TextDataset,
    TextDatasetOptions, TextOptions, TokenBudgetBatches, TokenBudgetOptions, TokenizedExample,
    collate, train_bpe,
};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

const MAX_LENGTH: usize = 1024;
const BATCH: usize = 16;

fn main() -> Outcome<()> {
    let dir = tempfile::tempdir()?;
    let mut files: Vec<_> = std::env::args_os()
        .skip(1)
        .map(std::path::PathBuf::from)
        .collect();
    if files.is_empty() {
        let path = dir.path().join("comments.txt");
        write_comments(&path)?;
        files.push(path);
    }
    let corpus = Corpus::from_paths(&files, &CorpusOptions::default())?;
    let bpe = BpeOptions {
        vocab_size: 4096,
        ..BpeOptions::default()
    };
    let tokenizer = train_bpe(corpus.sample(16 << 20), &bpe)?.tokenizer;
    let text = TextOptions {
        sample_by: SampleBy::Paragraph,
        ..TextOptions::default()
    };
    let options = TextDatasetOptions {
        max_length: Some(MAX_LENGTH),
        ..TextDatasetOptions::default()
    };
    let texts = TextDataset::open(&files, &text, tokenizer, options)?;
    let started = Instant::now();
    let lengths = texts.lengths()?;
    let tokens: u64 = lengths.iter().map(|&length| u64::from(length)).sum();
    println!(
        "{} records, {tokens} tokens ({:.2} M tokens/s tokenized on all cores), {:.0} a record on average, the longest {}",
        lengths.len(),
        tokens as f64 / 1e6 / started.elapsed().as_secs_f64(),
        tokens as f64 / lengths.len() as f64,
        lengths.iter().max().unwrap_or(&0),
    );
    println!(
        "{:<44} {:>8} {:>9} {:>14} {:>11}",
        "", "batches", "padding", "tokens per position", "batches/s"
    );

    let random = RandomSampler::new(lengths.len(), 1);
    let random = SampledBatches::new(random, BATCH, false, Shard::default())?;
    let grouped = LengthGroupedBatches::new(lengths.clone(), BATCH, false, 1)?;
    let budget = TokenBudgetOptions {
        max_tokens: BATCH * MAX_LENGTH / 4,
        ..TokenBudgetOptions::default()
    };
    let budget = TokenBudgetBatches::new(lengths.clone(), budget)?;
    let before = measure(
        "random order, 16 records a batch",
        &random,
        &texts,
        &lengths,
        None,
    )?;
    measure(
        "grouped by length, 16 records a batch",
        &grouped,
        &texts,
        &lengths,
        Some(before),
    )?;
    measure(
        "a budget of 4096 tokens a batch",
        &budget,
        &texts,
        &lengths,
        Some(before),
    )?;
    for strategy in PackingStrategy::ALL {
        let started = Instant::now();
        let plan = PackPlan::new(&lengths, MAX_LENGTH, strategy)?;
        let seconds = started.elapsed().as_secs_f64();
        println!(
            "{:<44} {:>8} {:>8.2}% {:>13.2}x   planned in {:.0} ms",
            format!("packed into rows of {MAX_LENGTH}, {strategy}"),
            plan.len().div_ceil(BATCH),
            100.0 * (1.0 - plan.fill()),
            plan.fill() / before,
            seconds * 1e3,
        );
    }
    Ok(())
}

/// Prints the results of an epoch of batches; returns the fraction of it that is not padding.
fn measure(
    name: &str,
    batches: &impl BatchSampler,
    texts: &TextDataset,
    lengths: &[u32],
    before: Option<f64>,
) -> Outcome<f64> {
    let (mut real, mut places) = (0_u64, 0_u64);
    for number in 0..batches.len(0) {
        let batch = batches.batch(0, number);
        let lengths = || batch.iter().map(|&record| u64::from(lengths[record]));
        real += lengths().sum::<u64>();
        places += lengths().max().unwrap_or(0) * batch.len() as u64;
    }
    let share = real as f64 / places as f64;
    // The time of making batches, including tokenization, for as many as take a second.
    let started = Instant::now();
    let mut made = 0;
    while made < batches.len(0) && started.elapsed().as_secs_f64() < 1.0 {
        let rows: Result<Vec<_>, _> = batches
            .batch(0, made)
            .iter()
            .map(|&record| texts.get(record).map(TokenizedExample::from))
            .collect();
        black_box(collate(&rows?, RowLayout::default())?);
        made += 1;
    }
    println!(
        "{name:<44} {:>8} {:>8.2}% {:>13.2}x {:>11.0}",
        batches.len(0),
        100.0 * (1.0 - share),
        share / before.unwrap_or(share),
        made as f64 / started.elapsed().as_secs_f64(),
    );
    Ok(share)
}

/// Returns the documentation comments of the registry's Rust files, one paragraph each.
fn write_comments(path: &std::path::Path) -> Outcome<()> {
    let corpus = Corpus::cargo_registry(64 << 20)?;
    let mut out = String::new();
    for file in corpus.files() {
        let Ok(text) = std::fs::read_to_string(&file.path) else {
            continue;
        };
        let mut in_comment = false;
        for line in text.lines().map(str::trim_start) {
            match line
                .strip_prefix("/// ")
                .or_else(|| line.strip_prefix("//! "))
            {
                Some(comment) if !comment.trim().is_empty() => {
                    out.push_str(comment);
                    out.push('\n');
                    in_comment = true;
                }
                // An empty comment line continues the same item.
                _ if matches!(line, "///" | "//!") => {}
                _ => {
                    if in_comment {
                        out.push('\n');
                    }
                    in_comment = false;
                }
            }
        }
    }
    Ok(std::fs::write(path, out)?)
}
