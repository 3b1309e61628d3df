//! The recommended training precision of this machine, and the reason. The rule is that of
//! `overdrive_precision::Precision::recommend`, which asks libtorch for the devices; here libtorch may not be
//! installed yet. The rule for CPUs is shared: `overdrive_build::cpu`.

use overdrive_build::cpu::CpuFeatures;

use super::gpu::Gpu;

/// Returns the recommendation and its reason, for the GPU if libtorch can use one.
pub(super) fn recommend(gpu: Option<&Gpu>, features: CpuFeatures) -> String {
    match gpu.map(|gpu| gpu.capability) {
        Some(Some((major, minor))) => on_cuda(major, minor),
        Some(None) => "fp32: the driver does not say the GPU's compute capability".to_owned(),
        None => on_cpu(features),
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

fn on_cpu(features: CpuFeatures) -> String {
    if features.multiplies_bf16() {
        "bf16 (this processor has bf16 instructions for matmuls)".to_owned()
    } else {
        "fp32 (this processor has no bf16 instructions for matmuls: they would be emulated, \
         tens to thousands of times slower)"
            .to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(gpu: Option<Option<(u32, u32)>>, flags: &str) -> String {
        let gpu = gpu.map(|capability| Gpu {
            name: "a GPU".into(),
            driver: "580.1".into(),
            driver_major: 580,
            memory_mib: 1,
            capability,
        });
        let text = recommend(gpu.as_ref(), CpuFeatures::from_flags(flags));
        text.split([' ', ':']).next().unwrap_or_default().to_owned()
    }

    #[test]
    fn the_precision_follows_what_the_device_multiplies() {
        assert_eq!(word(Some(Some((9, 0))), ""), "bf16");
        assert_eq!(word(Some(Some((8, 0))), ""), "bf16");
        assert_eq!(word(Some(Some((7, 5))), "avx512_bf16"), "fp16");
        assert_eq!(word(Some(Some((6, 1))), ""), "fp32");
        assert_eq!(word(Some(None), ""), "fp32");
        assert_eq!(word(None, "avx2 fma avx512f"), "fp32");
        assert_eq!(word(None, "avx2 fma avx512f avx512_bf16"), "bf16");
        assert_eq!(word(None, "asimd bf16"), "bf16");
    }
}
