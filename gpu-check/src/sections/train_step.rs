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

/// Returns the shape of the step: Llama 3.2 1B on a GPU.
pub(super) fn shape(context: &Context) -> Shape {
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
    context.sized(Shape::LLAMA_1B, small)
}

pub(super) fn run(context: &mut Context) -> Result<()> {
    let device = context.device();
    let shape = shape(context);
    let rounds = context.sized(5, 2);
    // The model of a gigabyte of weights is made once.
    let mut step = of_step(Step::new(shape, device))?;
    let mut every_block = Execution::default();
    every_block.checkpointing = Schedule::EveryBlock;
    let mut unfused = Execution::default();
    unfused.fused_kernels = false;
    let cases = [
        ("Overdrive", Precision::Bf16, Execution::default()),
        (
            "Overdrive, every block recomputed",
            Precision::Bf16,
            every_block,
        ),
        ("Overdrive, operators of libtorch", Precision::Bf16, unfused),
    ];
    let precision_of = |low| {
        if device == Device::Cpu {
            Precision::Fp32
        } else {
            low
        }
    };
    for (name, precision, execution) in cases {
        let precision = precision_of(precision);
        step = step.with_precision(precision).with_execution(execution);
        let measured = &mut step;
        context.check(format!("{name} in {precision}"), || {
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
            figures(
                shape,
                measured.parameters(),
                device,
                time,
                peak as f64,
                loss,
            )
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
                let last = errors.lines().last().unwrap_or("it says nothing");
                // That is no failure of Overdrive's.
                let reason = format!("PyTorch failed: {}: {last}", output.status);
                return Ok(Finding::skipped_allowed(reason));
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
