use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use overdrive::generation::{Engine, EngineConfig, Event, GenerationConfig, Request, generate};
use overdrive::quantization::Scheme;
use overdrive::sys::memory;
use overdrive::transformer::{CausalLm, QuantizeOptions};
use overdrive_benches::{Shape, generation, random_model};
use overdrive_graphs::{CaptureOptions, DecodeGraph, DecodeStep, static_cache_of};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use crate::context::Context;
use crate::finding::Finding;
use crate::peer::{self, number};
use crate::timing::{kernels_by_time, kernels_set, other_kernels, synchronize};
use crate::training::of_step;

const PROMPT: usize = 128;

/// The weights; none is bf16 (f32 on a CPU).
const SCHEMES: [Option<&str>; 4] = [None, Some("int8-weight"), Some("nf4"), Some("int4-g128")];

pub(super) fn run(context: &mut Context) -> Result<()> {
    let device = context.device();
    let shape = super::train_step::shape(context)?;
    let mut config = shape.config();
    config.max_position_embeddings = 1024;
    config.eos_token_id = Vec::new();
    let kind = context.sized(Kind::BFloat16, Kind::Float);
    let new = context.sized(64, 4);
    // A call of `generate` captures its step, which takes as long as ten or twenty of them.
    let continued = context.sized(256, 12);
    let many = context.sized(64, 4);
    // The model of a gigabyte of weights is made once; quantized weights are made dense again for the next scheme.
    let model = of_step(random_model(&config.into(), device, kind))?;
    sharpen(&model)?;
    let mut weights = Weights {
        model,
        scheme: None,
    };
    let other = other_kernels(device)?;
    for scheme in SCHEMES {
        if let Some(scheme) = scheme {
            context.check(format!("quantize to {scheme}"), || {
                let model = weights.of(Some(scheme))?;
                let gib = model.memory_footprint() as f64 / f64::from(1 << 30);
                Ok(Finding::passed().with("weights GiB", gib))
            })?;
        }
        // What a program gets that sets nothing, and, for dense weights, the other side.
        let defaults: [(usize, usize, (&str, Work)); 6] = [
            (1, continued, ("generate", generated)),
            (many, continued, ("generate", generated)),
            (1, new, ("engine", served_greedily)),
            (many, new, ("engine", served_greedily)),
            (many, new, ("engine, sampled", served)),
            (many, new, ("engine, not captured", served_eagerly)),
        ];
        // Its cost does not depend on the weights.
        let count = if scheme.is_none() { 6 } else { 5 };
        for (streams, new, way) in defaults.into_iter().take(count) {
            measure(context, &mut weights, scheme, (streams, new), way, None)?;
        }
        if device != Device::Cpu {
            for streams in [1, many] {
                measure(
                    context,
                    &mut weights,
                    scheme,
                    (streams, new),
                    ("engine, its kernels", profiled),
                    None,
                )?;
            }
        }
        if scheme.is_none() {
            transformers(context, shape, [1, many], new)?;
        }
        for streams in [1, many] {
            let variants: &[(&str, Work)] = match device {
                Device::Cpu => &[("steps", plain)],
                _ => &[("steps", plain), ("graph", captured)],
            };
            for &variant in variants {
                measure(context, &mut weights, scheme, (streams, new), variant, None)?;
                if other.is_some() {
                    measure(
                        context,
                        &mut weights,
                        scheme,
                        (streams, new),
                        variant,
                        other,
                    )?;
                }
            }
        }
    }
    Ok(())
}

/// Measures one way of decoding.
fn measure(
    context: &mut Context,
    weights: &mut Weights,
    scheme: Option<&'static str>,
    (streams, new): (usize, usize),
    (what, work): (&str, Work),
    kernels: Option<(bool, &str)>,
) -> Result<()> {
    let name = scheme.unwrap_or("dense");
    let suffix = kernels.map_or_else(String::new, |(_, name)| format!(", {name}"));
    context.check(format!("{name}, {streams} streams, {what}{suffix}"), || {
        let model = weights.of(scheme)?;
        let _kernels = kernels_set(kernels.map(|(on, _)| on));
        work(model, streams, new)
    })
}

/// The variants of `gpu_decode.py`, with their names in the report and their time limits in seconds.
const PEERS: [(&str, &str, u64); 2] = [("dynamic", "eager", 45), ("static", "compile", 90)];
/// The time reserved for our other rows, which took 30 s on an H200.
const KEPT: Duration = Duration::from_secs(35);

