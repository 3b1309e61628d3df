//! The memory estimate against the measured peak of the default model, configuration by configuration.
//!
//! One test, because the statistics are global.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use overdrive_accumulation::{AccumulationConfig, GradientAccumulator, Window};
use overdrive_checkpointing::Schedule;
use overdrive_optim::{AdamW, AdamWConfig, Optimizer, decay_groups};
use overdrive_precision::Precision;
use overdrive_sys::memory;
use overdrive_trainer::{DecoderShape, MemoryPlan, Preset};
use overdrive_transformer::{
    AttentionImplementation, CausalLm, Execution, InitOptions, LabelShift, ModelConfig,
};
use tch::{Device, Kind, Tensor};

/// The tolerance of the estimate.
const TOLERANCE: f64 = 0.15;

struct Configuration {
    name: &'static str,
    execution: Execution,
    precision: Precision,
    /// If `true`, gradients are also accumulated over two micro-batches.
    twice: bool,
}

/// Returns the peak of a step with existing optimizer states, which an update with zero gradients creates first.
fn measured(model: &CausalLm, precision: Precision, batch: i64, length: i64, micro: usize) -> u64 {
    let groups = decay_groups(model.named_parameters(), 0.1);
    let mut optimizer = AdamW::new(groups, AdamWConfig::default()).unwrap();
    for (_, parameter) in model.named_parameters() {
        (&parameter * 0.0).sum(Kind::Float).backward();
    }
    optimizer.step().unwrap();
    optimizer.zero_grad().unwrap();
    let mut accumulator = GradientAccumulator::new(AccumulationConfig {
        gradient_accumulation_steps: micro,
        max_grad_norm: Some(1.0),
    })
    .unwrap();
    let ids = Tensor::randint(4096, [batch, length], (Kind::Int64, Device::Cpu));
    let tokens = (batch * length) as u64;
    memory::reset_peak(Device::Cpu).unwrap();
    accumulator.open(Window::new(vec![tokens; micro])).unwrap();
    for _ in 0..micro {
        let loss = {
            let _autocast = precision.autocast(Device::Cpu).unwrap();
            model.loss(&ids, &ids, LabelShift::Shifted).unwrap()
        };
        accumulator.backward(&loss.sum).unwrap();
    }
    accumulator.step(&mut optimizer).unwrap();
    memory::stats(Device::Cpu).unwrap().peak_allocated_bytes
}

#[test]
fn the_estimate_is_within_15_percent_of_the_measured_peak_of_the_default_model() {
    let arguments = Preset::Tiny.arguments();
    let shape = &arguments.model;
    let decoder = DecoderShape {
        layers: shape.num_hidden_layers,
        hidden: shape.hidden_size,
        intermediate: shape.intermediate_size,
        heads: shape.num_attention_heads,
        kv_heads: shape.key_value_heads(),
        head_dim: shape.head_features(),
        vocabulary: arguments.vocab_size,
        tied_embeddings: shape.tie_word_embeddings,
        experts: None,
    };
    // Half of the preset's: it takes half the time, and activations are still most of the peak.
    let batch = arguments.per_device_train_batch_size / 2;
    let length = arguments.context_length;
    assert_eq!(decoder.parameters(), shape.parameters(arguments.vocab_size));

    let config = shape.to_hugging_face(arguments.vocab_size, length);
    let config = ModelConfig::try_from(config).unwrap();
    let mut off = Vec::new();
    for configuration in configurations() {
        let warning = configuration.precision.warning(Device::Cpu);
        // Emulated products take minutes; those in hardware are measured even where fp32 is faster.
        if let Some(slow) = warning.filter(|text| text.contains("emulates")) {
            eprintln!("{} is left out: {slow}", configuration.name);
            continue;
        }
        let accumulated = if configuration.twice { 2 } else { 1 };
        for micro in 1..=accumulated {
            let before = memory::stats(Device::Cpu).unwrap().allocated_bytes;
            let mut model = CausalLm::new(&config, &InitOptions::default()).unwrap();
            model.set_requires_grad(true).unwrap();
            model.set_execution(configuration.execution.clone());
            let (rows, columns) = (batch as i64, length as i64);
            let peak = measured(&model, configuration.precision, rows, columns, micro) - before;
            let plan = MemoryPlan {
                precision: configuration.precision,
                attention: configuration.execution.attention,
                schedule: configuration.execution.checkpointing.clone(),
                fused_kernels: configuration.execution.fused_kernels,
                accumulates: micro > 1,
                ..MemoryPlan::new(decoder, batch, length)
            };
            let estimate = plan.estimate().unwrap();
            let error = estimate.peak as f64 / peak as f64 - 1.0;
            let (mib, of) = (estimate.peak as f64 / 1048576.0, peak as f64 / 1048576.0);
            println!(
                "{:<34} x{micro}  estimated {mib:7.1} MiB  measured {of:7.1} MiB  {:+.1}%",
                configuration.name,
                100.0 * error
            );
            if error.abs() > TOLERANCE {
                off.push(format!(
                    "{} x{micro}: {:+.1}%\n{estimate}",
                    configuration.name,
                    100.0 * error
                ));
            }
        }
    }
    assert!(off.is_empty(), "{}", off.join("\n"));
}

fn configurations() -> Vec<Configuration> {
    let execution = |attention, fused_kernels, checkpointing| {
        let mut execution = Execution::default();
        execution.attention = attention;
        execution.fused_kernels = fused_kernels;
        execution.checkpointing = checkpointing;
        execution
    };
    let (eager, flash) = (
        AttentionImplementation::Eager,
        AttentionImplementation::Flash,
    );
    let (fp32, bf16) = (Precision::Fp32, Precision::Bf16);
    #[rustfmt::skip]
    let table = [
        ("default", eager, false, Schedule::Never, fp32, false),
        ("+ mixed precision", eager, false, Schedule::Never, bf16, false),
        ("+ activation checkpointing", eager, false, Schedule::EveryBlock, fp32, false),
        ("+ fused kernels, eager", eager, true, Schedule::Never, fp32, false),
        ("+ flash attention", flash, false, Schedule::Never, fp32, true),
        ("+ flash, mixed precision", flash, false, Schedule::Never, bf16, false),
        ("+ checkpointing every block", flash, false, Schedule::EveryBlock, fp32, false),
        ("+ checkpointing, root of depth", flash, false, Schedule::SqrtSegments, fp32, false),
        ("+ checkpointing every other block", flash, false, Schedule::EveryNth(2), fp32, false),
        ("+ fused kernels", flash, true, Schedule::Never, fp32, false),
        ("+ fused, mixed precision", flash, true, Schedule::Never, bf16, false),
        ("all in fp32", flash, true, Schedule::EveryBlock, fp32, true),
        ("all", flash, true, Schedule::EveryBlock, bf16, false),
    ];
    table
        .map(
            |(name, attention, fused, schedule, precision, twice)| Configuration {
                name,
                execution: execution(attention, fused, schedule),
                precision,
                twice,
            },
        )
        .into()
}
