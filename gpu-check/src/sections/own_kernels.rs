use anyhow::Result;
use overdrive::precision::Precision;
use tch::Device;

use crate::context::Context;
use crate::finding::Finding;

/// The kernels that each group of checks has to launch; the section `decode_kernel` launches the others.
const FUSED: [&str; 7] = [
    "rms_norm_forward",
    "rms_norm_backward",
    "glu_forward",
    "glu_backward",
    "rotary_split",
    "rotary_join",
    "cross_entropy",
];
const FP8: [&str; 2] = ["fp8_amax", "fp8_cast"];
const QUANTIZED: [&str; 5] = [
    "few_bits",
    "few_rows_4bit",
    "dequantize_4bit",
    "few_rows_8bit",
    "dequantize_8bit",
];
const OPTIMIZERS: [&str; 1] = ["adam8"];
const LINEAR_ATTENTION: [&str; 2] = ["causal_conv1d", "delta_rule"];

pub(super) fn run(context: &mut Context) -> Result<()> {
    // On a CPU there are none: the same checks run what the kernels replace.
    let _on = overdrive_gpu::override_enabled(true);
    let device = context.device();
    context.check("every image for this GPU is loaded", || {
        Ok(match overdrive_gpu::kernels(device)? {
            Some(kernels) => Finding::passed()
                .noting(kernels.target())
                .with("images", kernels.load_all()? as f64),
            None => none_on(device),
        })
    })?;
    super::fused::with_kernels(context)?;
    launched(context, "fused", &FUSED)?;
    if Precision::Fp8.check(device).is_ok() {
        launched(context, "layers in FP8", &FP8)?;
    }
    super::quantized::run(context)?;
    launched(context, "quantized", &QUANTIZED)?;
    super::optimizers::with_kernels(context)?;
    launched(context, "optimizers", &OPTIMIZERS)?;
    super::linear_attention::run(context)?;
    launched(context, "linear attention", &LINEAR_ATTENTION)
}

fn none_on(device: Device) -> Finding {
    Finding::judged(device == Device::Cpu, "there are none")
}

/// Checks that the checks of a group, which also pass without the kernels, have launched each of them.
pub(super) fn launched(context: &mut Context, group: &str, kernels: &[&str]) -> Result<()> {
    let (device, is_resumed) = (context.device(), context.is_resumed());
    context.check(format!("the checks of {group} launch the kernels"), || {
        let Some(opened) = overdrive_gpu::kernels(device)? else {
            return Ok(none_on(device));
        };
        let counts = opened.launches();
        let count = |kernel: &str| counts.get(kernel).copied().unwrap_or(0);
        let missing: Vec<&str> = kernels
            .iter()
            .copied()
            .filter(|kernel| count(kernel) == 0)
            .collect();
        let mut finding = Finding::judged(
            missing.is_empty(),
            format!("never launched: {}", missing.join(", ")),
        );
        if is_resumed {
            finding = finding.noting("a process before this one is not counted");
        }
        for kernel in kernels {
            finding = finding.with(kernel, count(kernel) as f64);
        }
        Ok(finding)
    })
}