/// Measures the same model in transformers, each variant in one process.
fn transformers(
    context: &mut Context,
    shape: Shape,
    streams: [usize; 2],
    new: usize,
) -> Result<()> {
    let device = context.device();
    for (variant, name, most) in PEERS {
        // Compiling for a CPU takes longer than all sections together.
        if device == Device::Cpu && variant != "dynamic" {
            continue;
        }
        // Of the first check, for both.
        let mut found: Option<std::result::Result<Value, Finding>> = None;
        for count in streams {
            let limit = peer::time_for(context, Duration::from_secs(most), KEPT);
            context.check(format!("transformers, {name}, {count} streams"), || {
                if found.is_none() {
                    let mut arguments = vec!["--variant".to_owned(), variant.to_owned()];
                    arguments.extend(["--prompt".to_owned(), PROMPT.to_string()]);
                    arguments.extend(["--new".to_owned(), new.to_string()]);
                    arguments.push("--streams".to_owned());
                    arguments.extend(streams.map(|count| count.to_string()));
                    arguments.extend(super::train_step::shape_arguments(shape));
                    found = Some(peer::measure("gpu_decode.py", device, limit, &arguments)?);
                }
                let found = match &found {
                    Some(Ok(found)) => found,
                    Some(Err(finding)) => return Ok(finding.clone()),
                    None => return Ok(Finding::failed("nothing was measured")),
                };
                let row = &found[count.to_string()];
                let seconds = number(row, "step_seconds")?;
                Ok(Finding::passed()
                    .with("tokens/s", count as f64 / seconds)
                    .with("ms a step", seconds * 1e3)
                    .with("peak GiB", number(row, "peak_bytes")? / f64::from(1 << 30))
                    .noting(found["side"].as_str().unwrap_or_default()))
            })?;
        }
    }
    Ok(())
}

/// Measures a model with the given numbers of streams and new tokens.
type Work = fn(&CausalLm, usize, usize) -> Result<Finding>;

/// A model in one scheme after another.
struct Weights {
    model: CausalLm,
    scheme: Option<&'static str>,
}

impl Weights {
    /// Returns the model in a scheme. A process that continues the section after another one has to quantize it anew.
    fn of(&mut self, scheme: Option<&'static str>) -> Result<&CausalLm> {
        if self.scheme != scheme {
            if self.model.is_quantized() {
                self.model.dequantize()?;
            }
            self.scheme = None;
            if let Some(scheme) = scheme {
                let options = QuantizeOptions::new(scheme.parse::<Scheme>()?);
                self.model.quantize(&options)?;
            }
            self.scheme = scheme;
        }
        Ok(&self.model)
    }
}

/// Returns the figures of `steps` decode steps with `tokens` together, which took `seconds`.
fn figures(model: &CausalLm, tokens: usize, steps: usize, seconds: f64) -> Result<Finding> {
    let bytes = model.memory_footprint() as f64 * steps as f64;
    let peak = memory::stats(model.device())?.peak_allocated_bytes as f64;
    Ok(Finding::passed()
        .with("tokens/s", tokens as f64 / seconds)
        .with("ms a step", seconds * 1e3 / steps as f64)
        // As if each step read every weight once.
        .with("GB/s of weights", bytes / seconds / 1e9)
        .with("peak GiB", peak / f64::from(1 << 30)))
}

fn prompts(model: &CausalLm, streams: usize) -> Vec<Vec<i64>> {
    generation::prompts(streams, PROMPT, model.config().vocab_size())
}

/// Reads the prompts and returns a step with room for `new` tokens and those of the warm-up.
fn prefilled(model: &CausalLm, streams: usize, new: usize) -> Result<(DecodeStep, Tensor)> {
    let device = model.device();
    memory::reset_peak(device)?;
    let rows = i64::try_from(streams)?;
    let ids: Vec<i64> = prompts(model, streams).concat();
    let ids = Tensor::f_from_slice(&ids)?
        .f_view([rows, -1])?
        .f_to_device(device)?;
    let room = i64::try_from(PROMPT + new + 8)?;
    let mut step = DecodeStep::new(static_cache_of(model, rows, room)?, rows)?;
    let logits = step.prefill(model, &ids)?;
    Ok((step, most_likely(&logits)?))
}

/// Returns the most likely token of each row, on the device.
fn most_likely(logits: &Tensor) -> Result<Tensor> {
    Ok(logits.f_argmax(-1, false)?.f_reshape([-1, 1])?)
}

/// Times single steps, whose tokens stay on the device.
fn plain(model: &CausalLm, streams: usize, new: usize) -> Result<Finding> {
    let _no_grad = tch::no_grad_guard();
    let (mut step, mut token) = prefilled(model, streams, new)?;
    for _ in 0..3 {
        token = most_likely(&step.step(model, &token)?)?;
    }
    synchronize(model.device());
    let began = Instant::now();
    for _ in 0..new {
        token = most_likely(&step.step(model, &token)?)?;
    }
    synchronize(model.device());
    figures(model, streams * new, new, began.elapsed().as_secs_f64())
}

fn captured(model: &CausalLm, streams: usize, new: usize) -> Result<Finding> {
    let _no_grad = tch::no_grad_guard();
    let (step, mut token) = prefilled(model, streams, new)?;
    let mut graph = DecodeGraph::capture(model, step, CaptureOptions::default())?;
    for _ in 0..3 {
        token = most_likely(graph.step(&token)?)?;
    }
    synchronize(model.device());
    let began = Instant::now();
    for _ in 0..new {
        token = most_likely(graph.step(&token)?)?;
    }
    synchronize(model.device());
    let seconds = began.elapsed().as_secs_f64();
    let pool = graph.pool_bytes() as f64 / f64::from(1 << 30);
    Ok(figures(model, streams * new, new, seconds)?.with("pool GiB", pool))
}

