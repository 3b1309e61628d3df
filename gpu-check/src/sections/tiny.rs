use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use overdrive::checkpointing::{
    OffloadOptions, SavePolicy, SavedTo, measure_blocks, offload_saved_tensors,
};
use overdrive::generation::{Engine, EngineConfig, GenerationConfig, Request, generate};
use overdrive::kv_cache::CacheImplementation;
use overdrive::lora::{
    AddOptions, LoadAdapterOptions, LoraConfig, MergeOptions, TargetModules, add_adapter,
    load_adapter, merge_and_unload, save_adapter, trainable_parameters,
};
use overdrive::precision::Precision;
use overdrive::quantization::Scheme;
use overdrive::trainer::{CudaGraphs, ResumeFromCheckpoint, SaveStrategy, TrainingArguments};
use overdrive::transformer::{
    CausalLm, CheckpointOptions, Execution, ForwardInput, LlamaConfig, LoadOptions,
    QuantizeOptions, SaveOptions, Schedule,
};
use tch::{Device, Kind, Tensor};

use crate::context::Context;
use crate::finding::Finding;
use crate::models::{config, model, prompts, tokens};
use crate::parity::{distance, furthest, largest, name_of, tolerance};
use crate::training::{self, Trained, arguments, loss, train_on_a_batch};

use super::{images, rates};

pub(super) fn run(context: &mut Context) -> Result<()> {
    let config = config(context);
    rates::first_prompt(context, &config)?;
    rates::training(context, &config)?;
    train(context, &config)?;
    capture(context, &config)?;
    // A training that failed has left its setting.
    Precision::Fp32.apply()?;
    recompute(context, &config)?;
    adapt(context, &config)?;
    quantize(context, &config)?;
    generation(context, &config)?;
    images::run(context)?;
    save(context, &config)
}

/// Judges a training: its loss is finite and fell by half a nat.
fn learned(losses: &[f64]) -> Finding {
    let [first, .., last] = *losses else {
        return Finding::failed("fewer than two steps");
    };
    let right = last.is_finite() && last < first - 0.5;
    Finding::judged(right, "the loss did not fall by half a nat")
        .with("first loss", first)
        .with("last loss", last)
}

fn train(context: &mut Context, config: &LlamaConfig) -> Result<()> {
    let device = context.device();
    let steps = context.sized(30, 12);
    for precision in [
        Precision::Fp32,
        Precision::Tf32,
        Precision::Bf16,
        Precision::Fp16,
    ] {
        if device == Device::Cpu && matches!(precision, Precision::Tf32 | Precision::Fp16) {
            continue;
        }
        context.check(format!("train in {precision}"), || {
            precision.apply()?;
            let model = model(config, device, Kind::Float)?;
            model.set_requires_grad(true)?;
            let parameters = model.named_parameters();
            let losses = train_on_a_batch(&model, parameters, precision, &arguments(steps))?;
            Ok(learned(&losses))
        })?;
    }
    Ok(())
}

/// Trains with passes that are launched and with captured ones; on a CPU these run without a graph.
fn capture(context: &mut Context, config: &LlamaConfig) -> Result<()> {
    let device = context.device();
    let steps = context.sized(60, 6);
    for precision in [Precision::Fp32, Precision::Bf16] {
        context.check(format!("train by captured passes in {precision}"), || {
            precision.apply()?;
            let trained = |cuda_graphs: CudaGraphs| -> Result<(Trained, f64)> {
                let model = model(config, device, Kind::Float)?;
                model.set_requires_grad(true)?;
                let arguments = TrainingArguments {
                    cuda_graphs,
                    ..arguments(steps)
                };
                let begun = Instant::now();
                let parameters = model.named_parameters();
                // The ids differ from step to step, so that a pass must take those of its own.
                let trained = training::train(&model, parameters, precision, &arguments, 3)?;
                Ok((trained, begun.elapsed().as_secs_f64()))
            };
            // The first run loads the kernels.
            let _loaded = trained(CudaGraphs::Never)?;
            let (expected, launched) = trained(CudaGraphs::Never)?;
            let (found, captured) = trained(CudaGraphs::Always)?;
            ensure!(
                expected.losses.len() == found.losses.len(),
                "steps are missing"
            );
            let replays = steps - found.launched.min(steps);
            ensure!(
                device == Device::Cpu || 2 * replays > steps,
                "{replays} of {steps} passes were replayed"
            );
            let pairs = expected.losses.iter().zip(&found.losses);
            let far = largest(pairs.map(|(a, b)| ((a - b) / a).abs()));
            let allowed = 4.0 * tolerance(precision.autocast_dtype().unwrap_or(Kind::Float));
            let difference = "the losses differ from those of launched passes";
            Ok(Finding::within(far, allowed, difference)
                .with("replayed passes", replays as f64)
                .with("seconds launched", launched)
                .with("seconds captured", captured))
        })?;
    }
    Ok(())
}

