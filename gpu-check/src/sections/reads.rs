use anyhow::Result;
use overdrive::generation::{Engine, EngineConfig, GenerationConfig, Request, generate};
use overdrive::kv_cache::KvCache as _;
use overdrive::lora::{AddOptions, LoraConfig, TargetModules, add_adapter, trainable_parameters};
use overdrive::precision::Precision;
use overdrive::profiling::HostReads;
use overdrive::transformer::{Execution, Schedule};
use overdrive_graphs::{DecodeStep, static_cache_of};
use tch::{Device, Kind};

use crate::context::Context;
use crate::finding::{Finding, Outcome};
use crate::models::{config, model, prompts, tokens};
use crate::training::{Trainer, packed_loss};

/// The reads that each new token of `generate` may cost: the sampled ids, and the test of whether all rows have ended.
const READS_A_TOKEN: f64 = 2.0;
/// The reads that a step of the engine may cost: the sampled ids, and a spare one.
const READS_A_STEP: f64 = 2.0;

/// Judges the reads of the host in `count` repetitions.
fn judge(names: &[String], count: usize, allowed: f64) -> Finding {
    let each = names.len() as f64 / count as f64;
    let mut kinds: Vec<&str> = names.iter().map(String::as_str).collect();
    kinds.sort_unstable();
    kinds.dedup();
    Finding::judged(each <= allowed, "more reads than stated")
        .noting(kinds.join(", "))
        .with("reads", each)
        .with("stated", allowed)
}

pub(super) fn run(context: &mut Context) -> Result<()> {
    let config = config(context);
    let device = context.device();
    let mut every_block = Execution::default();
    every_block.checkpointing = Schedule::EveryBlock;
    let cases = [
        (
            "a training step in f32",
            Precision::Fp32,
            Execution::default(),
        ),
        (
            "a training step in bf16",
            Precision::Bf16,
            Execution::default(),
        ),
        (
            "a training step in fp16 with a scaler",
            Precision::Fp16,
            Execution::default(),
        ),
        (
            "a training step with checkpoints",
            Precision::Bf16,
            every_block,
        ),
    ];
    for (name, precision, execution) in cases {
        // Half precision of a processor without the instructions takes minutes; the reads are those of bf16.
        if device == Device::Cpu && precision == Precision::Fp16 {
            continue;
        }
        context.check(name, || {
            let (mut model, mut trainer) = Trainer::of_model(&config, device, precision)?;
            model.set_execution(execution);
            let ids = tokens(2, 32, device)?;
            // The first steps create the states of the optimizer.
            trainer.steps(&model, &ids, 2)?;
            let reads = HostReads::of(device);
            for _ in 0..3 {
                let _loss = trainer.step(&model, &ids)?;
            }
            Ok(judge(&reads.names(), 3, 0.0))
        })?;
    }
    context.check("a training step of packed sequences", || {
        let (model, mut trainer) = Trainer::of_model(&config, device, Precision::Bf16)?;
        let ids = tokens(1, 64, device)?;
        let mut step = || -> Result<()> {
            let loss = packed_loss(&model, &ids, &[20, 12, 32], Precision::Bf16)?;
            trainer.step_with(loss).map(drop)
        };
        step()?;
        step()?;
        let reads = HostReads::of(device);
        for _ in 0..3 {
            step()?;
        }
        let uploads = reads.uploads();
        let found = judge(&reads.names(), 3, 0.0).with("uploads that wait", uploads.len() as f64);
        // The bounds and the positions of the sequences are new in each step.
        Ok(match uploads.as_slice() {
            [] => found,
            uploads => Finding {
                outcome: Outcome::Failed,
                ..found.noting(format!("the host waits for {}", uploads.join(", ")))
            },
        })
    })?;
    context.check("a step of LoRA", || {
        let mut base = model(&config, device, Kind::Float)?;
        base.set_requires_grad(false)?;
        let lora = LoraConfig {
            target_modules: Some(TargetModules::AllLinear),
            ..LoraConfig::default()
        };
        add_adapter(&mut base, "default", &lora, &AddOptions::default())?;
        let mut trainer = Trainer::new(trainable_parameters(&mut base)?, Precision::Bf16)?;
        let ids = tokens(2, 32, device)?;
        trainer.steps(&base, &ids, 2)?;
        let reads = HostReads::of(device);
        for _ in 0..3 {
            let _loss = trainer.step(&base, &ids)?;
        }
        Ok(judge(&reads.names(), 3, 0.0))
    })?;
    context.check("a decode step that can be captured", || {
        let model = model(&config, device, Kind::Float)?;
        let ids = tokens(2, 8, device)?;
        let mut step = DecodeStep::new(static_cache_of(&model, 2, 16)?, 2)?;
        let _logits = step.prefill(&model, &ids.f_narrow(1, 0, 4)?)?;
        let token = ids.f_narrow(1, 4, 1)?;
        let _logits = step.step(&model, &token)?;
        let reads = HostReads::of(device);
        for _ in 0..3 {
            let _logits = step.step(&model, &token)?;
        }
        let names = reads.names();
        drop(reads);
        let finding = judge(&names, 3, 0.0);
        Ok(finding.with("tokens held", step.cache().len() as f64))
    })?;
    let new = 16;
    let greedy = GenerationConfig {
        max_new_tokens: Some(new),
        ..GenerationConfig::default()
    };
    let sampled = GenerationConfig {
        do_sample: true,
        top_k: 20,
        top_p: 0.9,
        seed: Some(3),
        ..greedy.clone()
    };
    for (name, options) in [("greedy", &greedy), ("sampled", &sampled)] {
        context.check(format!("a {name} token of generate"), || {
            let model = model(&config, device, Kind::Float)?;
            generate(&model, &prompts(4), options)?;
            let reads = HostReads::of(device);
            generate(&model, &prompts(4), options)?;
            Ok(judge(&reads.names(), new, READS_A_TOKEN))
        })?;
        context.check(format!("a {name} step of the engine"), || {
            let model = model(&config, device, Kind::Float)?;
            let settings = EngineConfig {
                num_blocks: Some(64),
                ..EngineConfig::default()
            };
            let mut engine = Engine::new(&model, settings)?;
            for prompt in prompts(4) {
                engine.submit(Request::new(prompt, options.clone()))?;
            }
            // The prompts are read in the first steps.
            engine.step()?;
            engine.step()?;
            let reads = HostReads::of(device);
            for _ in 0..8 {
                engine.step()?;
            }
            Ok(judge(&reads.names(), 8, READS_A_STEP))
        })?;
    }
    Ok(())
}
