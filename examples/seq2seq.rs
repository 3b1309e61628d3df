//! Trains an encoder-decoder model on pairs of a source and a target, and reports how many held-out targets it writes
//! exactly. Without `--data` and `--model`, a small T5 from scratch learns to reverse words; that takes seconds.
//!
//! ```text
//! cargo xtask example seq2seq --out runs/reverse
//! cargo xtask example seq2seq --model flan-t5-small --data pairs.jsonl --out runs/mine --learning-rate 1e-4
//! cargo xtask example generate --model runs/reverse --prompt abcde
//! ```

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use overdrive::core::OutputFolder;
use overdrive::datasets::{
    DataLoaderOptions, DeviceLoader, Seq2SeqExample, copy_tokenizer, load_tokenizer, save_tokenizer,
};
use overdrive::optim::{
    AdamW, AdamWConfig, ClipOptions, LrScheduler, LrSchedulerType, Optimizer, ParamGroup, Schedule,
    ScheduleLength, clip_grad_norm,
};
use overdrive::sys::denormals::set_flush_denormals;
use overdrive::transformer::{InitOptions, LoadOptions, SaveOptions, Seq2SeqLm};
use overdrive_examples::pairs::{
    END, exact_matches, letters, load_pairs, read_pairs, small_config, words_to_reverse,
};
use overdrive_examples::print_line;
use tch::Device;

/// Trains an encoder-decoder model (T5, BART) on pairs of a source and a target
#[derive(Debug, Parser)]
pub(crate) struct Flags {
    /// Folder that the trained model is written to
    #[arg(long)]
    pub(crate) out: PathBuf,
    /// Folder of a T5 or BART to start from, with its tokenizer [default: a small T5 from scratch]
    #[arg(long, requires = "data")]
    pub(crate) model: Option<PathBuf>,
    /// File of pairs: JSON Lines or CSV with `source` and `target` [default: words to reverse]
    #[arg(long, requires = "model")]
    pub(crate) data: Option<PathBuf>,
    /// Number of optimizer steps
    #[arg(long, default_value_t = 500)]
    pub(crate) steps: usize,
    /// Number of pairs in a batch
    #[arg(long, default_value_t = 32)]
    pub(crate) batch_size: usize,
    /// Learning rate, which falls linearly to 0
    #[arg(long, default_value_t = 2e-3)]
    pub(crate) learning_rate: f64,
    /// Number of pairs that are held out
    #[arg(long, default_value_t = 200)]
    pub(crate) held_out: usize,
    /// Seed of the weights, the words and their order
    #[arg(long, default_value_t = 42)]
    pub(crate) seed: u64,
}

#[allow(dead_code, reason = "a test runs the rest in its own process")]
fn main() -> ExitCode {
    overdrive_examples::exit(|| run(&Flags::parse()).map(drop))
}

/// Trains, saves, and returns the share of held-out targets that the model writes exactly.
pub(crate) fn run(flags: &Flags) -> Result<f64> {
    // Subnormal numbers are zero to libtorch's operators too: each takes Intel's processors a hundred cycles.
    set_flush_denormals(true);
    let inputs: Vec<_> = flags
        .model
        .iter()
        .map(|model| ("--model", model.as_path()))
        .collect();
    let output = OutputFolder::check("seq2seq", "--out", &flags.out, &inputs)?;
    let device = Device::cuda_if_available();
    let (mut model, tokenizer) = match &flags.model {
        Some(folder) => {
            let options = LoadOptions {
                device,
                ..LoadOptions::default()
            };
            (
                Seq2SeqLm::from_pretrained(folder, &options)?,
                load_tokenizer(folder)?,
            )
        }
        None => {
            let options = InitOptions {
                device,
                seed: flags.seed,
                ..InitOptions::default()
            };
            (Seq2SeqLm::new(&small_config(), &options)?, letters()?)
        }
    };
    let pairs = match &flags.data {
        Some(path) => read_pairs(path)?,
        None => words_to_reverse(flags.seed, 4000),
    };
    ensure!(
        flags.held_out > 0 && pairs.len() >= flags.held_out + flags.batch_size,
        "{} pairs are too few for --held-out {} and --batch-size {}",
        pairs.len(),
        flags.held_out,
        flags.batch_size
    );
    let examples: Vec<_> = pairs
        .iter()
        .map(|pair| pair.encode(&tokenizer))
        .collect::<Result<_>>()?;
    let (trained, held_out) = examples.split_at(examples.len() - flags.held_out);
    train(&mut model, trained, flags, device)?;
    let exact = exact_matches(&model, held_out)? as f64 / held_out.len() as f64;
    print_line(format_args!(
        "{:.1}% of {} held-out targets are exact",
        100.0 * exact,
        held_out.len()
    ));
    output.create()?;
    model.save_pretrained(&flags.out, &SaveOptions::default())?;
    match &flags.model {
        Some(folder) => drop(copy_tokenizer(folder, &flags.out)?),
        None => save_tokenizer(&flags.out, &tokenizer, Some(END), 512)?,
    }
    Ok(exact)
}

fn train(
    model: &mut Seq2SeqLm,
    examples: &[Seq2SeqExample],
    flags: &Flags,
    device: Device,
) -> Result<()> {
    let options = DataLoaderOptions {
        batch_size: flags.batch_size,
        shuffle: true,
        seed: flags.seed,
        num_workers: 0,
        ..DataLoaderOptions::default()
    };
    let pad = model
        .config()
        .pad_token_id()
        .context("the model has no pad_token_id")?;
    let loader = load_pairs(examples, pad, options)?;
    model.set_requires_grad(true)?;
    model.set_training(true)?;
    tch::manual_seed(flags.seed.cast_signed()); // of dropout
    let parameters = model.named_parameters();
    let tensors: Vec<_> = parameters
        .iter()
        .map(|(_, tensor)| tensor.shallow_clone())
        .collect();
    let rate = flags.learning_rate;
    let config = AdamWConfig {
        learning_rate: rate,
        weight_decay: 0.0,
        ..AdamWConfig::default()
    };
    let mut optimizer = AdamW::new(vec![ParamGroup::new("all", parameters)], config)?;
    let length = ScheduleLength {
        warmup_steps: 0,
        total_steps: flags.steps as u64,
    };
    let linear = Schedule::new(LrSchedulerType::Linear, length, rate, &Default::default())?;
    let mut scheduler = LrScheduler::new(linear, &mut optimizer)?;
    for (step, batch) in DeviceLoader::new(loader, device)
        .endless()
        .take(flags.steps)
        .enumerate()
    {
        let batch = batch?;
        batch.check_ids(model.config().vocab_size())?;
        let loss = model.loss(
            &batch.input_ids,
            batch.attention_mask.as_ref(),
            &batch.labels,
        )?;
        let loss = loss.mean()?;
        loss.f_backward()?;
        let _norm = clip_grad_norm(&tensors, 1.0, ClipOptions::default())?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        scheduler.step(&mut optimizer)?;
        if (step + 1) % 100 == 0 {
            print_line(format_args!(
                "step {}  loss {:.4}",
                step + 1,
                loss.f_double_value(&[])?
            ));
        }
    }
    Ok(model.set_training(false)?)
}
