use std::time::Duration;

use anyhow::Result;
use overdrive::precision::Precision;
use overdrive::profiling::{ModelFlops, PeakFlops};
use overdrive::sys::memory;
use overdrive::transformer::{Execution, Schedule};
use overdrive_benches::{Shape, Step};
use tch::{Device, Kind};

use crate::context::Context;
use crate::finding::Finding;
use crate::peer::{self, number};
use crate::timing::{kernels_by_time, kernels_set, other_kernels, seconds};
use crate::training::of_step;

/// The bytes of Llama 3.2 1B in training: 16 for each of 1.24 billion parameters (f32 weights, gradients and two averages),
/// and the weights in bf16.
const FIXED_BYTES: f64 = 22e9;
/// The bytes of a sequence of 2048 tokens, by an estimate for PyTorch without fused kernels: activations of 16 layers, and
/// logits of 128,256 classes in bf16 and f32 with their gradients.
const SEQUENCE_BYTES: f64 = 7.4e9;

/// Returns the batch size of the step for a GPU with this many free bytes: a power of two, at most 8. Both sides use
/// it, so it is chosen for the side that needs more memory.
fn batch_for(free_bytes: u64) -> i64 {
    // A tenth is for fragments and work spaces.
    let fits = (free_bytes as f64 * 0.9 - FIXED_BYTES) / SEQUENCE_BYTES;
    [8, 4, 2]
        .into_iter()
        .find(|batch| *batch as f64 <= fits)
        .unwrap_or(1)
}

/// The shape of tests on a CPU.
pub(super) const SMALL: Shape = Shape {
    vocab: 1000,
    dim: 128,
    layers: 2,
    heads: 4,
    kv_heads: 2,
    hidden: 256,
    context: 64,
    batch: 2,
};

/// Returns the shape of the step: Llama 3.2 1B on a GPU, in batches that its memory holds.
pub(super) fn shape(context: &Context) -> Result<Shape> {
    if !context.is_full() {
        return Ok(SMALL);
    }
    Ok(Shape {
        batch: batch_for(memory::free_bytes(context.device())?),
        ..Shape::LLAMA_1B
    })
}

/// A way to run the step: its name, its implementations, whether overdrive-gpu's kernels are used if that is not the
/// default, and its precision if that is not bf16.
type Case = (String, Execution, Option<bool>, Option<Precision>);

pub(super) fn run(context: &mut Context) -> Result<()> {
    let device = context.device();
    let shape = shape(context)?;
    let default = ("Overdrive".to_owned(), Execution::default(), None, None);
    overdrive(context, shape, vec![default])?;
    // The other side before our variants, which tell less, while all of the memory is its own.
    pytorch(context, shape)?;
    let mut every_block = Execution::default();
    every_block.checkpointing = Schedule::EveryBlock;
    let mut unfused = Execution::default();
    unfused.fused_kernels = false;
    let mut variants = Vec::new();
    if let Some((on, name)) = other_kernels(device)? {
        variants.push((
            format!("Overdrive, {name}"),
            Execution::default(),
            Some(on),
            None,
        ));
    }
    if Precision::Fp8.check(device).is_ok() {
        // With the kernels that convert to FP8, which no report verifies yet, and without.
        for (name, on) in [("own kernels", true), ("operators of libtorch", false)] {
            variants.push((
                format!("Overdrive, FP8 by {name}"),
                Execution::default(),
                Some(on),
                Some(Precision::Fp8),
            ));
        }
    }
    let mut narrow = Execution::default();
    narrow.fp32_residual_connection = false;
    variants.push((
        "Overdrive, residual stream in 16 bits".to_owned(),
        narrow,
        None,
        None,
    ));
    variants.push((
        "Overdrive, every block recomputed".to_owned(),
        every_block,
        None,
        None,
    ));
    variants.push((
        "Overdrive, operators of libtorch".to_owned(),
        unfused,
        Some(false),
        None,
    ));
    overdrive(context, shape, variants)
}

