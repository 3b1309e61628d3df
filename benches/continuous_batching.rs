//! Claim: on a trace of requests with mixed lengths, continuous batching generates at least twice as many
//! tokens per second as static batches.
//!
//! There are three ways to answer the same requests, at most `--seats` of them at a time, greedily, with the
//! 100M-parameter Llama of the other claims. `static` processes the requests in fixed batches: prompts are
//! padded on the left to the longest, and every row runs until the longest continuation of its batch has
//! ended, as in a loop over transformers' `generate`. `generate` is this workspace's `generate` on the same
//! batches: finished rows leave once half of the batch has finished. `continuous` is the engine, in which a
//! request joins as soon as another one ends.
//!
//! The lengths are distributed as in real conversations, most short and a few long: log-normal, with a mean of
//! the logarithm of 4 (prompt) and 4.2 (continuation) and a deviation of 0.8 and 1.1, clipped to 4..=256 and
//! 4..=512.
//!
//! Analysis: a step reads all weights once, however many rows it has, so the number of useful rows decides.
//! In a static batch their fraction is the mean length over the longest, for prompt and continuation; the line
//! `useful` prints it. The rest of the ratio is that each sequence of the engine attends to its own length and
//! not to the longest. `outside` is the time of an engine step outside the model: scheduling, block tables,
//! sampling, events.
//!
//! `cargo bench -p overdrive-benches --bench continuous_batching`; `--requests`, `--seats` and `--rounds`
//! after `--`.

use std::cell::Cell;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use clap::Parser;
use overdrive::core::random::Generator;
use overdrive::generation::{
    CacheShape, Engine, EngineConfig, EngineModel, GenerationConfig, RaggedStep, Request,
    generate_with,
};
use overdrive::kv_cache::{DynamicCache, KvCache};
use overdrive::transformer::{CausalLm, ForwardInput, Logits};
use overdrive_benches::{StepResult, generation};
use tch::{Kind, Tensor};

/// Times a trace of requests in static batches and in the engine
#[derive(Parser)]
struct Flags {
    /// Number of requests in the trace
    #[arg(long, default_value_t = 48)]
    requests: usize,
    /// Number of rows in a static batch, and of sequences in the engine
    #[arg(long, default_value_t = 8)]
    seats: usize,
    /// Number of runs, of which the fastest counts
    #[arg(long, default_value_t = 2)]
    rounds: usize,
    /// The flag that cargo passes to every benchmark
    #[arg(long, hide = true)]
    bench: bool,
}

/// A request: its prompt and the number of tokens to generate.
struct Wanted {
    prompt: Vec<i64>,
    new: usize,
}

/// Returns a log-normal length, clipped to 4..=`most`.
fn length(random: &mut Generator, mean: f64, deviation: f64, most: f64) -> usize {
    (mean + deviation * random.normal()).exp().clamp(4.0, most) as usize
}

fn trace(requests: usize, vocabulary: i64) -> Vec<Wanted> {
    let mut random = Generator::new(5, 0);
    (0..requests)
        .map(|_| {
            let (prompt, new) = (
                length(&mut random, 4.0, 0.8, 256.0),
                length(&mut random, 4.2, 1.1, 512.0),
            );
            let mut id = || random.below(vocabulary as u64) as i64;
            Wanted {
                prompt: (0..prompt).map(|_| id()).collect(),
                new,
            }
        })
        .collect()
}

fn greedy(new: usize) -> GenerationConfig {
    GenerationConfig {
        max_new_tokens: Some(new),
        ..GenerationConfig::default()
    }
}

fn longest<T>(of: &[T], length: impl Fn(&T) -> usize) -> usize {
    of.iter().map(length).max().unwrap_or(0)
}

/// Runs one padded batch, each row until the longest has ended.
fn static_batch(model: &CausalLm, batch: &[Wanted]) -> StepResult<()> {
    let (width, steps) = (
        longest(batch, |w| w.prompt.len()),
        longest(batch, |w| w.new),
    );
    let (mut ids, mut mask) = (Vec::new(), Vec::new());
    for wanted in batch {
        let padding = width - wanted.prompt.len();
        ids.extend(std::iter::repeat_n(0, padding).chain(wanted.prompt.iter().copied()));
        mask.extend((0..width).map(|place| i64::from(place >= padding)));
    }
    let shape = [batch.len() as i64, width as i64];
    let mut ids = Tensor::f_from_slice(&ids)?.f_view(shape)?;
    let mut mask = Tensor::f_from_slice(&mask)?.f_view(shape)?;
    let mut positions = (mask.f_cumsum(1, Kind::Int64)? - 1).f_clamp_min(0)?;
    let mut cache = DynamicCache::with_capacity(model.num_layers(), (width + steps) as i64);
    for _ in 0..steps {
        let input = ForwardInput::new(&ids)
            .with_attention_mask(&mask)
            .with_position_ids(&positions)
            .with_logits(Logits::Last)
            .with_cache(&mut cache as &mut dyn KvCache);
        ids = model.forward(input)?.f_argmax(-1, false)?;
        let last = positions.size()[1] - 1;
        positions = positions.f_narrow(1, last, 1)? + 1;
        mask = Tensor::f_cat(&[mask, ids.f_ones_like()?], 1)?;
    }
    Ok(())
}

