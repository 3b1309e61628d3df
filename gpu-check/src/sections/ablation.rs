use anyhow::{Context as _, Result};
use overdrive::precision::Precision;
use overdrive::sys::memory;
use overdrive::transformer::{AttentionImplementation, Execution, Schedule};
use overdrive_benches::ablation::{Configuration, Measurement, Precisions, Row, RowPrecision};
use overdrive_benches::{Shape, Step};
use tch::Device;

use crate::context::Context;
use crate::finding::Finding;
use crate::timing::{kernels_set, other_kernels, seconds};
use crate::training::of_step;

/// A model of 190M parameters at a length at which the scores of unfused attention still fit.
const MEDIUM: Shape = Shape {
    vocab: 32_000,
    dim: 1024,
    layers: 12,
    heads: 16,
    kv_heads: 4,
    hidden: 2816,
    context: 2048,
    batch: 4,
};

pub(super) fn run(context: &mut Context) -> Result<()> {
    let device = context.device();
    let shape = match context.is_full() {
        true => MEDIUM,
        false => super::train_step::shape(context)?,
    };
    let rounds = context.sized(4, 2);
    let precisions = match device {
        // Its recommendation is a measurement, and bf16 may be emulated.
        Device::Cpu => Precisions {
            recommended: Precision::Fp32,
            mixed: None,
            reason: "a test".to_owned(),
        },
        device => Precisions::of(device),
    };
    let rows = Configuration::rows(&precisions);
    let Some(&first) = rows.first() else {
        return Ok(());
    };
    let mut step = Some(of_step(Step::new(shape, device))?);
    let mut of = |configuration: &Configuration, kernels: Option<bool>| -> Result<Measurement> {
        let _kernels = kernels_set(kernels);
        let precision = precision_of(configuration, &precisions);
        // TF32 is a setting of the process.
        precision.apply()?;
        let execution = execution_of(configuration);
        step = step
            .take()
            .map(|step| step.with_precision(precision).with_execution(execution));
        measure(step.as_mut().context("the model")?, device, rounds)
    };
    let mut default: Option<Measurement> = None;
    // What the kernels of overdrive-gpu add to everything else, or would.
    let last = rows.last().copied().zip(other_kernels(device)?);
    let last = last.map(|(row, (on, name))| (row, Some(on), format!(", {name}")));
    let rows = rows.into_iter().map(|row| (row, None, String::new()));
    for (number, (configuration, kernels, name)) in rows.chain(last).enumerate() {
        let title = configuration.title(&precisions);
        context.check(format!("{title}{name}"), || {
            // A process that continues after a crash has not measured the first row, the default.
            let baseline = match default {
                Some(measured) => measured,
                None => *default.insert(of(&first, None)?),
            };
            let measurement = match number {
                0 => baseline,
                _ => of(&configuration, kernels)?,
            };
            let flags = configuration.flags(&precisions);
            let row = Row::new(configuration.name, &flags, &[measurement], &[baseline]);
            let finite = measurement.eval_loss.is_finite();
            Ok(Finding::judged(finite, "the loss is not finite")
                .with("ms", row.measurement.step_seconds * 1e3)
                .with("speed", row.speed)
                .with(
                    "peak GiB",
                    measurement.peak_memory_bytes as f64 / f64::from(1 << 30),
                )
                .with("of default", row.memory)
                .with("loss", measurement.eval_loss))
        })?;
    }
    Ok(())
}

fn precision_of(configuration: &Configuration, precisions: &Precisions) -> Precision {
    match configuration.precision {
        RowPrecision::Full => Precision::Fp32,
        RowPrecision::Mixed => precisions.mixed.unwrap_or(Precision::Fp32),
        RowPrecision::Recommended => precisions.recommended,
    }
}

fn execution_of(configuration: &Configuration) -> Execution {
    let mut execution = Execution::default();
    execution.fused_kernels = configuration.fused_kernels;
    execution.attention = match configuration.flash_attention {
        true => AttentionImplementation::Flash,
        false => AttentionImplementation::Eager,
    };
    if configuration.checkpointing {
        execution.checkpointing = Schedule::EveryBlock;
    }
    execution
}

fn measure(step: &mut Step, device: Device, rounds: usize) -> Result<Measurement> {
    let batch = of_step(step.batch())?;
    memory::empty_cache(device)?;
    memory::reset_peak(device)?;
    let mut loss = f64::NAN;
    let step_seconds = seconds(device, rounds, 1, || {
        loss = of_step(step.run(&batch))?;
        Ok(())
    })?;
    Ok(Measurement {
        step_seconds,
        peak_memory_bytes: memory::stats(device)?.peak_allocated_bytes,
        eval_loss: loss,
    })
}