/// Measures our step in these ways.
fn overdrive(context: &mut Context, shape: Shape, cases: Vec<Case>) -> Result<()> {
    let device = context.device();
    let rounds = context.sized(5, 2);
    // The model of a gigabyte of weights is made once.
    let mut step = of_step(Step::new(shape, device))?;
    let usual = context.sized(Precision::Bf16, Precision::Fp32);
    for (name, execution, kernels, precision) in cases {
        let is_default = kernels.is_none() && execution == Execution::default();
        let precision = precision.unwrap_or(usual);
        step = step.with_precision(precision).with_execution(execution);
        let measured = &mut step;
        context.check(format!("{name} in {precision}"), || {
            let _kernels = kernels_set(kernels);
            precision.apply()?;
            let batch = of_step(measured.batch())?;
            memory::empty_cache(device)?;
            memory::reset_peak(device)?;
            let mut loss = f64::NAN;
            let time = seconds(device, rounds, 1, || {
                loss = of_step(measured.run(&batch))?;
                Ok(())
            })?;
            let peak = memory::stats(device)?.peak_allocated_bytes;
            let parameters = measured.parameters();
            let finding = figures(shape, parameters, device, time, peak as f64, loss)?;
            Ok(finding.with("batch", shape.batch as f64))
        })?;
        if device != Device::Cpu && is_default {
            let measured = &mut step;
            context.check(format!("{name} in {precision}, its kernels"), || {
                let batch = of_step(measured.batch())?;
                kernels_by_time(device, 2, || {
                    for _ in 0..2 {
                        of_step(measured.run(&batch))?;
                    }
                    Ok(())
                })
            })?;
        }
    }
    // Its memory is for the other side now.
    drop(step);
    memory::empty_cache(device)?;
    Ok(())
}

/// Returns the figures of a step of `seconds`.
fn figures(
    shape: Shape,
    parameters: i64,
    device: Device,
    seconds: f64,
    peak_bytes: f64,
    loss: f64,
) -> Result<Finding> {
    let count = |number: i64| u64::try_from(number).unwrap_or(0);
    let flops = ModelFlops {
        parameters: count(parameters),
        trainable_parameters: count(parameters),
        layers: count(shape.layers),
        heads: count(shape.heads),
        head_dim: count(shape.dim / shape.heads),
        sequence_length: count(shape.context),
    };
    let rate = shape.tokens() as f64 / seconds;
    let kind = match device {
        Device::Cpu => Kind::Float,
        _ => Kind::BFloat16,
    };
    let peak = PeakFlops::of(device, kind)?.flops_per_second;
    let mfu = flops.utilization(rate, peak);
    Ok(step_figures(shape.tokens(), seconds, peak_bytes, loss).with("MFU", mfu))
}

/// Returns the figures of a training step of `tokens` that took `seconds`.
pub(super) fn step_figures(tokens: i64, seconds: f64, peak_bytes: f64, loss: f64) -> Finding {
    Finding::judged(loss.is_finite(), "the loss is not finite")
        .with("tokens/s", tokens as f64 / seconds)
        .with("ms", seconds * 1e3)
        .with("peak GiB", peak_bytes / f64::from(1 << 30))
        .with("loss", loss)
}

/// The variants of `gpu_step.py`, the most important first, with their time limits in seconds: on an H200 compiling
/// took 55 s, Liger 28 and eager 12.
const VARIANTS: [(&str, u64); 5] = [
    ("eager", 30),
    ("compile", 90),
    ("liger", 45),
    ("adamw-8bit", 35),
    ("flash-attn", 30),
];
/// The time reserved for our variants, which took 6 s on an H200.
const KEPT: Duration = Duration::from_secs(12);

/// Measures the same step in PyTorch, one variant a process.
fn pytorch(context: &mut Context, shape: Shape) -> Result<()> {
    let device = context.device();
    for (variant, most) in VARIANTS {
        // Compiling for a CPU takes longer than all sections together.
        if device == Device::Cpu && variant != "eager" {
            continue;
        }
        let limit = peer::time_for(context, Duration::from_secs(most), KEPT);
        context.check(format!("PyTorch, {variant}"), || {
            let mut arguments = vec!["--variant".to_owned(), variant.to_owned()];
            arguments.extend(shape_arguments(shape));
            let found = match peer::measure("gpu_step.py", device, limit, &arguments)? {
                Ok(found) => found,
                Err(finding) => return Ok(finding),
            };
            let finding = figures(
                shape,
                number(&found, "parameters")? as i64,
                device,
                number(&found, "step_seconds")?,
                number(&found, "peak_bytes")?,
                number(&found, "loss")?,
            )?;
            Ok(finding.noting(found["side"].as_str().unwrap_or_default()))
        })?;
    }
    Ok(())
}

/// Returns the arguments of the comparison's scripts for a shape.
pub(super) fn shape_arguments(shape: Shape) -> Vec<String> {
    let values = [
        ("--vocab", shape.vocab),
        ("--dim", shape.dim),
        ("--layers", shape.layers),
        ("--heads", shape.heads),
        ("--kv-heads", shape.kv_heads),
        ("--hidden", shape.hidden),
        ("--context", shape.context),
        ("--batch", shape.batch),
    ];
    let words = values.into_iter();
    words
        .flat_map(|(name, value)| [name.to_owned(), value.to_string()])
        .collect()
}