/// Returns the gradients of a batch in bf16 autocast.
fn gradients(
    config: &LlamaConfig,
    device: Device,
    execution: Option<Execution>,
    offload: Option<&OffloadOptions>,
) -> Result<Vec<Tensor>> {
    let mut model = model(config, device, Kind::Float)?;
    if let Some(execution) = execution {
        model.set_execution(execution);
    }
    model.set_requires_grad(true)?;
    let ids = tokens(2, 64, device)?;
    let guard = offload
        .map(|options| offload_saved_tensors(options, &[]))
        .transpose()?;
    let loss = loss(&model, &ids, Precision::Bf16)?;
    if let Some(guard) = &guard {
        ensure!(guard.stats().bytes > 0, "nothing was offloaded");
    }
    drop(guard);
    loss.f_backward()?;
    let named = model.named_parameters();
    Ok(named.iter().map(|(_, tensor)| tensor.grad()).collect())
}

/// Judges gradients beside those of the plain run. Kernels of backward on a GPU add in any order.
fn same_gradients(found: &[Tensor], plain: &[Tensor]) -> Result<Finding> {
    let (most, allowed) = (furthest(found, plain)?, tolerance(Kind::BFloat16));
    Ok(Finding::judged(most <= allowed, "the gradients differ")
        .with("gradient error", most)
        .with("tolerance", allowed))
}

fn recompute(context: &mut Context, config: &LlamaConfig) -> Result<()> {
    let device = context.device();
    let policies = [
        ("every block", SavePolicy::Nothing),
        ("keeping matmuls", SavePolicy::Matmuls),
        ("keeping attention", SavePolicy::Attention),
        ("keeping both", SavePolicy::MatmulsAndAttention),
    ];
    for (name, policy) in policies {
        context.check(format!("checkpoint {name} in bf16"), || {
            let plain = gradients(config, device, None, None)?;
            let mut execution = Execution::default();
            execution.checkpointing = Schedule::EveryBlock;
            execution.checkpoint_options = CheckpointOptions::keeping(policy);
            same_gradients(&gradients(config, device, Some(execution), None)?, &plain)
        })?;
    }
    let destinations = [
        ("pinned memory", SavedTo::Host { pinned: true }),
        ("host memory", SavedTo::Host { pinned: false }),
        ("a file", SavedTo::Disk { folder: None }),
    ];
    for (name, to) in destinations {
        // Saved tensors of a CPU are in host memory already.
        if device == Device::Cpu && !matches!(to, SavedTo::Disk { .. }) {
            continue;
        }
        context.check(format!("offload to {name} in bf16"), || {
            let plain = gradients(config, device, None, None)?;
            let options = OffloadOptions {
                to,
                min_bytes: 4096,
                prefetch: 2,
            };
            let found = gradients(config, device, None, Some(&options))?;
            same_gradients(&found, &plain)
        })?;
    }
    context.check("measure blocks in bf16", || {
        let shape = [2, config.num_attention_heads, 64, 64];
        let input = Tensor::f_randn(shape, (Kind::Float, device))?.f_to_kind(Kind::BFloat16)?;
        let costs = measure_blocks(2, &input, |_, x| {
            let options = overdrive::attention::AttentionOptions::causal();
            Ok(overdrive::attention::attention(x, x, x, &options)?)
        })?;
        let bytes: u64 = costs.iter().map(|cost| cost.saved_bytes).sum();
        Ok(Finding::judged(bytes > 0, "no saved bytes").with("saved bytes", bytes as f64))
    })
}