/// Runs the same batch with `generate`, in which each row ends at its own length.
fn generate_batch(model: &CausalLm, batch: &[Wanted]) -> StepResult<()> {
    let prompts: Vec<_> = batch.iter().map(|wanted| wanted.prompt.clone()).collect();
    let mut left: Vec<usize> = batch.iter().map(|wanted| wanted.new).collect();
    let config = greedy(longest(batch, |wanted| wanted.new));
    generate_with(model, &prompts, &config, |token| {
        left[token.row] -= 1;
        match left[token.row] {
            0 => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        }
    })?;
    Ok(())
}

/// A model that measures its time.
struct Timed<'m> {
    model: &'m CausalLm,
    inside: Cell<Duration>,
}

impl EngineModel for Timed<'_> {
    fn cache_shape(&self) -> overdrive::generation::Result<CacheShape> {
        Ok(self.model.cache_shape())
    }

    fn vocab_size(&self) -> usize {
        EngineModel::vocab_size(self.model)
    }

    fn context(&self) -> usize {
        self.model.context()
    }

    fn forward(&self, step: RaggedStep<'_, '_>) -> overdrive::generation::Result<Tensor> {
        let start = Instant::now();
        let logits = EngineModel::forward(self.model, step);
        self.inside.set(self.inside.get() + start.elapsed());
        logits
    }
}

/// Runs all requests in the engine; returns the time of a step outside the model, and the number of steps.
fn continuous(model: &CausalLm, trace: &[Wanted], seats: usize) -> StepResult<(Duration, u64)> {
    let timed = Timed {
        model,
        inside: Cell::default(),
    };
    let mut config = EngineConfig {
        max_num_seqs: seats,
        ..EngineConfig::default()
    };
    // The prompts share nothing, so the prefix cache is off.
    config.enable_prefix_caching = false;
    let mut engine = Engine::new(&timed, config)?;
    for wanted in trace {
        engine.submit(Request::new(wanted.prompt.clone(), greedy(wanted.new)))?;
    }
    for (_, completions) in engine.run_to_end()? {
        completions?;
    }
    let statistics = engine.statistics();
    let outside = statistics.busy.saturating_sub(timed.inside.get());
    let steps = u32::try_from(statistics.steps)?;
    Ok((outside / steps.max(1), statistics.steps))
}

fn main() -> StepResult<()> {
    let flags = Flags::parse();
    let model = generation::model(Kind::Float)?;
    let trace = trace(flags.requests, model.config().vocab_size());
    let tokens: usize = trace.iter().map(|wanted| wanted.new).sum();
    let prompts: usize = trace.iter().map(|wanted| wanted.prompt.len()).sum();
    let computed: usize = trace
        .chunks(flags.seats)
        .map(|batch| batch.len() * longest(batch, |wanted| wanted.new))
        .sum();
    println!(
        "{} requests, {prompts} prompt tokens, {tokens} new ones, {} at once; {} threads",
        trace.len(),
        flags.seats,
        tch::get_num_threads(),
    );
    println!(
        "useful: {:.0} % of the rows of a static batch",
        100.0 * tokens as f64 / computed as f64
    );
    let _no_grad = tch::no_grad_guard();
    let mut best = [f64::INFINITY; 3];
    let mut outside = (Duration::ZERO, 0);
    for _ in 0..flags.rounds.max(1) {
        let mut time = |place: usize, run: &mut dyn FnMut() -> StepResult<()>| {
            let start = Instant::now();
            run()?;
            best[place] = best[place].min(start.elapsed().as_secs_f64());
            StepResult::Ok(())
        };
        let batches = |run: fn(&CausalLm, &[Wanted]) -> StepResult<()>| {
            trace
                .chunks(flags.seats)
                .try_for_each(|batch| run(&model, batch))
        };
        time(0, &mut || batches(static_batch))?;
        time(1, &mut || batches(generate_batch))?;
        time(2, &mut || {
            outside = continuous(&model, &trace, flags.seats)?;
            Ok(())
        })?;
    }
    for (name, seconds) in ["static", "generate", "continuous"].into_iter().zip(best) {
        let (speed, ratio) = (tokens as f64 / seconds, best[0] / seconds);
        println!("{name:<10} {seconds:6.1} s  {speed:6.1} tokens/s  {ratio:.2}x");
    }
    println!(
        "outside the model: {:.0?} of each of {} steps",
        outside.0, outside.1
    );
    Ok(())
}