fn greedy(new: usize) -> GenerationConfig {
    GenerationConfig {
        max_new_tokens: Some(new),
        ..GenerationConfig::default()
    }
}

fn generated(model: &CausalLm, streams: usize, new: usize) -> Result<Finding> {
    memory::reset_peak(model.device())?;
    let prompts = prompts(model, streams);
    generate(model, &prompts, &greedy(2))?;
    let output = generate(model, &prompts, &greedy(new))?;
    let seconds = output.timings.decode.as_secs_f64();
    let tokens = output.timings.decode_tokens;
    let prefill = output.timings.prefill_tokens_per_second();
    Ok(figures(model, tokens, tokens / streams, seconds)?.with("prefill tokens/s", prefill))
}

/// Makes the logits as uneven as those of a trained model: tens of tokens, not a third of the vocabulary, have 95 % of
/// the probability.
fn sharpen(model: &CausalLm) -> Result<()> {
    let parameters = model.named_parameters();
    let norm = parameters
        .iter()
        .find(|(name, _)| name == "model.norm.weight");
    let (_, norm) = norm.ok_or_else(|| anyhow!("the model has no last norm"))?;
    let _same = norm.f_detach()?.f_fill_(6.0)?;
    Ok(())
}

fn served(model: &CausalLm, streams: usize, new: usize) -> Result<Finding> {
    let sampled = GenerationConfig {
        do_sample: true,
        temperature: 0.8,
        top_p: 0.95,
        seed: Some(1),
        ..greedy(new)
    };
    timed(model, streams, &sampled, false)
}

fn served_greedily(model: &CausalLm, streams: usize, new: usize) -> Result<Finding> {
    timed(model, streams, &greedy(new), false)
}

fn served_eagerly(model: &CausalLm, streams: usize, new: usize) -> Result<Finding> {
    timed(model, streams, &greedy(new), true)
}

/// Profiles steps of the engine.
fn profiled(model: &CausalLm, streams: usize, new: usize) -> Result<Finding> {
    let mut engine = ready(model, streams, &greedy(new), false)?.0;
    let mut step = || -> Result<usize> {
        let events = engine.step()?;
        let is_token = |event: &&Event| matches!(event, Event::Token { .. });
        Ok(events.iter().filter(is_token).count())
    };
    while step()? < streams {}
    let steps = 8;
    kernels_by_time(model.device(), steps, || {
        (0..steps).try_for_each(|_| step().map(drop))
    })
}

/// Returns an engine that is ready for requests, which it has not read, and the time that this took.
fn ready<'a>(
    model: &'a CausalLm,
    streams: usize,
    request: &GenerationConfig,
    enforce_eager: bool,
) -> Result<(Engine<&'a CausalLm>, Duration)> {
    let new = request.max_new_tokens.unwrap_or(0);
    let settings = EngineConfig {
        max_num_seqs: streams,
        num_blocks: Some(streams * (PROMPT + new + 32) / 16),
        enforce_eager,
        ..EngineConfig::default()
    };
    let mut engine = Engine::new(model, settings)?;
    let warm_up = engine.warm_up()?;
    for prompt in prompts(model, streams) {
        engine.submit(Request::new(prompt, request.clone()))?;
    }
    Ok((engine, warm_up))
}

/// Times the steps of an engine that is ready, once it has read every prompt.
fn timed(
    model: &CausalLm,
    streams: usize,
    request: &GenerationConfig,
    enforce_eager: bool,
) -> Result<Finding> {
    memory::reset_peak(model.device())?;
    let (mut engine, warm_up) = ready(model, streams, request, enforce_eager)?;
    let (mut steps, mut tokens, mut whole) = (0, 0, 0);
    let mut began: Option<Instant> = None;
    while !engine.is_idle() {
        let events = engine.step()?;
        let events = events.iter();
        let new = events
            .filter(|event| matches!(event, Event::Token { .. }))
            .count();
        if began.is_some() {
            steps += usize::from(new > 0);
            tokens += new;
        } else if new == streams {
            // The first of these steps reads prompts.
            whole += 1;
            began = (whole == 2).then(Instant::now);
        }
    }
    synchronize(model.device());
    let began = began.ok_or_else(|| anyhow!("no step had a token of every stream"))?;
    let seconds = began.elapsed().as_secs_f64();
    let counts = engine.statistics();
    let bytes = counts.graph_bytes as f64 / f64::from(1 << 30);
    Ok(figures(model, tokens, steps.max(1), seconds)?
        .with("replayed", counts.replayed_steps as f64)
        .with("ahead", counts.steps_ahead as f64)
        .with("discarded", counts.steps_discarded as f64)
        .with("graphs", counts.graphs as f64)
        .with("graphs GiB", bytes)
        .with("ready after s", warm_up.as_secs_f64()))
}