fn adapt(context: &mut Context, config: &LlamaConfig) -> Result<()> {
    let device = context.device();
    let steps = context.sized(30, 15);
    let lora = LoraConfig {
        r: 8,
        lora_alpha: 32.0,
        target_modules: Some(TargetModules::AllLinear),
        ..LoraConfig::default()
    };
    let dora = LoraConfig {
        use_dora: true,
        ..lora.clone()
    };
    let cases = [
        ("LoRA", None, &lora),
        ("DoRA", None, &dora),
        ("QLoRA over nf4", Some("nf4"), &lora),
        ("QLoRA over int8", Some("int8-weight"), &lora),
    ];
    for (name, scheme, lora) in cases {
        context.check(format!("{name} in bf16"), || {
            let mut base = model(config, device, Kind::Float)?;
            base.set_requires_grad(false)?;
            if let Some(scheme) = scheme {
                base.quantize(&QuantizeOptions::new(scheme.parse()?))?;
            }
            add_adapter(&mut base, "default", lora, &AddOptions::default())?;
            let parameters = trainable_parameters(&mut base)?;
            let arguments = TrainingArguments {
                learning_rate: 1e-2,
                ..arguments(steps)
            };
            let losses = train_on_a_batch(&base, parameters, Precision::Bf16, &arguments)?;
            Ok(learned(&losses))
        })?;
    }
    context.check("save, load and merge an adapter", || {
        let mut trained = model(config, device, Kind::Float)?;
        trained.set_requires_grad(false)?;
        add_adapter(&mut trained, "default", &lora, &AddOptions::default())?;
        let parameters = trainable_parameters(&mut trained)?;
        let ids = tokens(4, 64, device)?;
        train_on_a_batch(&trained, parameters, Precision::Fp32, &arguments(3))?;
        let expected = logits(&trained, &ids)?;
        let folder = tempfile::tempdir()?;
        save_adapter(&mut trained, folder.path(), "default")?;
        let mut other = model(config, device, Kind::Float)?;
        load_adapter(
            &mut other,
            folder.path(),
            "default",
            &LoadAdapterOptions::default(),
        )?;
        let loaded = distance(&logits(&other, &ids)?, &expected)?;
        merge_and_unload(&mut other, &MergeOptions::default())?;
        let merged = distance(&logits(&other, &ids)?, &expected)?;
        Ok(
            Finding::judged(loaded < 1e-5 && merged < 1e-4, "the logits differ")
                .with("output error", loaded.max(merged))
                .with("tolerance", 1e-4),
        )
    })
}

/// Returns the logits of a batch without a gradient.
fn logits(model: &CausalLm, ids: &Tensor) -> Result<Tensor> {
    let _no_grad = tch::no_grad_guard();
    Ok(model.forward(ForwardInput::new(ids))?)
}

/// The bounds of ‖quantized − dense‖ / ‖dense‖ of the logits of a random model: about ten times what the formats lose
/// in one layer, since a model of random weights has no redundancy.
fn lossy(scheme: Scheme) -> f64 {
    match scheme {
        Scheme::Int8Dynamic | Scheme::Int8WeightOnly | Scheme::LlmInt8 { .. } => 0.1,
        Scheme::Grouped(options) if options.bits == 8 => 0.1,
        Scheme::Fp8 => 0.2,
        _ => 0.6,
    }
}

fn quantize(context: &mut Context, config: &LlamaConfig) -> Result<()> {
    let device = context.device();
    let kind = context.sized(Kind::BFloat16, Kind::Float);
    for name in Scheme::NAMES {
        context.check(format!("quantize to {name} in {}", name_of(kind)), || {
            let scheme: Scheme = name.parse()?;
            let mut quantized = model(config, device, kind)?;
            let ids = tokens(2, 33, device)?;
            let dense = logits(&quantized, &ids)?;
            quantized.quantize(&QuantizeOptions::new(scheme).with_head(scheme))?;
            let far = distance(&logits(&quantized, &ids)?, &dense)?;
            let greedy = GenerationConfig {
                max_new_tokens: Some(4),
                ..GenerationConfig::default()
            };
            let output = generate(&quantized, &prompts(2), &greedy)?;
            ensure!(
                output.new_tokens(0).len() == 4,
                "four tokens were asked for"
            );
            Ok(Finding::judged(
                far < lossy(scheme),
                "the logits are far from the dense ones",
            )
            .with("output error", far)
            .with("tolerance", lossy(scheme)))
        })?;
    }
    Ok(())
}

