//! The recommended training precision of this machine, and the reason. The rule is that of
//! `overdrive_precision::Precision::recommend`, which asks libtorch for the devices; here libtorch may not be
//! installed yet. The rule for CPUs is shared: `overdrive_build::cpu`, and the figures that a program with
//! libtorch has measured and stored: `overdrive_build::MatmulSpeed`.

use overdrive_build::MatmulSpeed;
use overdrive_build::cpu::CpuFeatures;

use super::gpu::Gpu;

/// Returns the recommendation and its reason, for the GPU if libtorch can use one. `speed` is the measured speed
/// of the CPU, if there is one.
pub(super) fn recommend(
    gpu: Option<&Gpu>,
    features: CpuFeatures,
    speed: Option<MatmulSpeed>,
) -> String {
    match gpu.map(|gpu| gpu.capability) {
        Some(Some((major, minor))) => on_cuda(major, minor),
        Some(None) => "fp32: the driver does not say the GPU's compute capability".to_owned(),
        None => on_cpu(features, speed),
    }
}

fn on_cuda(major: u32, minor: u32) -> String {
    let capability = format!("compute capability {major}.{minor}");
    match major {
        8.. => format!(
            "bf16 ({capability}: tensor cores support bf16, which has the range of fp32, so no loss \
             scaling); TF32 for what stays in fp32"
        ),
        7 => format!(
            "fp16 with GradScaler ({capability}: tensor cores support fp16 but not bf16, and its \
             small range needs loss scaling)"
        ),
        _ => format!("fp32 ({capability}: no tensor cores, half precision would only save memory)"),
    }
}

fn on_cpu(features: CpuFeatures, speed: Option<MatmulSpeed>) -> String {
    if !features.multiplies_bf16() {
        return "fp32 (this processor has no bf16 instructions for matmuls: layers multiply bf16 in fp32, which \
                saves no time, and libtorch's own operators emulate it)"
            .to_owned();
    }
    match speed {
        Some(speed) if speed.favours_bf16() => format!("bf16 ({speed})"),
        Some(speed) => format!("fp32 ({speed})"),
        None => {
            "fp32 or bf16, whichever is faster: not measured yet (the first `cargo xtask train` \
                 measures it)"
                .to_owned()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(gpu: Option<Option<(u32, u32)>>, flags: &str) -> String {
        let text = text(gpu, flags, None);
        text.split([' ', ':']).next().unwrap_or_default().to_owned()
    }

    fn text(gpu: Option<Option<(u32, u32)>>, flags: &str, speed: Option<MatmulSpeed>) -> String {
        let gpu = gpu.map(|capability| Gpu {
            name: "a GPU".into(),
            driver: "580.1".into(),
            driver_major: 580,
            memory_mib: 1,
            capability,
        });
        recommend(gpu.as_ref(), CpuFeatures::from_flags(flags), speed)
    }

    #[test]
    fn the_precision_follows_what_the_device_multiplies() {
        assert_eq!(word(Some(Some((9, 0))), ""), "bf16");
        assert_eq!(word(Some(Some((8, 0))), ""), "bf16");
        assert_eq!(word(Some(Some((7, 5))), "avx512_bf16"), "fp16");
        assert_eq!(word(Some(Some((6, 1))), ""), "fp32");
        assert_eq!(word(Some(None), ""), "fp32");
        assert_eq!(word(None, "avx2 fma avx512f"), "fp32");
    }

    #[test]
    fn on_a_cpu_with_bf16_instructions_both_measured_figures_are_printed() {
        let of = |fp32, bf16| text(None, "avx512_bf16", Some(MatmulSpeed { fp32, bf16 }));
        assert_eq!(of(320.0, 170.0), "fp32 (fp32 320 GFLOP/s, bf16 170)");
        assert_eq!(of(210.0, 420.0), "bf16 (fp32 210 GFLOP/s, bf16 420)");
        for flags in ["avx2 avx512f avx512_bf16", "asimd bf16"] {
            let unknown = text(None, flags, None);
            assert!(unknown.contains("not measured yet"), "{unknown}");
        }
    }
}
