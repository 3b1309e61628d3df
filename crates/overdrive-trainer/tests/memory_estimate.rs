//! The memory estimate against the measured peak of the default model, configuration by configuration.
//!
//! One test, because the statistics are global.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use overdrive_accumulation::{AccumulationConfig, GradientAccumulator, Window};
use overdrive_checkpointing::Schedule;
use overdrive_optim::{AdamW, AdamWConfig, Optimizer, decay_groups};
use overdrive_precision::Precision;
use overdrive_profiling::{
    DecoderShape, MemoryAttention, MemoryPlan, MemoryPrecision, Recomputation,
};
use overdrive_sys::memory;
use overdrive_trainer::Preset;
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
    plan: MemoryPlan,
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
    let plan = MemoryPlan::new(decoder, batch, length);
    assert_eq!(decoder.parameters(), shape.parameters(arguments.vocab_size));

    let unfused = || {
        let mut execution = Execution::default();
        execution.fused_kernels = false;
        execution
    };
    let eager = || {
        let mut execution = unfused();
        execution.attention = AttentionImplementation::Eager;
        execution
    };
    let with_attention = |attention| MemoryPlan { attention, ..plan };
    let configurations = configurations(plan, unfused, eager, with_attention);

    let config = shape.to_hugging_face(arguments.vocab_size, length);
    let config = ModelConfig::try_from(config).unwrap();
    let mut off = Vec::new();
    for configuration in configurations {
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
                accumulates: micro > 1,
                ..configuration.plan
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

fn configurations(
    plan: MemoryPlan,
    unfused: impl Fn() -> Execution,
    eager: impl Fn() -> Execution,
    with_attention: impl Fn(MemoryAttention) -> MemoryPlan,
) -> Vec<Configuration> {
    let checkpointed = |mut execution: Execution, schedule| {
        execution.checkpointing = schedule;
        execution
    };
    vec![
        Configuration {
            twice: false,
            name: "default",
            execution: eager(),
            precision: Precision::Fp32,
            plan: with_attention(MemoryAttention::Eager),
        },
        Configuration {
            twice: false,
            name: "+ mixed precision",
            execution: eager(),
            precision: Precision::Bf16,
            plan: MemoryPlan {
                precision: MemoryPrecision::Autocast,
                ..with_attention(MemoryAttention::Eager)
            },
        },
        Configuration {
            twice: false,
            name: "+ activation checkpointing",
            execution: checkpointed(eager(), Schedule::EveryBlock),
            precision: Precision::Fp32,
            plan: MemoryPlan {
                recomputation: Recomputation::EveryBlock,
                ..with_attention(MemoryAttention::Eager)
            },
        },
        Configuration {
            twice: false,
            name: "+ fused kernels, eager",
            execution: {
                let mut execution = eager();
                execution.fused_kernels = true;
                execution
            },
            precision: Precision::Fp32,
            plan: MemoryPlan {
                fused_kernels: true,
                ..with_attention(MemoryAttention::Eager)
            },
        },
        Configuration {
            twice: true,
            name: "+ flash attention",
            execution: unfused(),
            precision: Precision::Fp32,
            plan,
        },
        Configuration {
            twice: false,
            name: "+ flash, mixed precision",
            execution: unfused(),
            precision: Precision::Bf16,
            plan: MemoryPlan {
                precision: MemoryPrecision::Autocast,
                ..plan
            },
        },
        Configuration {
            twice: false,
            name: "+ checkpointing every block",
            execution: checkpointed(unfused(), Schedule::EveryBlock),
            precision: Precision::Fp32,
            plan: MemoryPlan {
                recomputation: Recomputation::EveryBlock,
                ..plan
            },
        },
        Configuration {
            twice: false,
            name: "+ checkpointing, root of depth",
            execution: checkpointed(unfused(), Schedule::SqrtSegments),
            precision: Precision::Fp32,
            plan: MemoryPlan {
                recomputation: Recomputation::SqrtSegments,
                ..plan
            },
        },
        Configuration {
            twice: false,
            name: "+ checkpointing every other block",
            execution: checkpointed(unfused(), Schedule::EveryNth(2)),
            precision: Precision::Fp32,
            plan: MemoryPlan {
                recomputation: Recomputation::EveryNth(2),
                ..plan
            },
        },
        Configuration {
            twice: false,
            name: "+ fused kernels",
            execution: Execution::default(),
            precision: Precision::Fp32,
            plan: MemoryPlan {
                fused_kernels: true,
                ..plan
            },
        },
        Configuration {
            twice: false,
            name: "+ fused, mixed precision",
            execution: Execution::default(),
            precision: Precision::Bf16,
            plan: MemoryPlan {
                fused_kernels: true,
                precision: MemoryPrecision::Autocast,
                ..plan
            },
        },
        Configuration {
            twice: true,
            name: "all in fp32",
            execution: checkpointed(Execution::default(), Schedule::EveryBlock),
            precision: Precision::Fp32,
            plan: MemoryPlan {
                fused_kernels: true,
                recomputation: Recomputation::EveryBlock,
                ..plan
            },
        },
        Configuration {
            twice: false,
            name: "all",
            execution: checkpointed(Execution::default(), Schedule::EveryBlock),
            precision: Precision::Bf16,
            plan: MemoryPlan {
                fused_kernels: true,
                precision: MemoryPrecision::Autocast,
                recomputation: Recomputation::EveryBlock,
                ..plan
            },
        },
    ]
}