fn generation(context: &mut Context, config: &LlamaConfig) -> Result<()> {
    let device = context.device();
    let new = context.sized(24, 8);
    let greedy = GenerationConfig {
        max_new_tokens: Some(new),
        ..GenerationConfig::default()
    };
    let prompts = prompts(4);
    context.check("greedy tokens equal those of the CPU", || {
        let there = generate(&model(config, device, Kind::Float)?, &prompts, &greedy)?;
        let here = generate(&model(config, Device::Cpu, Kind::Float)?, &prompts, &greedy)?;
        let right = there.sequences == here.sequences;
        let rate = there.timings.decode_tokens_per_second();
        Ok(Finding::judged(right, "the tokens differ").with("tokens/s", rate))
    })?;
    let sampled = GenerationConfig {
        do_sample: true,
        temperature: 0.8,
        top_k: 40,
        top_p: 0.9,
        min_p: Some(0.02),
        repetition_penalty: 1.1,
        seed: Some(11),
        logprobs: Some(2),
        ..greedy.clone()
    };
    let beams = GenerationConfig {
        num_beams: 3,
        ..greedy.clone()
    };
    for (name, options) in [("sampling", &sampled), ("beam search", &beams)] {
        context.check(format!("{name} repeats itself"), || {
            let model = model(config, device, Kind::Float)?;
            let first = generate(&model, &prompts, options)?;
            let second = generate(&model, &prompts, options)?;
            let right = first.sequences == second.sequences;
            Ok(Finding::judged(right, "the same seed gave other tokens"))
        })?;
    }
    let kind = context.sized(Kind::BFloat16, Kind::Float);
    for cache in CacheImplementation::ALL {
        context.check(format!("generate over the {cache} cache"), || {
            let model = model(config, device, kind)?;
            let mut options = greedy.clone();
            options.cache_implementation = Some(cache.name().to_owned());
            if cache == CacheImplementation::Sliding {
                options.cache_config.window_length = Some(16);
            }
            let output = generate(&model, &prompts, &options)?;
            let right = (0..prompts.len()).all(|row| output.new_tokens(row).len() == new);
            Ok(Finding::judged(right, "too few tokens"))
        })?;
    }
    context.check("the engine gives the tokens of generate", || {
        let model = model(config, device, Kind::Float)?;
        let alone: Vec<Vec<i64>> = prompts
            .iter()
            .map(|prompt| {
                let output = generate(&model, std::slice::from_ref(prompt), &greedy)?;
                Ok(output.new_tokens(0).to_vec())
            })
            .collect::<Result<_>>()?;
        let settings = EngineConfig {
            max_num_seqs: 3,
            num_blocks: Some(64),
            ..EngineConfig::default()
        };
        let mut engine = Engine::new(&model, settings)?;
        for prompt in &prompts {
            engine.submit(Request::new(prompt.clone(), greedy.clone()))?;
        }
        let mut together = Vec::new();
        for (_, result) in engine.run_to_end()? {
            let completions = result?;
            together.push(completions.first().map(|done| done.tokens.clone()));
        }
        let alone: Vec<_> = alone.into_iter().map(Some).collect();
        Ok(Finding::judged(together == alone, "the tokens differ"))
    })
}

fn save(context: &mut Context, config: &LlamaConfig) -> Result<()> {
    let device = context.device();
    context.check("a snapshot resumes the run", || {
        let folder = tempfile::tempdir()?;
        let last = |resume: Option<&str>| -> Result<f64> {
            let model = model(config, device, Kind::Float)?;
            model.set_requires_grad(true)?;
            let root = folder.path();
            // The first run goes on while its snapshot of step 3 is written.
            let arguments = TrainingArguments {
                output_dir: Some(root.to_owned()),
                save_strategy: SaveStrategy::Steps,
                save_steps: 3.0,
                resume_from_checkpoint: resume
                    .map(|name| ResumeFromCheckpoint::Folder(root.join(name))),
                ..arguments(6)
            };
            let parameters = model.named_parameters();
            let losses = train_on_a_batch(&model, parameters, Precision::Bf16, &arguments)?;
            losses.last().copied().context("no step")
        };
        let (expected, resumed) = (last(None)?, last(Some("checkpoint-3"))?);
        // Backward on a GPU adds in any order.
        let allowed = match device {
            Device::Cpu => 0.0,
            _ => 1e-2 * expected,
        };
        let right = (resumed - expected).abs() <= allowed;
        Ok(
            Finding::judged(right, "the loss differs from the one without the pause")
                .with("last loss", resumed)
                .with("loss without the pause", expected),
        )
    })?;
    context.check("a saved model is loaded to the device", || {
        let folder = tempfile::tempdir()?;
        let saved = model(config, device, Kind::BFloat16)?;
        saved.save_pretrained(folder.path(), &SaveOptions::default())?;
        let options = LoadOptions {
            device,
            ..LoadOptions::default()
        };
        let loaded = CausalLm::from_pretrained(folder.path(), &options)?;
        let same = saved
            .named_parameters()
            .iter()
            .zip(loaded.named_parameters())
            .all(|((_, a), (_, b))| a == &b);
        Ok(Finding::judged(same, "the weights differ"))
    })
}
