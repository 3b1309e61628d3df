//! The rates that programs report, and what is loaded before the first request.

use std::time::Instant;

use anyhow::{Context as _, Result};
use overdrive::generation::{GenerateOptions, GenerationConfig, generate, warm_up};
use overdrive::precision::Precision;
use overdrive::profiling::{
    ModelFlops, PeakFlops, Phase, StepRecord, StepRecorder, StepRecorderConfig, StepWork,
};
use overdrive::transformer::LlamaConfig;
use tch::Kind;

use crate::context::Context;
use crate::finding::Finding;
use crate::models::{model, prompts, tokens};
use crate::timing::synchronize;
use crate::training::Trainer;

/// The allowed deviation of the reported tokens/s from the rate computed from the time around the steps.
const TOLERANCE: f64 = 0.1;

/// Compares the rates of a [`StepRecorder`] with the time between two moments at which the device had finished. A host
/// that is ahead of the device would report more, and an MFU above 1.
pub(super) fn training(context: &mut Context, config: &LlamaConfig) -> Result<()> {
    let device = context.device();
    let steps = context.sized(20, 6);
    // Steps that take a GPU longer than the host takes to launch them.
    let (rows, length) = context.sized((64, 512), (4, 64));
    context.check("tokens/s and MFU are those of the time around", || {
        let (model, mut trainer) = Trainer::of_model(config, device, Precision::Fp32)?;
        let parameters = u64::try_from(model.num_parameters())?;
        let ids = tokens(rows, length, device)?;
        trainer.steps(&model, &ids, 3)?;
        let mut recorder = StepRecorder::new(StepRecorderConfig {
            device,
            window: steps,
            model: Some(ModelFlops {
                parameters,
                trainable_parameters: parameters,
                layers: config.num_hidden_layers.unsigned_abs(),
                heads: config.num_attention_heads.unsigned_abs(),
                head_dim: (config.hidden_size / config.num_attention_heads).unsigned_abs(),
                sequence_length: length.unsigned_abs(),
            }),
            peak_flops: Some(PeakFlops::of(device, Kind::Float)?),
            ..StepRecorderConfig::default()
        })?;
        let work = StepWork {
            tokens: (rows * length).unsigned_abs(),
            samples: rows.unsigned_abs(),
        };
        let mut records: Vec<StepRecord> = Vec::new();
        synchronize(device);
        let began = Instant::now();
        recorder.begin_step();
        for _ in 0..steps {
            let loss = recorder.phase(Phase::Forward, || trainer.step(&model, &ids))?;
            drop(loss);
            recorder.end_step(work);
            records.extend(recorder.take_finished()?);
        }
        let launched = began.elapsed().as_secs_f64();
        synchronize(device);
        let around = began.elapsed().as_secs_f64();
        records.extend(recorder.finish()?);
        let last = records.last().context("no step was finished")?;
        let rate = (steps as u64 * work.tokens) as f64 / around;
        let most = records.iter().filter_map(|record| record.mfu);
        let most = most.fold(0.0, f64::max);
        let off = (last.tokens_per_second / rate - 1.0).abs();
        let right = records.len() == steps && off <= TOLERANCE && most <= 1.0;
        Ok(
            Finding::judged(right, "the rates differ from those of the device")
                .with("tokens/s", last.tokens_per_second)
                .with("tokens/s around", rate)
                .with("tolerance", TOLERANCE)
                .with("most MFU", most)
                .with("host time / device time", launched / around),
        )
    })
}

/// The allowed ratio of the time of the first prompt after a warm-up to that of a later prompt, apart from the kernels
/// for its shape.
const TIMES: f64 = 5.0;
/// The seconds that those kernels may take.
const SPARE: f64 = 0.1;

/// Checks that the first prompt after a warm-up is read as fast as a later one. The first check of its process: nothing is
/// loaded before it.
pub(super) fn first_prompt(context: &mut Context, config: &LlamaConfig) -> Result<()> {
    let device = context.device();
    context.check("the first prompt is read as fast as a later one", || {
        let model = model(config, device, Kind::Float)?;
        let (prompts, greedy) = (
            prompts(1),
            GenerationConfig {
                max_new_tokens: Some(4),
                ..GenerationConfig::default()
            },
        );
        let ready = warm_up(&model, &prompts, &greedy, &GenerateOptions::default())?;
        let first = generate(&model, &prompts, &greedy)?;
        let later = generate(&model, &prompts, &greedy)?;
        let seconds = [&first, &later].map(|output| output.timings.prefill.as_secs_f64());
        // A CPU loads nothing, and its times are those of a busy machine.
        let is_fast = !device.is_cuda() || seconds[0] <= TIMES * seconds[1] + SPARE;
        let right = is_fast && first.sequences == later.sequences;
        Ok(
            Finding::judged(right, "the first prompt waits for what is loaded")
                .with("ready s", ready.as_secs_f64())
                .with("first prompt s", seconds[0])
                .with("later prompt s", seconds[1]),
        )
    })
}
