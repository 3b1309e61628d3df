use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Result, anyhow};
use overdrive::precision::Precision;
use overdrive::profiling::{ModelFlops, PeakFlops};
use overdrive::sys::memory;
use overdrive::sys::process::terminate_with_parent;
use overdrive::transformer::{Execution, Schedule};
use overdrive_benches::{Shape, Step};
use serde_json::Value;
use tch::{Device, Kind};

use crate::context::Context;
use crate::finding::Finding;
use crate::timing::seconds;
use crate::training::of_step;

/// The bytes of Llama 3.2 1B in training: 16 for each of 1.24 billion parameters (f32 weights, gradients and two averages),
/// and the weights in bf16.
const FIXED_BYTES: f64 = 22e9;
/// The bytes of a sequence of 2048 tokens, by an estimate for PyTorch without fused kernels: activations of 16 layers, and
/// logits of 128,256 classes in bf16 and f32 with their gradients.
const SEQUENCE_BYTES: f64 = 7.4e9;

/// Returns the batch of the step for a GPU with so many free bytes: a power of two, 8 at most. Both sides take it, so it
/// is for the one that needs more memory.
pub fn batch_for(free_bytes: u64) -> i64 {
    // A tenth is for fragments and work spaces.
    let fits = (free_bytes as f64 * 0.9 - FIXED_BYTES) / SEQUENCE_BYTES;
    [8, 4, 2]
        .into_iter()
        .find(|batch| *batch as f64 <= fits)
        .unwrap_or(1)
}

/// Returns the shape of the step: Llama 3.2 1B on a GPU, in batches that its memory holds.
pub(super) fn shape(context: &Context) -> Result<Shape> {
    let small = Shape {
        vocab: 1000,
        dim: 128,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        hidden: 256,
        context: 64,
        batch: 2,
    };
    if !context.is_full() {
        return Ok(small);
    }
    Ok(Shape {
        batch: batch_for(memory::free_bytes(context.device())?),
        ..Shape::LLAMA_1B
    })
}

pub(super) fn run(context: &mut Context) -> Result<()> {
    let device = context.device();
    let shape = shape(context)?;
    let rounds = context.sized(5, 2);
    // The model of a gigabyte of weights is made once.
    let mut step = of_step(Step::new(shape, device))?;
    let mut every_block = Execution::default();
    every_block.checkpointing = Schedule::EveryBlock;
    let mut unfused = Execution::default();
    unfused.fused_kernels = false;
    let cases = [
        ("Overdrive", Execution::default(), false),
        ("Overdrive, own kernels", Execution::default(), true),
        ("Overdrive, every block recomputed", every_block, false),
        ("Overdrive, operators of libtorch", unfused, false),
    ];
    let precision = context.sized(Precision::Bf16, Precision::Fp32);
    for (name, execution, with_kernels) in cases {
        if with_kernels && device == Device::Cpu {
            continue;
        }
        step = step.with_precision(precision).with_execution(execution);
        let measured = &mut step;
        context.check(format!("{name} in {precision}"), || {
            let _kernels = overdrive_gpu::override_enabled(with_kernels);
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
    }
    // Its memory is for the other side now.
    drop(step);
    memory::empty_cache(device)?;
    pytorch(context, shape)
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
    Ok(Finding::judged(loss.is_finite(), "the loss is not finite")
        .with("tokens/s", rate)
        .with("ms", seconds * 1e3)
        .with("MFU", flops.utilization(rate, peak))
        .with("peak GiB", peak_bytes / f64::from(1 << 30))
        .with("loss", loss))
}

/// Returns a command of the Python that has PyTorch.
pub(super) fn python() -> Command {
    let program = std::env::var_os("OVERDRIVE_PYTHON");
    let mut command = Command::new(program.unwrap_or_else(|| "python3".into()));
    command.stdin(Stdio::null());
    // A bundle's script puts the libraries of libtorch before the machine's own path, which Python needs as it was.
    if let Some(outer) = std::env::var_os("OVERDRIVE_OUTER_LIBRARY_PATH") {
        match outer.is_empty() {
            true => command.env_remove("LD_LIBRARY_PATH"),
            false => command.env("LD_LIBRARY_PATH", outer),
        };
    }
    terminate_with_parent(&mut command);
    command
}

/// Returns the folder of the comparison's scripts: beside this program in a bundle, else in the repository.
fn scripts() -> PathBuf {
    let here = std::env::current_exe().unwrap_or_default();
    let bundled = here.with_file_name("python");
    if bundled.is_dir() {
        return bundled;
    }
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../benches/pytorch")
}

/// The variants of `gpu_step.py`, the most telling first.
const VARIANTS: [&str; 5] = ["eager", "compile", "liger", "flash-attn", "adamw-8bit"];

/// Measures the same step in PyTorch, one variant a process.
fn pytorch(context: &mut Context, shape: Shape) -> Result<()> {
    let device = context.device();
    for variant in VARIANTS {
        // Compiling for a CPU takes longer than all sections together.
        if device == Device::Cpu && variant != "eager" {
            continue;
        }
        let left = context.time_left().as_secs();
        context.check(format!("PyTorch, {variant}"), || {
            let mut command = python();
            command
                .arg(scripts().join("gpu_step.py"))
                .args(["--variant", variant])
                .args([
                    "--device",
                    if device == Device::Cpu { "cpu" } else { "cuda" },
                ])
                .args(["--seconds", &left.to_string()])
                .args(shape_arguments(shape));
            let output = command.output()?;
            let text = String::from_utf8_lossy(&output.stdout);
            let Some(line) = text.lines().rev().find(|line| line.starts_with('{')) else {
                let errors = String::from_utf8_lossy(&output.stderr);
                return Ok(baseline_without_figures(
                    &output.status.to_string(),
                    &errors,
                ));
            };
            let found: Value = serde_json::from_str(line)?;
            if let Some(reason) = found["missing"].as_str() {
                return Ok(Finding::skipped_allowed(reason));
            }
            let number = |key: &str| {
                let value = found[key].as_f64();
                value.ok_or_else(|| anyhow!("`{key}` is missing in {line}"))
            };
            let finding = figures(
                shape,
                number("parameters")? as i64,
                device,
                number("step_seconds")?,
                number("peak_bytes")?,
                number("loss")?,
            )?;
            Ok(finding.noting(found["side"].as_str().unwrap_or_default()))
        })?;
    }
    Ok(())
}

/// Returns the finding about a program of PyTorch that has printed no figures, from its standard error.
///
/// Exhausted memory is a failure: the batch is chosen such that both sides have room, and a table without its baseline
/// proves nothing. Anything else is no failure of Overdrive's.
pub fn baseline_without_figures(status: &str, errors: &str) -> Finding {
    let last = errors.lines().last().unwrap_or("it says nothing");
    let reason = format!("PyTorch failed: {status}: {last}");
    let is_out_of_memory = ["OutOfMemoryError", "out of memory"];
    match is_out_of_memory.iter().any(|text| errors.contains(text)) {
        true => Finding::failed(reason),
        false => Finding::skipped_allowed(reason),
    }
}

fn shape_arguments(shape: Shape) -> Vec<String> {
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
